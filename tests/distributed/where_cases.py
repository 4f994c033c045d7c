"""What ranks do to one another in `test_whereabouts.py`; run by `spawn.run_workers`."""

import os
import signal
import time

import torch
import torch.distributed as dist

from pixelrag.distributed.env import World


def misbehave(world: World, how: str) -> str:
    """Both ranks meet in step 3; rank 1 then does ``how`` and rank 0 waits for it in vain."""
    world.position.move("forward and backward", 2)
    dist.barrier()
    if world.rank == 1:
        time.sleep(1.5)  # a beat later the others know where this rank stood
        if how == "raise":
            raise ValueError("tile 17 is broken")
        if how == "die":
            os._exit(9)
        if how == "linger":
            world.position.move("evaluation")
            time.sleep(12)
            return how
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
    world.position.move("update")
    dist.all_reduce(torch.ones(3))
    return how
