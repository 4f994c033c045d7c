"""One trial: steps of the RAG loss on an engine, against a float64 reference of one process.

The reference shares models and tokenizers with the package but no part of the algorithm: it goes
through one question and one document after the other, with plain autograd over formulas written
out here.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelrag.distributed.env import World
from pixelrag.engine import build_engine
from pixelrag.gradcache.rag import rag_step
from pixelrag.gradcache.rag_batch import RagBatch
from pixelrag.losses.rag_objective import RagObjective
from pixelrag.models.precision import keep_float64
from tests.distributed.toy import Reference, make_optimizer, norm_ratio, relative_error
from tests.distributed.trials import final_errors

K = 3
LEARNING_RATE, EPSILON = 4e-3, 1e-3
DEFAULTS: dict[str, Any] = {
    "folder": "",
    "engine": "ddp",
    "grad_sync": "auto",
    "params": "auto",
    "dtype": "float32",
    "generator": "t5",
    "shared": False,
    "train": ["question", "document", "generator"],
    "learnable": True,
    "chunks": [2, 2, 2],  # queries, documents, pairs
    "rows": None,  # questions of each rank; 0 = a filler; None: 4 on one rank, else 3, 1
    "images": False,
    "steps": 1,
    "answer": "rag_sequence",
    "retriever": "marginal",
    "exclude_bos": False,
    "label_smoothing": 0.0,
    "contrastive_weight": 0.0,
    "reader_temperature": 1.0,
    "retriever_weight": 1.0,
}
_QUESTIONS = (
    "who jumps over the dog", "what returns documents", "file", "which class parses numbers",
    "how are lines split and counted", "what is a query", "return",
)  # fmt: skip
_ANSWERS = ("fox", "a search engine", "lines and words", "the lazy dog", "value")
_PASSAGES = (
    "the quick brown fox", "a search engine returns documents", "read the file, split the lines",
    "class Parser", "relevant to the user's query or not", "x", "count the words in the list",
    "return self.value if name in self.items else None", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """As `pixelrag.data.passages.Passage`."""

    title: str
    text: str | None
    image: Path | None


@dataclass(frozen=True)
class Row:
    """A question with the passages (numbers) that were retrieved for it."""

    question: str
    answer: str
    found: tuple[int, ...]
    gold: tuple[int, ...]


def make_material(folder: Path) -> None:
    """Tiny models of every kind, and tiles."""
    from PIL import Image

    from pixelrag.models.tiny import save_tiny_bert, save_tiny_qwen3_vl
    from pixelrag.models.tiny_causal import save_tiny_causal
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    for name, seed in (("question", 1), ("document", 2)):
        save_tiny_bert(folder / name, hidden_size=16, num_layers=2, seed=seed)
    for kind in ("t5", "bart"):
        save_tiny_seq2seq(folder / kind, kind, hidden_size=16, num_layers=2, seed=3)
    save_tiny_causal(folder / "qwen3", "qwen3", hidden_size=16, seed=4)
    save_tiny_qwen3_vl(folder / "qwen3_vl", hidden_size=16, num_layers=2, vision_size=16, seed=5)
    for number in range(3):
        draw = np.random.default_rng(number)
        pixels = draw.integers(0, 255, (32 + 32 * number, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def optimizer_of(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Small steps: AdamW divides by the gradient's size, and some of these are rounding alone."""
    optimizer = make_optimizer(named)
    for group in optimizer.param_groups:
        group |= {"lr": LEARNING_RATE, "eps": EPSILON}
    return optimizer


def make_row(step: int, index: int) -> Row:
    """Row ``index`` of the global batch of ``step``, the same whichever rank holds it."""
    draw = np.random.default_rng(1000 * step + index)
    count = 1 + (index + step) % K  # the rest is missing
    found = draw.permutation(len(_PASSAGES))[:count]
    gold = draw.permutation(found)[: index % 3].tolist()
    return Row(
        _QUESTIONS[(index + 3 * step) % len(_QUESTIONS)],
        _ANSWERS[(2 * index + step) % len(_ANSWERS)],
        tuple(int(i) for i in found),
        tuple(int(i) for i in gold),
    )


