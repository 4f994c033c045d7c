"""Options of the loss through a run: on ranks, over a resumption, in evaluation and export."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pixelrag.losses.contrastive import Objective
from pixelrag.train.run_state import read_parts
from pixelrag.verify.naive import naive_loss
from tests.train import nursery
from tests.train.material import command, lines_of, merged, series, text_rows, write_jsonl

pytestmark = pytest.mark.distributed

COMMON = {"hardness_alpha": 2.0, "label_smoothing": 0.1, "matryoshka_dims": [8, 4]}
COMMON |= {"matryoshka_weights": [0.5, 0.25], "mask_margin": 0.2}
LOSSES: dict[str, dict[str, Any]] = {
    "infonce": COMMON | {"bidirectional": True},
    "siglip": COMMON | {"name": "siglip", "bias": -4.0},
}


def rows_with_several_positives(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Every third row has a second positive; every fourth names the next row's among its own."""
    rows = text_rows(count + 1, first=first)
    for number, row in enumerate(rows[:-1]):
        if number % 3 == 0:
            row["pos_passages"] = [f"{row['passage']}, in other words"]
        if number % 4 == 1:
            row["neg_passages"] = [*row.get("neg_passages", []), rows[number + 1]["passage"]]
    return rows[:-1]


def embed(model: str, queries: list[str], texts: list[str]) -> list[torch.Tensor]:
    """Float64 embeddings of both, each text on its own batch's terms."""
    from pixelrag.config.parts import ModelConfig
    from pixelrag.data.schema import Document
    from pixelrag.models import load_embedder

    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=model))
    embedder.eval()
    documents = preprocessor.documents([Document.of_text(text) for text in texts])
    with torch.no_grad():
        sides = (preprocessor.queries(queries), documents)
        return [embedder(**inputs).double() for inputs in sides]


def naive_evaluation(run: Path, rows: list[dict[str, Any]], loss: dict[str, Any]) -> float:
    """The loss of the exported model over all rows, by the oracle."""
    texts, positives = [], []
    for row in rows:
        right = [row["passage"], *row.get("pos_passages", [])]
        positives.append(list(range(len(texts), len(texts) + len(right))))
        texts += [*right, *row.get("neg_passages", [])]
    queries = [row["query"] for row in rows]
    query_BD, document_ND = embed(str(run / "last"), queries, texts)
    guides = embed(loss["mask_guide"], queries, texts)
    exported = json.loads((run / "last" / "pixelrag.json").read_text())
    options = {key: value for key, value in loss.items() if key != "mask_guide"}
    dims, weights = options.pop("matryoshka_dims"), options.pop("matryoshka_weights")
    bias = torch.tensor([exported["bias"]]) if "bias" in options else None
    options.pop("bias", None)
    objective = Objective(**options, matryoshka=tuple(zip(dims, weights, strict=True)))
    scale = torch.tensor([1 / exported["temperature"]])
    found = naive_loss(
        objective, query_BD, document_ND, positives, scale, bias,
        content=[texts.index(text) for text in texts], guide_BN=guides[0] @ guides[1].T,
    )  # fmt: skip
    return float(found)


@pytest.mark.parametrize("name", LOSSES)
def test_options_act_on_ranks_after_resuming_in_evaluation_and_in_what_is_exported(
    name, base, shelf, tmp_path
):
    loss = LOSSES[name] | {"mask_guide": str(shelf / "bert")}
    held_out = rows_with_several_positives(9, first=40)
    write_jsonl(tmp_path / "train.jsonl", rows_with_several_positives(20))
    write_jsonl(tmp_path / "eval.jsonl", held_out)
    settings = {
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
        "loss": loss,
        "eval": {"every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "optim": {"learning_rate": 1e-2},
    }

    def start(output: str, *overrides: dict, **options: Any) -> nursery.Job:
        config = merged(base, settings, *overrides, {"output_dir": str(tmp_path / output)})
        return nursery.start(command(tmp_path, config), **options)

    start("alone").wait().check()
    alone, ring = tmp_path / "alone", tmp_path / "ring"
    two = {"batch": {"per_device_batch_size": 4}, "engine": {"name": "zero2"}}
    passed_on = {"loss": loss | {"exchange": "ring", "tile_size": 3}}
    fault = {"setup": "tests.train.faults:kill", "payload": {"batch": 4}}
    job = start("ring", two, passed_on, nproc=2, **fault)
    assert job.wait().codes == [-signal.SIGKILL] * 2
    other_tiles = {"loss": loss | {"exchange": "ring", "tile_size": 2}}
    ended = start("ring", two, other_tiles, nproc=2).wait().check()
    assert "checkpoint-2, step 2 of 4" in ended.outputs[0]

    figures = ["train/loss", "train/accuracy", "train/temperature", "train/grad_norm", "eval/loss"]
    if name == "siglip":
        figures.append("train/bias")
        weights = read_parts(ring / "checkpoint-4", "model")
        assert abs(weights["logit_scale.bias"].item() + 4.0) > 1e-3, "the bias is not trained"
        exported = json.loads((ring / "last" / "pixelrag.json").read_text())
        assert exported["bias"] == weights["logit_scale.bias"].item()
    for figure in figures:
        assert series(ring, figure) == pytest.approx(series(alone, figure), rel=2e-4), figure
    for run in (alone, ring):
        last = lines_of(run)[-1]["eval/loss"]
        assert last == pytest.approx(naive_evaluation(run, held_out, loss), rel=1e-5)


def test_equal_documents_are_no_negatives_unless_that_is_asked_for(base, tmp_path):
    """All rows have one document: with the mask nothing competes, without it everything does."""
    rows = [row | {"passage": "the same"} for row in text_rows(8, negatives=0)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "eval.jsonl", rows)
    for masks, loss in ((True, 0.0), (False, 2.0794)):
        settings = {
            "output_dir": str(tmp_path / f"masks-{masks}"),
            "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
            "batch": {"per_device_batch_size": 4},
            "loss": {"mask_same_content": masks},
            "optim": {"max_steps": 1, "warmup_steps": 0},
        }
        nursery.run(command(tmp_path, merged(base, settings)), nproc=2).check()
        run = tmp_path / f"masks-{masks}"
        assert series(run, "train/loss") == pytest.approx([loss], abs=1e-3)
        assert series(run, "eval/loss") == pytest.approx([loss], abs=1e-3)


def test_too_many_dimensions_are_refused(base, tmp_path):
    settings = {"output_dir": str(tmp_path / "run"), "loss": {"matryoshka_dims": [4096]}}
    ended = nursery.run(command(tmp_path, merged(base, settings)))
    assert ended.codes == [2]
    assert "loss.matryoshka_dims: got 4096, and the embeddings of" in ended.text


def test_a_guide_that_cannot_read_the_rows_is_refused(base, shelf, tmp_path):
    settings = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(shelf / "qwen3_vl")},
        "data": {"train": str(shelf / "mixed.jsonl")},
        "loss": {"mask_guide": str(shelf / "bert")},
    }
    ended = nursery.run(command(tmp_path, merged(base, settings)))
    assert ended.codes == [3]
    assert "model reads text only; name a vision model" in ended.text
    assert "in loss.mask_guide" in ended.text
