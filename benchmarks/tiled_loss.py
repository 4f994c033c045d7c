"""The contrastive loss in tiles beside the loss over the whole matrix: time, memory, difference.

    python -m benchmarks.tiled_loss --output benchmarks/results

Time: loss and gradients by queries, documents and temperature (and bias), `tiled` in turns with
`plain`, which holds the whole matrix and goes backward by autograd, the way that others compute it.
Both mask nothing but what is no negative.

Memory: one fresh process computes a batch whose matrix would not fit, and reports the peak of its
resident set above the embeddings.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from pixelrag.bench.cases import peak_of
from pixelrag.bench.memory import MIB
from pixelrag.bench.timing import interleaved, ratios
from pixelrag.losses.contrastive import Objective, contrastive_loss, whole_batch

LOSSES = ("infonce", "siglip")
Leaves = dict[str, torch.Tensor]


def make_leaves(batch: int, dim: int) -> Leaves:
    """Queries, and documents that are like them, so that the softmax is not flat."""
    generator = torch.Generator().manual_seed(0)
    query_BD = torch.randn(batch, dim, generator=generator)
    document_BD = torch.randn(batch, dim, generator=generator).add_(query_BD, alpha=0.5)
    leaves = {
        "query": F.normalize(query_BD, dim=1, out=query_BD),
        "document": F.normalize(document_BD, dim=1, out=document_BD),
        "scale": torch.tensor([20.0]),
        "bias": torch.tensor([-10.0]),
    }
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def plain(x: Leaves, name: str) -> torch.Tensor:
    """Over the whole matrix."""
    logits_BB = x["query"] @ x["document"].T * x["scale"]
    if name == "infonce":
        return F.cross_entropy(logits_BB, torch.arange(len(logits_BB)))
    signs_BB = 2 * torch.eye(len(logits_BB)) - 1
    return -F.logsigmoid(signs_BB * (logits_BB + x["bias"])).sum() / len(logits_BB)


def tiled(x: Leaves, name: str) -> torch.Tensor:
    """In tiles."""
    batch = whole_batch(x["query"], x["document"], torch.arange(len(x["query"])))
    bias = x["bias"] if name == "siglip" else None
    objective = Objective(name=name)
    return contrastive_loss(objective, batch, x["scale"], bias, num_queries=len(x["query"])).loss


def gradients(loss: Any, x: Leaves, name: str) -> tuple[float, list[torch.Tensor]]:
    """The loss, and its gradients by every leaf that it has."""
    value = loss(x, name)
    used = [leaf for key, leaf in x.items() if key != "bias" or name == "siglip"]
    return value.item(), list(torch.autograd.grad(value, used))


def compare(x: Leaves, name: str) -> dict[str, float]:
    """Relative differences of the losses, and of the gradients (the worst of them)."""
    (loss, ours), (expected, theirs) = (gradients(way, x, name) for way in (tiled, plain))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    return {"loss_error": abs(loss / expected - 1), "gradient_error": max(errors)}


def measure_memory(batch: int, dim: int) -> dict[str, Any]:
    """In this process: what one loss and its gradients add to the embeddings."""
    gradients(tiled, make_leaves(64, dim), "infonce")  # autograd's threads, the kernels' memory
    x = make_leaves(batch, dim)
    start = time.perf_counter()
    held = peak_of(lambda: gradients(tiled, x, "infonce"), torch.device("cpu"))
    return {
        **held,
        "embeddings_mib": round(2 * batch * dim * 4 / MIB),
        "matrix_mib": round(batch * batch * 4 / MIB),
        "seconds": round(time.perf_counter() - start, 1),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiled_loss", description=__doc__)
    parser.add_argument("--batch", type=int, default=8192, help="queries and documents")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-batch", type=int, default=65_536, help="0: no memory")
    parser.add_argument("--threads", type=int, default=1)
    common.add_output(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(measure_memory(options.memory_batch, options.dim)))
        return 0
    results = common.Results("tiled_loss", options, options.threads)
    x = make_leaves(options.batch, options.dim)
    sizes = {"batch": options.batch, "dim": options.dim}
    for name in LOSSES:
        ways = {way.__name__: lambda w=way, n=name: gradients(w, x, n) for way in (tiled, plain)}
        taken = interleaved(ways, rounds=options.rounds, warmup=1)
        difference = compare(x, name)
        for way, times in taken.items():
            figures = {
                "tiled_over_this": ratios(taken["tiled"].wall, times.wall).p50,
                "tiled_over_this_cpu": ratios(taken["tiled"].cpu, times.cpu).p50,
            }
            if way == "tiled":
                figures |= difference
            results.add({"loss": name, "way": way, **sizes}, times, figures)
    if options.memory_batch:
        flags = [f"--memory-batch={options.memory_batch}", f"--dim={options.dim}"]
        arguments = ["--worker", *flags, f"--threads={options.threads}"]
        found = common.fresh_process("benchmarks.tiled_loss", arguments)
        held = {key: found.pop(key) for key in ("added_mib", "peak_mib")}
        case = {"loss": "infonce", "memory of batch": options.memory_batch, "dim": options.dim}
        results.add(case, figures=found, **held)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
