"""The plan in words."""

from __future__ import annotations

from collections.abc import Sequence

from pixelrag.config.base import JobConfig
from pixelrag.plan.hardware import Cluster
from pixelrag.plan.prediction import Prediction
from pixelrag.plan.search import Alternative

GIB = 1 << 30


def lines_of(config: JobConfig, prediction: Prediction, cluster: Cluster, mfu: float) -> list[str]:
    """Memory, traffic and time of a rank's step.

    Args:
        config: the job's.
        prediction: of it.
        cluster: on which it is to run.
        mfu: share of the arithmetic's peak that is reached.
    """
    engine, device = config.engine, cluster.device
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.devices_per_node}"
    lines = [
        f"{nodes} {device.name} ({device.memory / GIB:,.0f} GiB each), {engine.name}, "
        f"{engine.precision}, grad_sync {prediction.grad_sync}, params {prediction.params}",
        f"{prediction.trained:,} parameters train, {prediction.frozen:,} are frozen",
        "",
        "memory of a rank when most is alive             GiB",
    ]
    for use, size in sorted(prediction.memory.items(), key=lambda item: -item[1]):
        lines.append(f"  {use:<40} {size / GIB:>10,.3f}")
    share = prediction.peak / device.memory
    verdict = "fits" if prediction.fits(device.memory) else "does not fit"
    lines += [
        f"  {'in all':<40} {prediction.peak / GIB:>10,.3f}   {share:.0%} of the device: {verdict}",
        "  (the driver's context and the allocator's gaps come on top)",
        "",
        "traffic of a rank in a step                   calls          MiB",
    ]
    for kind in sorted(prediction.calls):
        size = prediction.bytes[kind] / (1 << 20)
        lines.append(f"  {kind:<40} {prediction.calls[kind]:>8,} {size:>12,.2f}")
    lines += [
        f"  {'sent, in rings':<40} {'':>8} {prediction.sent / (1 << 20):>12,.2f}",
        "",
        f"a step: {prediction.flops / 1e12:,.3f} TFLOP and {prediction.tokens:,} tokens a rank",
        "lower bounds of its time                         ms",
    ]
    seconds = prediction.seconds(cluster, engine.precision, mfu)
    for what, value in seconds.items():
        note = f" (at {mfu:.0%} of the peak)" if what == "arithmetic" else ""
        lines.append(f"  {what + note:<40} {1e3 * value:>10,.2f}")
    binds = max(seconds, key=seconds.__getitem__)
    rate = prediction.rate(cluster, engine.precision, mfu)
    lines += ["", f"{binds} binds: at most {rate:,.0f} tokens/s on {cluster.world_size} devices"]
    return lines


def compared(alternatives: Sequence[Alternative], cluster: Cluster, mfu: float) -> list[str]:
    """Engines, those that fit and are fastest first."""

    def order(alternative: Alternative) -> tuple[bool, float, int]:
        prediction = alternative.prediction
        rate = prediction.rate(cluster, alternative.config.engine.precision, mfu)
        return not prediction.fits(cluster.device.memory), -rate, prediction.peak

    lines = ["", "engines at these sizes                   GiB a rank      tokens/s, at most"]
    for alternative in sorted(alternatives, key=order):
        misses, rate, peak = order(alternative)
        note = "   does not fit" if misses else ""
        lines.append(f"  {alternative.name:<36} {peak / GIB:>12,.3f} {-rate:>18,.0f}{note}")
    return lines


def of_largest(found: tuple[str, int, Alternative] | None, cluster: Cluster, mfu: float) -> str:
    """The largest size that fits, in words."""
    if found is None:
        return "no larger chunk or micro-batch fits, nor does the configured one"
    option, value, alternative = found
    prediction = alternative.prediction
    rate = prediction.rate(cluster, alternative.config.engine.precision, mfu)
    return (
        f"largest {option} that fits: {value} ({prediction.peak / GIB:,.3f} GiB, at most "
        f"{rate:,.0f} tokens/s)"
    )
