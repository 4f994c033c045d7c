"""Hosts on one machine: network namespaces, each with its own name and address, joined by links.

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
from pathlib import Path

_SUBNET = "10.77.0"
_NAMES = Path("/etc/netns")


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace with an interface ``eth0``.

    Attributes:
        name: of the namespace, and the host name that its processes see.
        address: of its ``eth0``.
        switch: the namespace that joins the hosts.
        port: the switch's end of this host's link.
    """

    name: str
    address: str
    switch: str
    port: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on this host."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh")
        return ["ip", "netns", "exec", self.name, *named, *command]

    def cut(self) -> None:
        """Take this host's link down: nothing goes in or out, and nobody is told."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")


def missing_requirement() -> str | None:
    """Why hosts cannot be made here, in a sentence; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2 and util-linux"
    probe = f"prb{os.getpid()}probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except OSError as error:
        return f"this kernel or container allows no network namespaces: {error}"
    return None


@contextlib.contextmanager
def hosts(count: int, *, rate_mbit: int | None = None) -> Iterator[list[Host]]:
    """Make ``count`` hosts that know one another by name; remove them whatever happens.

    Args:
        count: hosts, up to 200.
        rate_mbit: limit of what a host sends, megabit a second (a token bucket, `tc tbf`); None:
            no limit.

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
        found = [
            Host(name, f"{_SUBNET}.{i + 1}", switch, f"port{i}") for i, name in enumerate(made[1:])
        ]
        for host in found:
            _connect(host, rate_mbit)
            _name_hosts(host, found)
        yield found
    finally:
        # A namespace takes its interfaces with it; each is tried even if another one fails.
        with contextlib.ExitStack() as stack:
            for name in made:
                stack.callback(shutil.rmtree, _NAMES / name, ignore_errors=True)
                stack.callback(_run, "ip", "netns", "del", name)


def _name_hosts(host: Host, everyone: list[Host]) -> None:
    """`ip netns exec` shows a namespace this file as its /etc/hosts."""
    folder = _NAMES / host.name
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{h.address} {h.name}" for h in everyone)]
    (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")


def _connect(host: Host, rate_mbit: int | None) -> None:
    inside = ("ip", "-n", host.name)
    peer = ("peer", "name", host.port, "netns", host.switch)
    _run(*inside, "link", "add", "eth0", "type", "veth", *peer)
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "br0", "up")
    _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")
    if rate_mbit is None:
        return
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
