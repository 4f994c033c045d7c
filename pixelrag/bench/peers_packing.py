"""Samples to rows: ours (first-fit decreasing) and TRL's pack_dataset (best-fit decreasing).

TRL copies tokens into rows as it packs. Ours plans rows (`pixelrag-plan`) and lays out each when
its batch is made, with labels, positions and bounds of documents; `pixelrag` does all of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from pixelrag.bench.cases import Ready, Skipped
from pixelrag.bench.packing import make_store
from pixelrag.bench.rows import Case
from pixelrag.config.bench import PackingWork, PeerPacking, PeersConfig
from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.packed_batch import PackedCollator
from pixelrag.data.token_store import TokenStore

NEEDS = {"trl": "trl"}
_VOCABULARY = 32_000
# Rows that ours lays out at once.
_BATCH = 16


def groups(config: PeersConfig) -> list[list[Case]]:
    """Both."""
    return [[{"candidate": name} for name in CANDIDATES]]


def prepare(
    config: PeersConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """All on the same samples, on the CPU."""
    work = config.packing
    sizes = PackingWork(samples=work.samples, row_length=work.row_length)
    store = make_store(sizes, "long_tail", _VOCABULARY)
    return [_ready(CANDIDATES[str(case["candidate"])], store, work) for case in cases]


def _ready(make: Callable, store: TokenStore, work: PeerPacking) -> Ready:
    pack = make(store, work.row_length)
    rows: list[int] = []
    tokens = int(store.lengths.sum())

    def step() -> None:
        rows[:] = [pack()]

    def figures() -> Mapping[str, float]:
        return {"rows": float(rows[0]), "fill": tokens / (rows[0] * work.row_length)}

    return Ready(step, tokens, figures=figures)


def ours(store: TokenStore, row_length: int) -> Callable[[], int]:
    """Plan the rows, then lay all of them out."""

    def run() -> int:
        plan = PackPlan(store, RowSettings(row_length))
        collate = partial(PackedCollator(plan, 0), 0)
        for start in range(0, plan.num_rows, _BATCH):
            collate(range(start, min(start + _BATCH, plan.num_rows)))
        return plan.num_rows

    return run


def plan_only(store: TokenStore, row_length: int) -> Callable[[], int]:
    """Plan the rows, which is all that a run does before its first step."""
    return lambda: PackPlan(store, RowSettings(row_length)).num_rows


def trl(store: TokenStore, row_length: int) -> Callable[[], int]:
    """`trl.pack_dataset`, in one batch, without its cache."""
    from datasets import Dataset, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_progress_bars()
    ids = [store[sample].ids.tolist() for sample in range(len(store))]
    dataset = Dataset.from_dict({"input_ids": ids})
    options = {"batch_size": None, "load_from_cache_file": False, "keep_in_memory": True}
    return lambda: len(pack_dataset(dataset, row_length, "bfd", map_kwargs=options))


CANDIDATES = {"pixelrag": ours, "pixelrag-plan": plan_only, "trl": trl}