def passage(case: dict[str, Any], number: int) -> Passage:
    """A passage of the trials by number; with images, some of them are tiles."""
    if case["images"] and number < 3:
        return Passage("", None, Path(case["folder"]) / f"{number}.png")
    return Passage("t" * (number % 2), _PASSAGES[number], None)


@functools.cache
def load(folder: str, name: str, dtype: str) -> tuple[Any, Any]:
    """A model and its preprocessor; callers copy the model."""
    from pixelrag.config.rag_models import EncoderConfig, GeneratorConfig
    from pixelrag.models.generator_load import load_generator
    from pixelrag.models.load import load_embedder

    path, kind = str(Path(folder) / name), getattr(torch, dtype)
    if name in ("question", "document"):
        return load_embedder(EncoderConfig(name_or_path=path), dtype=kind)
    config = GeneratorConfig(name_or_path=path, attention="eager")
    return load_generator(config, dtype=kind)


def objective_of(case: dict[str, Any]) -> RagObjective:
    """The loss a case asks for."""
    names = (
        "answer", "retriever", "exclude_bos", "label_smoothing", "contrastive_weight",
        "reader_temperature", "retriever_weight",
    )  # fmt: skip
    vocab_size = load(case["folder"], case["generator"], case["dtype"])[0].vocab_size
    return RagObjective(**{name: case[name] for name in names}, vocab_size=vocab_size)


def make_model(case: dict[str, Any], dtype: str) -> Any:
    """The container a case asks for."""
    from pixelrag.models.rag import RagModel

    def part(name: str) -> Any:
        return copy.deepcopy(load(case["folder"], name, dtype)[0])

    model = RagModel(
        part("question"),
        None if case["shared"] else part("document"),
        part(case["generator"]),
        train=case["train"],
        temperature=0.3,
        learnable_temperature=case["learnable"],
        vocabulary=objective_of(case).vocabulary,
    )
    return model.to(torch.float64) if dtype == "float64" else model


def documents_of(case: dict[str, Any], numbers: list[int]) -> dict[str, torch.Tensor]:
    """Inputs of the document encoder."""
    from pixelrag.data.schema import Document

    prepare = load(case["folder"], "document", case["dtype"])[1]
    return prepare.documents([Document.of_text(_PASSAGES[number]) for number in numbers])


def rank_batch(case: dict[str, Any], rows: list[Row], num_real: int) -> RagBatch:
    """Collate: distinct documents and pairs, each sorted by length, as the job does it."""
    queries = load(case["folder"], "question", case["dtype"])[1]
    prepare = load(case["folder"], case["generator"], case["dtype"])[1]
    distinct = sorted({n for row in rows for n in row.found}, key=lambda n: len(_PASSAGES[n]))
    document_BK = torch.full((len(rows), K), -1)
    pair_BK = torch.full((len(rows), K), -1)
    pairs = sorted(
        ((b, k) for b, row in enumerate(rows) for k in range(len(row.found))),
        key=lambda pair: (len(_PASSAGES[rows[pair[0]].found[pair[1]]]), pair),
    )
    for number, (b, k) in enumerate(pairs):
        document_BK[b, k] = distinct.index(rows[b].found[k])
        pair_BK[b, k] = number
    targets = prepare.targets([row.answer for row in rows], ["-"] * len(rows))
    read = prepare.pairs(
        [rows[b].question for b, _ in pairs],
        [passage(case, rows[b].found[k]) for b, k in pairs],
        [rows[b].answer for b, _ in pairs],
        ["-"] * len(pairs),
    )
    readings, generator = None, read
    joint = {}
    if prepare.text.is_seq2seq:
        joint = joint_prompts(case, rows, [list(row.found) for row in rows]) | targets
    if case["answer"] == "fid":
        generator, readings = joint, read
        if case["retriever"] == "loop":
            readings = joint_prompts(
                case,
                [rows[b] for b, _ in pairs],
                [[n for j, n in enumerate(rows[b].found) if j != k] for b, k in pairs],
            ) | {key: read[key] for key in ("target_ids", "target_mask")}
    if case["retriever"] == "adist":
        readings = joint or read | {
            "passage_mask": prepare.prompts(
                [rows[b].question for b, _ in pairs],
                [passage(case, rows[b].found[k]) for b, k in pairs],
                ["-"] * len(pairs),
                mark=True,
            )["passage_mask"]
        }
    return RagBatch(
        queries=queries.queries([row.question for row in rows]),
        documents=documents_of(case, distinct),
        generator=generator,
        readings=readings,
        document_BK=document_BK,
        pair_BK=pair_BK,
        target_mask_BT=targets["target_mask"].bool(),
        num_real=num_real,
        document_keys=tuple(distinct),
        gold=tuple(row.gold for row in rows),
    )


