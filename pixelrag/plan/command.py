"""`pixelrag plan`: what a job needs of hardware that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pixelrag.console import say
from pixelrag.errors import ConfigError
from pixelrag.plan.hardware import Cluster, device_named
from pixelrag.plan.jobs import PlannedConfig

T = TypeVar("T", int, float)
Default = TypeVar("Default")


def main(config: PlannedConfig, own: Mapping[str, str]) -> int:
    """Print the plan; returns the exit code.

    Raises:
        ConfigError: a flag's value is out of its range, or the job cannot be planned.
        ModelError: a model's configuration is not there.
    """
    cluster = Cluster(
        device_named(own.get("device") or "h200"),
        _number(own, "nodes", int, 1, 1, 100_000),
        _number(own, "devices_per_node", int, 8, 1, 1_000),
        _number(own, "network", float, 50.0, 0.001, 1e6) * 1e9,
        (_number(own, "link", float, None, 0.001, 1e6) or 0) * 1e9 or None,
    )
    mfu = _number(own, "mfu", float, 0.4, 0.001, 1.0)
    # Here, so that --help needs no torch.
    from pixelrag.plan.prediction import predict
    from pixelrag.plan.table import lines_of
    from pixelrag.plan.workload import Lengths

    lengths = Lengths(
        query=_number(own, "query_tokens", int, None, 1, 10**7),
        document=_number(own, "document_tokens", int, None, 1, 10**7),
        image=_number(own, "image_tokens", int, None, 1, 10**6),
        passages=_number(own, "passages", int, None, 1, 10**12),
        supervised=_number(own, "supervised", float, None, 0.0001, 1.0),
    )
    search = own.get("search", "off")
    if search not in ("on", "off"):
        raise ConfigError(f"--search: got {search!r}, expected on or off")
    prediction = predict(config, cluster.world_size, lengths, cluster.device)
    for line in lines_of(config, prediction, cluster, mfu):
        say(line)
    if search == "on":
        from pixelrag.plan.search import engines, largest
        from pixelrag.plan.table import compared, suggested

        found = engines(config, cluster, lengths, mfu)
        best = largest(found[0].config, cluster, lengths)
        for line in [*compared(found, cluster, mfu), *suggested(best, cluster, mfu)]:
            say(line)
    if own.get("output"):
        written = json.dumps(asdict(prediction), indent=1, sort_keys=True) + "\n"
        Path(own["output"]).write_text(written, encoding="utf-8")
    return 0


def _number(
    own: Mapping[str, str],
    name: str,
    kind: Callable[[str], T],
    default: Default,
    least: T,
    most: T,
) -> T | Default:
    text = own.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ConfigError(f"--{name}: got {text!r}, expected a number from {least:g} to {most:g}")
    return value
