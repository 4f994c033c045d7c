"""Runs the block kernel over a chunk, in blocks that stay in the processor's cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from pixelrag.losses.kd_kernel import BlockSpec, BlockTerms, TopKRows, block_terms

logger = logging.getLogger("pixelrag")

# fp32 numbers of a block and of one thread: 0.5 MiB, a few of which fit into a core's L2 cache.
_BLOCK_NUMBERS = 2**17
# A GPU wants blocks large enough to hide launches; scratch is then an eighth of a chunk.
_BLOCKS_PER_CHUNK = 8


class Blocks:
    """Scratch memory, and the sums over all blocks of a call.

    Attributes:
        ce, kd, top1: fp64 scalars, see `BlockTerms`.

    Args:
        spec: what is the same for all blocks.
        num_columns: V.
        chunk_size: the most tokens of a chunk.
        dtype: of the chunks' buffers.
        device: where they lie.
        compiled: run the kernel through `torch.compile`; where that fails, the log says why and
            the kernel runs as it is.
    """

    def __init__(
        self,
        spec: BlockSpec,
        *,
        num_columns: int,
        chunk_size: int,
        dtype: torch.dtype,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._spec = spec
        self._wide = torch.promote_types(dtype, torch.float32)
        self._rows = rows_per_block(num_columns, chunk_size, device)
        count = 2 if dtype == self._wide else 4
        self._scratch = [
            torch.empty(self._rows, num_columns, dtype=self._wide, device=device)
            for _ in range(count)
        ]
        self._kernel: Callable[..., BlockTerms] = _compiled_kernel() if compiled else block_terms
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.ce, self.kd, self.top1 = zero, zero.clone(), zero.clone()

    def run(
        self,
        student_CV: torch.Tensor,
        teacher: torch.Tensor | TopKRows | None,
        labels_C: torch.Tensor,
    ) -> None:
        """Turn a chunk's logits into their gradient, in place; ``teacher`` is overwritten too."""
        for start in range(0, len(student_CV), self._rows):
            rows = slice(start, min(start + self._rows, len(student_CV)))
            scratch = [x[: rows.stop - start] for x in self._scratch]
            student, part = student_CV[rows], _rows_of(teacher, rows)
            narrow = len(scratch) == 4
            if narrow:
                student = scratch[2].copy_(student)
                part = scratch[3].copy_(part) if isinstance(part, torch.Tensor) else part
            terms = self._kernel(student, part, labels_C[rows], self._spec, *scratch[:2])
            if narrow and self._spec.want_grad:
                student_CV[rows] = student
            self.ce += terms.ce
            self.kd += terms.kd
            self.top1 += terms.top1


def rows_per_block(num_columns: int, chunk_size: int, device: torch.device) -> int:
    """Tokens of a block: as many as fit into the cache, and at least one a thread."""
    if device.type == "cpu":
        rows = torch.get_num_threads() * max(1, _BLOCK_NUMBERS // num_columns)
    else:
        rows = max(1, chunk_size // _BLOCKS_PER_CHUNK)
    return min(rows, chunk_size)


def scratch_bytes_per_token(num_columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """What a token of a chunk costs besides its logits; on the CPU scratch does not grow."""
    if device.type == "cpu":
        return 0
    wide = torch.promote_types(dtype, torch.float32)
    return num_columns * wide.itemsize * (2 if dtype == wide else 4) // _BLOCKS_PER_CHUNK


def _rows_of(
    teacher: torch.Tensor | TopKRows | None, rows: slice
) -> torch.Tensor | TopKRows | None:
    if isinstance(teacher, TopKRows):
        return TopKRows(teacher.ids[rows], teacher.log_probs[rows])
    return None if teacher is None else teacher[rows]


@functools.cache
def _compiled_kernel() -> Callable[..., BlockTerms]:
    kernel = torch.compile(block_terms, dynamic=True)
    usable = True

    def run(*arguments: Any) -> BlockTerms:
        nonlocal usable
        if usable:
            try:
                return kernel(*arguments)
            except TorchDynamoException as error:
                # Raised before anything ran, so the block still holds its logits.
                usable = False
                reason = " ".join(str(error).split())[:300]
                logger.warning(
                    "distillation: the kernel could not be compiled and runs as it is (%s: %s)",
                    type(error).__name__, reason,
                )  # fmt: skip
        return block_terms(*arguments)

    return run
