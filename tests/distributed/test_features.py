"""What a job may ask for, on every engine: each trial against the float64 reference.

The trials are those of `test_matrix`, two steps each, with the option under test.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import Results, run_cases
from tests.distributed.trials import assert_exact

pytestmark = pytest.mark.distributed

TRIAL = "tests.distributed.trials:run_trial"
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero0": {"engine": "zero0"},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero2-per_chunk": {"engine": "zero2", "grad_sync": "per_chunk"},
    "zero3": {"engine": "zero3"},
    "zero3-sharded": {"engine": "zero3", "params": "sharded", "grad_sync": "per_chunk"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-sharded": {"engine": "fsdp2", "params": "sharded", "grad_sync": "per_chunk"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    # Nothing may clip unless asked: DeepSpeed's own default is 1.0.
    "no clipping": {"max_norm": None},
    # Three global batches, each weighted by a third: nothing else may divide.
    "accumulation": {"accumulate": 3},
    # One rank brings a row that counts for nothing, and far fewer chunks than the other.
    "filler rank": {"rows": [7, 1], "filler": 1},
    "filler rank 0": {"rows": [1, 7], "filler": 0},
    "one row a rank": {"rows": [1, 1]},
    "one large chunk": {"chunk_size": 1000},
    "frozen parameters": {"frozen": ["encoder.tokens", "encoder.layers.0"]},
    "frozen vision": {"frozen": ["encoder.visual"]},
    "tied weights": {"tied": True},
    # Also taken in and out between two steps, which must not notice.
    "averaged weights": {"ema_decay": 0.6, "frozen": ["encoder.layers.0"]},
    # Non-reentrant checkpointing runs each layer once more; dropout masks must survive it.
    "checkpointing": {"checkpointing": True, "dropout": 0.3},
    # A rank short of chunks must not draw random numbers that the reference does not draw.
    "dropout": {"dropout": 0.3, "rows": [6, 2]},
    # Some chunks run again, in between what draws random numbers once; one rank has padding calls.
    "some graphs kept": {"replay": 3, "dropout": 0.3, "rows": [6, 2], "accumulate": 2},
    # Ranks cut unlike numbers of ragged chunks; after the first step they agree on what to keep.
    "chunks by tokens": {"chunk_tokens": 12, "rows": [6, 2], "replay": "auto"},
    # Query-side tuning, backward directly and by GradCache.
    "fixed documents": {"fixed_documents": True, "rows": [6, 1], "filler": 1, "dropout": 0.3},
    "fixed documents, direct": {"fixed_documents": True, "replay": "none", "exchange": "ring"},
    "all graphs kept": {"replay": "none", "checkpointing": True, "dropout": 0.3},
}
COMMON = {"hardness_alpha": 2.0, "label_smoothing": 0.1, "matryoshka": [[4, 0.5], [2, 2.0]]}
MANY = {"positives": 2, "content": True, "guide": True}
OPTIONS |= {
    "options of infonce": MANY
    | {"loss": COMMON | {"bidirectional": True, "mask_margin": 0.1, "tile_size": 3}},
    "options of infonce, ring": MANY
    | {"loss": COMMON | {"bidirectional": True, "mask_margin": 0.1}, "exchange": "ring"},
    "options of siglip, ring, filler rank": MANY
    | {"loss": COMMON | {"name": "siglip", "tile_size": 2}, "exchange": "ring"}
    | {"rows": [7, 1], "filler": 1, "accumulate": 2},
}
FEW = ("zero2-per_chunk", "zero3-sharded", "fsdp2-sharded")
PER_CHUNK_TOO = (
    *("averaged weights", "accumulation", "filler rank", "frozen vision", "checkpointing"),
    *("some graphs kept", "all graphs kept", "fixed documents"),
)
CASES = {
    f"{way}, {option}": WAYS[way] | OPTIONS[option] | {"steps": 2}
    for way in WAYS
    for option in OPTIONS
    if way not in FEW or option in PER_CHUNK_TOO
}
CASES |= {
    f"{way}, {option}, float64": WAYS[way] | OPTIONS[option] | {"steps": 2, "dtype": "float64"}
    for way in ("ddp", "fsdp2")
    for option in ("fixed documents", "fixed documents, direct")
}
# Everything in one unit, so that the vision branch shares it with layers that run always.
CASES |= {
    f"{way}, one unit": WAYS[way] | {"units": False}
    for way in ("zero3", "zero3-sharded", "fsdp2", "fsdp2-sharded")
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases(TRIAL, CASES, nproc=2)


@pytest.mark.parametrize("name", CASES)
def test_exact(results: Results, name: str) -> None:
    assert_exact(results[name], 1e-10 if name.endswith("float64") else 1e-5)
