"""Takes two simulated steps of a job and reads off what the second one costs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from pixelrag.distributed.env import World
from pixelrag.engine import Engine
from pixelrag.errors import ConfigError
from pixelrag.plan.hardware import Cluster, Device
from pixelrag.plan.jobs import PlannedConfig
from pixelrag.plan.memory import BACKWARD, FROZEN, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS, Memory
from pixelrag.plan.mirror import mirrored
from pixelrag.plan.pretend import on_gpu
from pixelrag.plan.simulation import Simulation
from pixelrag.plan.workload import Lengths, Workload, stays_put, workload_of
from pixelrag.train.averaging import averaging_of, set_decay
from pixelrag.train.job import engine_for

# The rest is the driver's, libraries' workspaces, and gaps between the allocator's blocks.
SHARE_OF_MEMORY = 0.92


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a rank does and holds in a step.

    Attributes:
        world_size: ranks.
        grad_sync, params: what `engine.grad_sync` and `engine.params` come to.
        memory: bytes at the moment when most is alive, by use.
        index: bytes of host memory for retrieval, by use.
        flops: operations.
        touched: bytes read and written by operations.
        allocations: storages made.
        launches: operations that compute something.
        calls, bytes: collectives and the size of what they carry, by kind.
        sent: bytes that the rank sends.
        tokens: of the rank.
        trained, frozen: parameters of the whole model.
    """

    world_size: int
    grad_sync: str
    params: str
    memory: dict[str, int]
    index: dict[str, int]
    flops: int
    touched: int
    allocations: int
    launches: int
    calls: dict[str, int]
    bytes: dict[str, int]
    sent: float
    tokens: int
    trained: int
    frozen: int

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return sum(self.memory.values())

    def fits(self, memory: float) -> bool:
        """Whether it leaves a device of so many bytes some room for what is not counted."""
        return self.peak <= SHARE_OF_MEMORY * memory

    def rate(self, cluster: Cluster, precision: str, mfu: float) -> float:
        """Tokens a second of all ranks, at most."""
        seconds = max(self.seconds(cluster, precision, mfu).values())
        return self.tokens * self.world_size / seconds

    def seconds(self, cluster: Cluster, precision: str, mfu: float) -> dict[str, float]:
        """Lower bounds of a step's time by what may bind it.

        Args:
            cluster: on which it runs.
            precision: `engine.precision`.
            mfu: share of the peak that arithmetic reaches.
        """
        return {
            "arithmetic": self.flops / (cluster.device.peak(precision) * mfu),
            "memory": self.touched / cluster.device.bandwidth,
            "network": self.sent / cluster.slowest_link,
        }


def predict(
    config: PlannedConfig, world_size: int, lengths: Lengths, device: Device | None = None
) -> Prediction:
    """Simulate two steps; no process group may exist.

    Args:
        config: the job's.
        world_size: ranks.
        lengths: of what a step sees.
        device: of every rank; None = they are CPUs, which talk over gloo.

    Raises:
        ConfigError: a job that cannot be planned.
    """
    if config.engine.offload_optimizer:
        raise ConfigError(
            "engine.offload_optimizer: the plan knows no memory but the device's; set it false"
        )
    simulation = Simulation()
    memory, built = simulation.memory, False
    room = 0 if device is None else int(SHARE_OF_MEMORY * device.memory)

    def free() -> int:
        # Until the engine is built, models are on the host.
        return max(room - (memory.live if built else 0), 0)

    gpu = contextlib.nullcontext() if device is None else on_gpu(free)
    with mirrored(world_size, gloo=device is None) as traffic, gpu:
        with simulation.fake:
            job = workload_of(config, lengths, world_size)
        simulation.vocab_sizes = job.vocab_sizes
        trained, frozen = _register(memory, job)
        world = World(0, world_size, 0, torch.device("cpu"))
        with simulation.running():
            job.begin()
            memory.call_rest(FROZEN, kept=frozenset((WEIGHTS,)))
            container = stays_put(job.container)
            engine = engine_for(config, world, container, job.blocks, part_of=job.part_of)
            built = True
            memory.call_rest(WEIGHTS, kept=frozenset((FROZEN,)))
            _take_step(config, job, engine, memory)
            # What outlives a step is the optimizer's, and buffers of the engine's.
            memory.call_rest(OPTIMIZER, kept=frozenset((WEIGHTS, FROZEN)))
            traffic.clear()
            memory.restart()
            begin = simulation.counted()
            _take_step(config, job, engine, memory)
            flops, touched, launches = (
                now - then for now, then in zip(simulation.counted(), begin, strict=True)
            )
            return Prediction(
                world_size=world_size,
                grad_sync=engine.grad_sync,
                params="resident" if engine.resident else "sharded",
                memory=dict(memory.at_peak),
                index=dict(job.index_bytes),
                flops=flops,
                touched=touched,
                allocations=memory.allocations,
                launches=launches,
                calls=dict(traffic.calls),
                bytes=dict(traffic.bytes),
                sent=traffic.sent(world_size),
                tokens=job.tokens,
                trained=trained,
                frozen=frozen,
            )


def _take_step(config: PlannedConfig, job: Workload, engine: Engine, memory: Memory) -> None:
    if (ema := averaging_of(config)) is not None:
        set_decay(engine.optimizer, ema, 0)
    job.step(engine)
    # No graph is left: what a backward pass made, and still lives, is what it was for.
    memory.call(GRADIENTS, only=frozenset((BACKWARD, LOGITS)))
    engine.step(config.optim.max_grad_norm)


def _register(memory: Memory, job: Workload) -> tuple[int, int]:
    trained = frozen = 0
    for module, use in [(job.container, WEIGHTS), *((m, FROZEN) for m in job.frozen)]:
        for tensor in (*module.parameters(), *module.buffers()):
            memory.add(tensor, use)
        for parameter in module.parameters():
            if parameter.requires_grad:
                trained += parameter.numel()
            else:
                frozen += parameter.numel()
    return trained, frozen
