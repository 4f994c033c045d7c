"""A worker whose engine forgets that losses are partial sums, to see that verify notices."""

from pixelrag.engine import ddp
from pixelrag.verify import worker


def run_cases(world, payload):
    """As `worker.run_cases`, with gradients that are too large by the world size."""
    reduce = ddp.all_reduce_flat

    def reduce_too_much(gradients):
        gradients = list(gradients)
        reduce(gradients)
        for gradient in gradients:
            gradient *= world.world_size

    ddp.all_reduce_flat = reduce_too_much
    return worker.run_cases(world, payload)
