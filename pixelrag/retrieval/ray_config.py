"""Whether the Ray cluster that a configuration names is there, and has room for what it asks."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys

from pixelrag.config.rag import RagConfig
from pixelrag.errors import ConfigError
from pixelrag.retrieval.refresh_spec import OnRay

_JOIN_SECONDS = 120.0


def on_ray(config: RagConfig) -> OnRay | None:
    """Where a configuration's refreshes are encoded; None: not on Ray.

    Raises:
        ConfigError: Ray or the cluster is asked for and not there, or no host of it has room.
    """
    refresh, address = config.refresh, config.ray.address
    for option, value in (
        ("refresh.workers", refresh.workers),
        ("index.holders", config.index.holders),
    ):
        if value == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError(
                f"{option} ray needs Ray, which is not installed: pip install "
                "'pixelrag-trainer[ray]', or leave the option out"
            )
    held = 0
    if config.index.holders == "ray":
        _require_room("index.search_threads", config.index.search_threads, False, address)
        held = config.index.num_shards * config.index.search_threads
        _require_room_for_all(held, "index holders", address)
    if refresh.workers != "ray":
        return None
    devices = refresh.devices
    if devices == "auto":
        devices = ["cuda" if any(h.get("GPU", 0) >= 1 for h in _hosts(address)) else "cpu"]
    for device in devices:
        _require_room("refresh.threads", refresh.threads, device == "cuda", address)
    _require_room_for_all(held + refresh.threads, "index holders and one encoder", address)
    return OnRay(address, list(devices) * refresh.num_workers)


def _require_room(option: str, threads: int, gpu: bool, address: str) -> None:
    hosts = _hosts(address)
    if any(h.get("CPU", 0) >= threads and h.get("GPU", 0) >= gpu for h in hosts):
        return
    told = "; ".join(f"{h.get('CPU', 0):g} CPUs, {h.get('GPU', 0):g} GPUs" for h in hosts)
    raise ConfigError(
        f"ray.address {address}: no host of the cluster has {threads} CPUs ({option})"
        + (" and a GPU" if gpu else "")
        + f"; its hosts have {told}. Ask for less, or start Ray there with more"
    )


def _require_room_for_all(cpus: int, what: str, address: str) -> None:
    """Actors that stay must leave room for one that comes and goes: it would wait for ever."""
    total = sum(host.get("CPU", 0) for host in _hosts(address))
    if total < cpus:
        raise ConfigError(
            f"ray.address {address}: {what} need {cpus} CPUs at once, the cluster has {total:g}. "
            "Lower index.num_shards or the numbers of threads, or add hosts"
        )


@functools.cache
def _hosts(address: str) -> list[dict[str, float]]:
    """What each host of the cluster has; asked by a process of its own, see `ray_cluster`."""
    command = [sys.executable, "-m", "pixelrag.retrieval.ray_cluster", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOIN_SECONDS)
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        if done.returncode == 0:
            return json.loads(said[0])
        reason = said[0] if said else f"code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_JOIN_SECONDS:g} s"
    raise ConfigError(
        f"ray.address {address}: {reason}. Start Ray there with `ray start`, and on this host too, "
        "or leave refresh.workers and index.holders out"
    )
