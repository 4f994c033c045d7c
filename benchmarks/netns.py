"""Hosts on one machine: network namespaces joined by rate-limited links.

    host 0 (eth0) --veth-- bridge --veth-- host 1 (eth0)

The bridge lives in a namespace of its own, so nothing of the machine's own network is touched and
no packet leaves what was made here. Linux and root only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_SUBNET = "10.77.0"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace with an interface ``eth0``.

    Attributes:
        name: of the namespace.
        address: of its ``eth0``.
    """

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on this host."""
        return ["ip", "netns", "exec", self.name, *command]


def missing_requirement() -> str | None:
    """Why hosts cannot be made here, in a sentence; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2"
    probe = f"prb{os.getpid()}probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except OSError as error:
        return f"this kernel or container allows no network namespaces: {error}"
    return None


@contextlib.contextmanager
def hosts(count: int, *, rate_mbit: int) -> Iterator[list[Host]]:
    """Make ``count`` hosts, each sending at most ``rate_mbit``; remove them whatever happens.

    Args:
        count: hosts, up to 200.
        rate_mbit: limit of what a host sends, megabit a second (a token bucket, `tc tbf`).

    Raises:
        OSError: a command failed; the message holds it and what it said.
    """
    prefix = f"prb{os.getpid()}"
    switch = f"{prefix}sw"
    made: list[str] = []
    try:
        for name in (switch, *(f"{prefix}h{i}" for i in range(count))):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        found = [Host(name, f"{_SUBNET}.{i + 1}") for i, name in enumerate(made[1:])]
        for index, host in enumerate(found):
            _connect(host, switch, f"port{index}", rate_mbit)
        yield found
    finally:
        # A namespace takes its interfaces with it; each is tried even if another one fails.
        with contextlib.ExitStack() as stack:
            for name in made:
                stack.callback(_run, "ip", "netns", "del", name)


def _connect(host: Host, switch: str, port: str, rate_mbit: int) -> None:
    inside = ("ip", "-n", host.name)
    _run(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")
    # The bucket must hold a whole 64 KiB segment: the kernel hands veth segments that large.
    limit = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "100ms")
    _run("tc", "-n", host.name, "qdisc", "add", "dev", "eth0", "root", *limit)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'code {done.returncode}'}")


def sent_bytes(interface: str = "eth0") -> int:
    """Bytes that this process's namespace has sent through ``interface``, headers included.

    Raises:
        OSError: there is no such interface.
    """
    with open("/proc/self/net/dev", encoding="ascii") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise OSError(f"/proc/self/net/dev has no interface {interface}")
