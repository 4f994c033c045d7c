"""The whole RAG step, both encoders, generator and temperature, has the gradient of one process.

Each trial is two clipped AdamW steps over chunks of two rows, on real architectures, with missing
documents, documents that questions share, and ranks of unequal size.
"""

import pytest

from tests.distributed.harness import Results, run_alone, run_cases
from tests.distributed.rag_trials import make_material
from tests.distributed.trials import assert_exact

pytestmark = pytest.mark.distributed

TRIAL = "tests.distributed.rag_trials:run_trial"
ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
SHARDED = {"grad_sync": "per_chunk", "params": "sharded"}
WHOLE = {"chunks": [99, 99, 99]}

FORMS = {
    "token_decoder": {"answer": "rag_token", "generator": "qwen3"},
    "token_bos": {"answer": "rag_token", "generator": "bart", "exclude_bos": True},
    "sequence_bos": {"generator": "bart", "exclude_bos": True},
    "emdr2": {"retriever": "emdr2"},
    "emdr2_token": {"retriever": "emdr2", "answer": "rag_token"},
    "pdist": {"retriever": "pdist", "reader_temperature": 3.0, "retriever_weight": 0.5},
    "loop": {"retriever": "loop"},
    "fid_emdr2": {"answer": "fid", "retriever": "emdr2"},
    "fid_pdist": {"answer": "fid", "retriever": "pdist", "generator": "bart"},
    "fid_loop": {"answer": "fid", "retriever": "loop"},
    "adist": {"retriever": "adist", "reader_temperature": 0.2},
    "adist_token": {"retriever": "adist", "answer": "rag_token", "generator": "bart"},
    "adist_decoder": {"retriever": "adist", "generator": "qwen3", "reader_temperature": 0.1},
    "fid_adist": {"answer": "fid", "retriever": "adist", "reader_temperature": 0.3},
    "smooth": {"label_smoothing": 0.2},
    "smooth_bos": {"label_smoothing": 0.3, "generator": "bart", "exclude_bos": True},
    "smooth_token": {"label_smoothing": 0.2, "answer": "rag_token"},
    "smooth_fid": {"label_smoothing": 0.2, "answer": "fid", "retriever": "pdist"},
    "contrastive": {"contrastive_weight": 0.7},
    "shared": {"shared": True},
    "fixed_temperature": {"learnable": False},
    "query_side": {"train": ["question"]},
    "generator_alone": {"train": ["generator"]},
    "no_document": {"train": ["question", "generator"]},
}
TILES = {"generator": "qwen3_vl", "images": True}
FILLER = {"rows": [2, 0], "contrastive_weight": 0.5}
# What single precision shows is its rounding; in double precision nothing else is left.
EXACT = {name: case | {"dtype": "float64", "steps": 1} for name, case in FORMS.items()}
ALONE = {
    **{engine: {"engine": engine, "steps": 2} for engine in ENGINES},
    **{f"{engine}_whole": {"engine": engine} | WHOLE for engine in ENGINES},
    "single": {"chunks": [1, 3, 1]},
    "tiles": TILES,
    **EXACT,
}
PAIR = {
    **{engine: {"engine": engine, "steps": 2} for engine in ENGINES},
    **{f"{engine}_whole": {"engine": engine} | WHOLE for engine in ENGINES},
    **{
        f"{engine}_sharded": {"engine": engine, "steps": 2} | SHARDED
        for engine in ("zero3", "fsdp2")
    },
    **{f"{engine}_filler": {"engine": engine} | FILLER for engine in ("zero3", "fsdp2")},
    **{f"{engine}_tiles": {"engine": engine} | TILES for engine in ("zero3", "fsdp2")},
    "zero3_decoder": {"engine": "zero3"} | FORMS["token_decoder"],
    "fsdp2_fid": {"engine": "fsdp2"} | FORMS["fid_pdist"],
    "fsdp2_adist": {"engine": "fsdp2"} | FORMS["fid_adist"] | SHARDED,
    "zero3_adist": {"engine": "zero3"} | FORMS["adist_decoder"] | SHARDED,
    "zero3_smooth": {"engine": "zero3"} | FORMS["smooth_token"],
    "zero3_query_side": {"engine": "zero3"} | FORMS["query_side"],
    "fsdp2_no_document": {"engine": "fsdp2"} | FORMS["no_document"],
    "zero3_shared": {"engine": "zero3"} | FORMS["shared"],
    "contrastive": EXACT["contrastive"],
    "filler": FILLER | {"dtype": "float64"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("rag")
    make_material(root)
    return str(root)


def _in(folder: str, cases: dict[str, dict]) -> dict[str, dict]:
    return {name: case | {"folder": folder} for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone(folder: str) -> Results:
    return run_alone(TRIAL, _in(folder, ALONE))


@pytest.fixture(scope="module")
def pair(folder: str) -> Results:
    return run_cases(TRIAL, _in(folder, PAIR), nproc=2)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone: Results, name: str):
    assert_exact(alone[name], 1e-10 if name in EXACT else 1e-5)


@pytest.mark.parametrize("name", PAIR)
def test_two_ranks(pair: Results, name: str):
    assert_exact(pair[name], 1e-10 if PAIR[name].get("dtype") == "float64" else 1e-5)


def test_the_trials_are_made_of_unlike_losses(alone: Results):
    """Otherwise a form that does nothing would pass for another."""
    probes = {str(alone[name][0]["probe"]) for name in FORMS if name != "generator_alone"}
    assert len(probes) == len(FORMS) - 1
