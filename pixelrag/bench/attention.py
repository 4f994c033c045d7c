"""Forward and backward of a decoder's layers by attention kernel, rows of one document or several.

Documents of a packed row are isolated from one another; a kernel that masks a whole row computes
its square, one that goes document by document does not. Needed is the documents' own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.models import DTYPES, FIRST_WORD, causal
from pixelrag.bench.rows import Case, Row
from pixelrag.config.bench import AttentionConfig, AttentionWork
from pixelrag.errors import ModelError
from pixelrag.models.causal import CausalLM
from pixelrag.models.rows import Rows
from pixelrag.train.flops import ModelShape

SUITE = "attention"


def groups(config: AttentionConfig) -> list[list[Case]]:
    """Kernels by documents of a row."""
    return [
        [{"documents": count, "kernel": kernel} for kernel in config.work.kernels]
        for count in config.work.documents
    ]


def measure(config: AttentionConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases)


def make_rows(work: AttentionWork, documents: int, vocab_size: int) -> Rows:
    """Rows of equally long documents of random tokens."""
    draw = torch.Generator().manual_seed(0)
    shape = (work.rows, work.row_length)
    ids_BT = torch.randint(FIRST_WORD, vocab_size, shape, generator=draw)
    length = -(-work.row_length // documents)
    positions_T = torch.arange(work.row_length) % length
    return Rows.of(ids_BT, positions_T.expand(shape))


def prepare(
    config: AttentionConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """A model for each kernel that can run here."""
    rows = make_rows(config.work, int(cases[0]["documents"]), config.student.vocab_size)
    return [_prepare(config, case, rows, device) for case in cases]


def _prepare(
    config: AttentionConfig, case: Case, rows: Rows, device: torch.device
) -> Ready | Skipped:
    precision = config.work.precision
    try:
        model = causal(
            config.student, device, dtype=DTYPES[precision], attention=str(case["kernel"]),
            half_precision=precision == "bf16",
        )  # fmt: skip
    except ModelError as error:
        return Skipped(str(error))
    shape = ModelShape.of(model, config.student.vocab_size)
    tokens = rows.input_ids_BT.numel()
    squares = int((rows.cu_seqlens.diff().long() ** 2).sum())
    # No head: states are summed.
    flops = 3 * shape.forward(tokens, squares, 0)
    step = _step(model.train(), rows.to(device))
    return Ready(step, tokens, None, flops, None, precision)


def _step(model: CausalLM, rows: Rows) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.hidden(rows).sum().backward()

    return step
