"""Random-number state kept beside a forward pass, so that a later replay draws the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class RandContext:
    """The CPU's and one CUDA device's generator state at the moment of construction.

    GradCache runs each chunk twice; dropout must fall alike both times (Gao et al. 2021,
    "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", section 3.2).
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = _cuda_devices(device)
        self._cuda = [torch.cuda.get_rng_state(index) for index in self._devices]

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body from the kept state; the streams outside go on as if it never ran."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._cpu)
            for index, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, index)
            yield


def _cuda_devices(device: torch.device) -> list[int]:
    """Every CUDA device that a forward pass of this process may draw from."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return []
    # A model may be spread over several devices of one process; states are a few KB each.
    own = torch.cuda.current_device() if device.index is None else device.index
    used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(i) > 0]
    return sorted({own, *used})
