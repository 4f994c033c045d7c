"""Words for what libraries raise anywhere in a job: no memory left, and a data worker that died."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pixelrag.distributed.whereabouts import Position
from pixelrag.errors import DataError, EngineError

# The CPU's allocator, cuBLAS and the CUDA driver raise plain RuntimeErrors.
_NO_MEMORY = ("can't allocate memory", "out of memory", "alloc_failed")
# torch raises it where a signal's handler happens to run, in the middle of a forward too.
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) .*")


@contextlib.contextmanager
def worded_failures(position: Position) -> Iterator[None]:
    """Tell where the body failed, and what mends it.

    Raises:
        EngineError: memory ran out.
        DataError: a data worker died, as by the system's out-of-memory killer.
    """
    try:
        yield
    except Exception as error:
        who = f"rank {dist.get_rank()} ({position})"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        if is_out_of_memory(error):
            raise EngineError(
                f"{who}: out of memory ({first}). Lower the chunk sizes, then "
                "batch.per_device_batch_size, take gradient checkpointing, or shard more "
                "(engine.name zero3 or fsdp2), and start the job again; it resumes from its last "
                "checkpoint"
            ) from error
        if type(error) is RuntimeError and _DEAD_WORKER.match(first):
            raise DataError(
                f"{who}: a data worker failed: {first}. Where the system has killed it, memory was "
                "short; set data.num_workers: 0 to prepare batches in the training process"
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _NO_MEMORY)
