"""Memory of this process: resident on the CPU, allocated on a CUDA device."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

MIB = 2**20
_M_MMAP_THRESHOLD = -3  # of malloc.h


def held_mib(device: torch.device) -> float:
    """What is held now: resident memory of the process (Linux), or tensors on the device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    return _status_kib("VmRSS") / 1024


def reset_peak(device: torch.device) -> None:
    """Let the peak start again from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _linux()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mib(device: torch.device) -> float:
    """The most that was held since the process began, or since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return _status_kib("VmHWM") / 1024


def let_go() -> None:
    """From now on freed memory of tensors goes back to the system at once (glibc).

    It would stay in the heap otherwise, and the next step would seem to need none. That costs time,
    so times are measured before.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)


def _status_kib(field: str) -> int:
    _linux()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise OSError(f"/proc/self/status has no {field}")


def _linux() -> None:
    if sys.platform != "linux":
        raise OSError("memory of a process is read from /proc, which Linux alone has")