def joint_prompts(
    case: dict[str, Any], rows: list[Row], found: list[list[int]]
) -> dict[str, torch.Tensor]:
    """Prompts of fusion in the decoder."""
    prepare = load(case["folder"], case["generator"], case["dtype"])[1]
    passages = [
        [passage(case, n) for n in numbers] + [None] * (K - len(numbers)) for numbers in found
    ]
    return prepare.joint([row.question for row in rows], passages, ["-"] * len(rows))


def run_trial(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train ``steps`` steps; the worst errors against the reference, and the rank's weights' sum.

    Keys as of `tests.distributed.trials.run_trial`.
    """
    unknown = overrides.keys() - DEFAULTS.keys()
    assert not unknown, unknown
    case = DEFAULTS | overrides
    model = make_model(case, case["dtype"])
    trained = model.trained
    start = make_model(case, "float64")
    start.load_state_dict(model.state_dict())
    reference = Reference(start, optimizer_of)
    engine = build_engine(
        model, optimizer_of, name=case["engine"], device=world.device, blocks=model.blocks(),
        grad_sync=case["grad_sync"], params=case["params"],
    )  # fmt: skip
    objective = objective_of(case)
    sizes = case["rows"] or ([4] if world.world_size == 1 else [3, 1])
    worst: dict[str, float] = {}
    for step in range(case["steps"]):
        first = sum(sizes[: world.rank])
        own = [make_row(step, i) for i in range(first, first + max(1, sizes[world.rank]))]
        result = rag_step(
            engine,
            rank_batch(case, own, sizes[world.rank]),
            objective,
            dict(zip(("query", "document", "generator"), case["chunks"], strict=True)),
            trained=trained,
        )
        everyone = [make_row(step, i) for i in range(sum(sizes))]
        expected = reference_loss(case, reference.model, everyone)
        gradients = reference.backward(expected)
        errors = {
            "loss": abs(result.loss / expected.item() - 1),
            "gradient": relative_error(engine.gradients(), gradients),
            "norm_ratio": abs(norm_ratio(engine.gradients(), gradients) - 1),
        }
        if case["learnable"]:
            # It is a sum of shares of both signs; the largest gradient is its measure.
            name = "logit_scale.log_scale"
            size = max(abs(gradients[name].item()), 0.1)
            errors["temperature"] = abs(engine.gradients()[name] - gradients[name]).item() / size
        norm, expected_norm = engine.step(0.5), reference.step(0.5)
        errors["norm"] = abs(norm / expected_norm - 1)
        worst = {key: max(value, worst.get(key, 0.0)) for key, value in errors.items()}
        assert result.num_questions == len(everyone)
        for part, role in (("question", "query"), ("document", "document")):
            assert (role in trained) == (part in case["train"])
    worst |= final_errors(engine, reference)
    with engine.inference():
        probe, _ = engine("query", **rank_batch(case, [make_row(9, 0)], 1).queries)
    return worst | {"probe": probe.tolist()}


def reference_loss(case: dict[str, Any], model: Any, rows: list[Row]) -> torch.Tensor:
    """The mean loss of all ranks' questions."""
    scale = model.logit_scale().clamp(0.0, math.log(100.0)).exp()[0]
    losses, contrasts = [], []
    vectors = {
        number: model("document", **documents_of(case, [number]))[0][0]
        for number in sorted({n for row in rows for n in row.found})
    }
    queries = load(case["folder"], "question", "float64")[1]
    for row in rows:
        q = model("query", **queries.queries([row.question]))[0][0]
        scores = torch.stack([scale * (q @ vectors[n]) for n in row.found])
        losses.append(row_loss(case, model, row, scores))
        relevant = [n for n in row.gold if n in vectors]
        if case["contrastive_weight"] and relevant:
            others = [n for n in vectors if n not in relevant]
            # Each relevant passage against those that are not.
            terms = [
                -torch.stack([scale * (q @ vectors[n]) for n in (own, *others)]).log_softmax(0)[0]
                for own in relevant
            ]
            contrasts.append(torch.stack(terms).mean())
    loss = torch.stack(losses).mean()
    if contrasts:
        loss = loss + case["contrastive_weight"] * torch.stack(contrasts).mean()
    return loss


def row_loss(case: dict[str, Any], model: Any, row: Row, scores: torch.Tensor) -> torch.Tensor:
    """One question's loss."""
    skip = int(case["exclude_bos"])
    every = [read(case, model, row, [n], fused=False) for n in row.found]  # [T, V] each
    answer_ids = targets_of(case, row)["target_ids"][0]
    apart = [chosen(tokens, answer_ids) for tokens in every]
    whole = torch.stack([tokens.sum() for tokens in apart])
    prior = scores.log_softmax(0)
    marginal = case["retriever"] == "marginal"
    used = prior if marginal else prior.detach()
    size = every[0].shape[1]
    if case["answer"] == "fid":
        fused = read(case, model, row, list(row.found), fused=True)
        answer = -chosen(fused, answer_ids)[skip:].sum()
        spread = -fused.sum()
    elif case["answer"] == "rag_sequence":
        answer = -(used + torch.stack([t[skip:].sum() for t in apart])).logsumexp(0)
        spread = -(size * used + torch.stack([t.sum() for t in every])).logsumexp(0)
    else:
        answer = -(used[:, None] + torch.stack(apart)[:, skip:]).logsumexp(0).sum()
        spread = -(used[:, None, None] + torch.stack(every)).logsumexp(0).sum()
    epsilon = case["label_smoothing"]
    answer = (1 - epsilon) * answer + epsilon / size * spread
    if marginal:
        return answer
    if case["retriever"] == "emdr2":
        told = torch.stack(apart).detach()
        by_token = (prior[:, None] + told).logsumexp(0).sum()
        whole_answer = (prior + told.sum(1)).logsumexp(0)
        log_p = by_token if case["answer"] == "rag_token" else whole_answer
        return answer - case["retriever_weight"] * log_p
    told = whole.detach()
    if case["retriever"] == "loop":
        told = -torch.stack([left_out(case, model, row, prior, whole, k) for k in range(len(told))])
        told = told.detach()
    if case["retriever"] == "adist":
        with keep_float64(torch.float64):
            told = torch.stack(looks(case, model, row)).detach()
    p = (told / case["reader_temperature"]).softmax(0)
    divergence = (p * (p.log() - prior)).sum()
    return answer + case["retriever_weight"] * divergence


def left_out(
    case: dict[str, Any], model: Any, row: Row, prior: torch.Tensor, whole: torch.Tensor, k: int
) -> torch.Tensor:
    """Log-probability of the answer without document ``k``."""
    others = [j for j in range(len(row.found)) if j != k]
    if case["answer"] == "fid":
        found = read(case, model, row, [row.found[j] for j in others], fused=True)
        return chosen(found, targets_of(case, row)["target_ids"][0]).sum()
    if not others:
        return torch.zeros_like(prior[0])  # alone, its share is 1 whatever stands here
    return (prior[others].log_softmax(0) + whole[others]).logsumexp(0)


def looks(case: dict[str, Any], model: Any, row: Row) -> list[torch.Tensor]:
    """How much each document is looked at, from what transformers itself returns."""
    generator, prepare = model.generator, load(case["folder"], case["generator"], "float64")[1]
    values: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda m, a, out: values.append(out[0]))
        for name, module in generator.lm.named_modules()
        if name.endswith(("EncDecAttention.v", "encoder_attn.v_proj"))
        or (not generator.is_seq2seq and name.endswith("v_proj"))
    ]
    targets = targets_of(case, row)
    total: list[torch.Tensor] = []

    def add(weights: tuple[torch.Tensor, ...], owner: list[int], rows: slice) -> None:
        for number in sorted({n for n in owner if n >= 0}):
            places = [place for place, n in enumerate(owner) if n == number]
            parts = []
            for layer_1HTS, value_SX in zip(weights, values, strict=True):
                heads = layer_1HTS.shape[1]
                groups = value_SX.shape[1] // (8 if case["generator"] != "bart" else 4)
                norms_SG = value_SX.unflatten(1, (groups, -1)).norm(dim=2)
                norms_SH = norms_SG.repeat_interleave(heads // groups, 1)
                share_HTS = layer_1HTS[0][:, rows] * norms_SH.T[:, None]
                parts.append(share_HTS[:, :, places].sum(2).mean())
            total.append(torch.stack(parts).mean())
        values.clear()

    if generator.is_seq2seq:
        prompts = joint_prompts(case, [row], [list(row.found)])
        states, mask = generator.encode(prompts["input_ids"], prompts["attention_mask"])
        output = generator.base_model(
            encoder_outputs=(states,), attention_mask=mask, labels=targets["target_ids"],
            output_attentions=True,
        )  # fmt: skip
        owner = [k if seen else -1 for k, doc in enumerate(prompts["attention_mask"][0].tolist())
                 for seen in doc]  # fmt: skip
        add(output.cross_attentions, owner, slice(None))
    else:
        for number in row.found:
            prompts = prepare.prompts([row.question], [passage(case, number)], ["-"], mark=True)
            ids = torch.cat([prompts["input_ids"], targets["target_ids"]], 1)
            output = generator.base_model(input_ids=ids, output_attentions=True)
            length = targets["target_ids"].shape[1]
            owner = [mark - 1 for mark in prompts["passage_mask"][0].tolist()] + [-1] * length
            add(output.attentions, owner, slice(-length - 1, -1))
    for handle in handles:
        handle.remove()
    return total


def targets_of(case: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """The answer's tokens."""
    return load(case["folder"], case["generator"], "float64")[1].targets([row.answer], ["-"])


def chosen(log_probs_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens that are there."""
    return log_probs_TV[torch.arange(len(ids_T)), ids_T]


def read(
    case: dict[str, Any], model: Any, row: Row, numbers: list[int], *, fused: bool
) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at the answer's tokens, [T, V]."""
    prepare = load(case["folder"], case["generator"], "float64")[1]
    targets = targets_of(case, row)
    if fused:
        prompts = joint_prompts(case, [row], [numbers])
    else:
        prompts = prepare.prompts([row.question], [passage(case, numbers[0])], ["-"])
    images = prompts.get("pixel_values"), prompts.get("image_grid_thw")
    logits = model.generator._logits(
        prompts["input_ids"], prompts["attention_mask"], *targets.values(),
        None if images[0] is None else images, False,
    )  # fmt: skip
    return logits[0].double().log_softmax(-1)
