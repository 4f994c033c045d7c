"""Which ranks share a host: numbers of GPUs and cores mean something there alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

from pixelrag.distributed.collectives import gather_objects

T = TypeVar("T")


def this_host() -> str:
    """A name that processes share where they share a host, and its devices, and nowhere else.

    Containers of one machine have one boot id and unlike names; machines that were cloned have one
    name and unlike boot ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def gather_on_host(value: T) -> list[T]:
    """Return the values of this host's ranks, in the order of their ranks; a collective of all."""
    here = this_host()
    return [own for host, own in gather_objects((here, value)) if host == here]
