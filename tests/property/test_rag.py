"""The RAG step has the gradient of plain autograd over one question after the other.

Over random forms of the loss, chunks and ranks, on real architectures in float64.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from pixelrag.distributed.env import process_group
from pixelrag.losses.rag_objective import RagObjective
from tests.distributed.harness import run_cases
from tests.distributed.rag_trials import make_material, run_trial
from tests.distributed.trials import assert_exact
from tests.property.numerics import assert_same, drawn, tried

RANDOM = st.randoms(use_true_random=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rag")
    make_material(root)
    return root


def form_of(draw: random.Random) -> dict[str, Any]:
    """Any loss that a configuration may ask for."""
    answer = draw.choice(["rag_sequence", "rag_token", "fid"])
    retrievers = ["emdr2", "pdist", "loop", "adist"] + ["marginal"] * 3 * (answer != "fid")
    return {
        "answer": answer,
        "retriever": draw.choice(retrievers),
        "label_smoothing": draw.choice([0.0, 0.2]),
        "contrastive_weight": draw.choice([0.0, 0.7]),
        "reader_temperature": draw.choice([0.2, 1.0, 3.0]),
        "retriever_weight": draw.choice([0.5, 1.0]),
    }


def trial_of(draw: random.Random) -> dict[str, Any]:
    """A step as a user may configure it."""
    case = form_of(draw)
    kinds = ["t5", "bart"] if case["answer"] == "fid" else ["t5", "bart", "qwen3"]
    parts = ["question", "document", "generator"]
    trained = [p for p in parts if draw.random() < 0.75] or ["question"]
    return case | {
        "generator": draw.choice(kinds),
        "train": trained,
        "chunks": [draw.randint(1, 5) for _ in range(3)],
        "dtype": "float64",
    }


@tried(8)
@given(RANDOM)
def test_chunks_and_order_change_nothing(folder, draw):
    case = trial_of(draw) | {"folder": str(folder), "rows": [draw.randint(2, 5)]}
    note(str(case))
    with process_group("cpu") as world:
        assert_exact([run_trial(world, case)], 1e-9)


def _on_an_engine(draw: random.Random) -> dict[str, Any]:
    engine = draw.choice(["ddp", "fsdp2"])
    return trial_of(draw) | {"engine": engine, "rows": [draw.randint(2, 3), draw.randint(0, 3)]}


ENGINES = drawn(_on_an_engine, 6)


@pytest.fixture(scope="module")
def ranks(folder):
    cases = {name: case | {"folder": str(folder)} for name, case in ENGINES.items()}
    return run_cases("tests.distributed.rag_trials:run_trial", cases, nproc=2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ENGINES)
def test_ranks_and_engines_change_nothing(ranks, name):
    assert_exact(ranks[name], 1e-9)


def _inputs(draw: random.Random, objective: RagObjective, size: float, dtype: torch.dtype):
    """Scores, what the generator says, pairs and masks of a few questions; some find little."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    B, K, T = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
    scores_BK = (size * torch.randn(B, K, generator=generator, dtype=torch.double)).to(dtype)
    pair_BK = torch.arange(B * K).reshape(B, K)
    for b in range(B):
        for k in range(draw.randint(0, K), K):  # missing; perhaps all of them
            scores_BK[b, k], pair_BK[b, k] = -torch.inf, -1
    said_NX = -size * torch.rand(B * K, T * 1, generator=generator, dtype=torch.double)
    if objective.answer == "fid":
        said_NX = said_NX[:B]
    mask_BT = torch.arange(T)[None] < torch.tensor([[draw.randint(1, T)] for _ in range(B)])
    extra = {}
    if objective.reads_apart or objective.leaves_out:
        readings_NT = -size * torch.rand(B * K, T, generator=generator, dtype=torch.double)
        extra["readings_NT"] = readings_NT.to(dtype)
    if objective.watches:
        attention_BK = torch.rand(B, K, generator=generator, dtype=torch.double)
        extra["attention_BK"] = attention_BK.masked_fill(pair_BK < 0, 0).to(dtype)
    return scores_BK, said_NX.to(dtype), pair_BK, mask_BT, extra


@tried(80)
@given(RANDOM)
def test_no_valid_input_makes_nan(draw):
    """Scores and log-probabilities of 1e4, bf16, and questions that found one passage or none."""
    form = form_of(draw) | {"label_smoothing": 0.0, "exclude_bos": draw.random() < 0.3}
    objective = RagObjective(**form | {"reader_temperature": draw.choice([0.01, 1.0, 100.0])})
    dtype = draw.choice([torch.float32, torch.bfloat16])
    scores, said, pair, mask, extra = _inputs(draw, objective, draw.choice([1.0, 300, 1e4]), dtype)
    scores.requires_grad_()
    said.requires_grad_()
    loss = objective(scores, said, pair, mask, **extra).loss_B.sum()
    assert torch.isfinite(loss), form
    gradients = torch.autograd.grad(loss, (scores, said), allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in gradients), form


@tried(40)
@given(RANDOM)
def test_the_order_of_questions_and_passages_changes_nothing(draw):
    objective = RagObjective(**form_of(draw) | {"label_smoothing": 0.0})
    note(str(objective))
    scores, said, pair, mask, extra = _inputs(draw, objective, 3.0, torch.double)
    scores.requires_grad_()
    said.requires_grad_()

    def gradients(*places) -> list[torch.Tensor]:
        loss = (
            objective(*places).loss_B if not extra else objective(*places[:4], **places[4]).loss_B
        )
        found = torch.autograd.grad(loss.sum(), (scores, said), allow_unused=True)
        return [loss.sum(), *(g for g in found if g is not None)]

    wanted = gradients(scores, said, pair, mask, *([extra] if extra else []))
    B, K = scores.shape
    rows, columns = draw.sample(range(B), B), draw.sample(range(K), K)
    moved = dict(extra)
    if "attention_BK" in moved:
        moved["attention_BK"] = moved["attention_BK"][rows][:, columns]
    told = said[rows] if objective.answer == "fid" else said
    got = gradients(
        scores[rows][:, columns], told, pair[rows][:, columns], mask[rows],
        *([moved] if moved else []),
    )  # fmt: skip
    assert_same(got, wanted)
