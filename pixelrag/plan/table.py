"""The plan in words."""

from __future__ import annotations

from collections.abc import Sequence

from pixelrag.config.distill import DistillConfig
from pixelrag.plan.hardware import Cluster
from pixelrag.plan.jobs import PlannedConfig
from pixelrag.plan.prediction import Prediction
from pixelrag.plan.search import Alternative, is_whole, size_option

GIB = 1 << 30


def lines_of(
    config: PlannedConfig, prediction: Prediction, cluster: Cluster, mfu: float
) -> list[str]:
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
        *(
            f"  host memory, {use:<27} {size / GIB:>10,.3f}"
            for use, size in prediction.index.items()
        ),
        "",
        "traffic of a rank in a step                   calls          MiB",
    ]
    for kind in sorted(prediction.calls):
        mib = prediction.bytes[kind] / (1 << 20)
        lines.append(f"  {kind:<40} {prediction.calls[kind]:>8,} {mib:>12,.2f}")
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
    if isinstance(config, DistillConfig):
        lines.append("Liger's kernels and compiled code are planned as the plain modules")
    return lines


def compared(alternatives: Sequence[Alternative], cluster: Cluster, mfu: float) -> list[str]:
    """Engines, in their order."""
    lines = ["", "engines at these sizes                   GiB a rank      tokens/s, at most"]
    for one in alternatives:
        found = one.prediction
        note = "" if found.fits(cluster.device.memory) else "   does not fit"
        rate = one.rate(cluster, mfu)
        lines.append(f"  {one.name:<36} {found.peak / GIB:>12,.3f} {rate:>18,.0f}{note}")
    return lines


def suggested(best: Alternative | None, cluster: Cluster, mfu: float) -> list[str]:
    """The largest size that fits, and the options of such a run."""
    if best is None:
        return ["", "not even one row at a time fits: take more devices, or larger ones"]
    found, option = best.prediction, size_option(best.config)
    whole = "the whole batch of a rank; " if is_whole(best.config, cluster.world_size) else ""
    return [
        "",
        f"largest batch.{option} that fits: {getattr(best.config.batch, option)} "
        f"({whole}{found.peak / GIB:,.3f} GiB, at most {best.rate(cluster, mfu):,.0f} tokens/s)",
        f"suggested: {' '.join(best.flags())}",
    ]
