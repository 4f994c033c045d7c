"""Chooses and builds the engine that a config names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from pixelrag.engine.base import Engine, OptimizerFactory
from pixelrag.engine.budget import Modes, choose_modes
from pixelrag.engine.ddp import DDPEngine
from pixelrag.errors import EngineError

logger = logging.getLogger("pixelrag")

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")


def build_engine(
    module: nn.Module,
    optimizer_factory: OptimizerFactory,
    *,
    name: str = "ddp",
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    precision: str = "fp32",
    grad_sync: str = "auto",
    params: str = "auto",
    offload_optimizer: bool = False,
    deepspeed: str | None = None,
) -> Engine:
    """Build the engine ``name`` around ``module``; a collective over the default group.

    Args:
        module: container of every trained part; rank 0's weights are the ones that count.
        optimizer_factory: builds the optimizer from ``[(name, parameter)]``.
        name: one of ``ENGINES``.
        device: this rank's device.
        blocks: submodules to shard as units (transformer layers); used by fsdp2.
        precision: ``fp32`` or ``bf16`` (fp32 masters and accumulation).
        grad_sync: ``deferred``, ``per_chunk`` or ``auto``.
        params: ``resident``, ``sharded`` or ``auto``; only fsdp2 and zero3 can shard.
        offload_optimizer: optimizer state in host memory; zero1-3, and fsdp2 on CUDA.
        deepspeed: path of a DeepSpeed JSON; zero0-3 only.

    Raises:
        EngineError: an unknown engine, or one that cannot do what is asked.
        ConfigError: the DeepSpeed JSON contradicts the arguments.
    """
    if name not in ENGINES:
        raise EngineError(f"engine.name: got {name!r}, expected one of {', '.join(ENGINES)}")
    if offload_optimizer and name in ("ddp", "zero0"):
        raise EngineError(f"engine.offload_optimizer: {name} replicates it; use zero1-3 or fsdp2")
    if offload_optimizer and name == "fsdp2" and device.type != "cuda":
        raise EngineError("engine.offload_optimizer: fsdp2 offloads from CUDA only; use zero1-3")
    modes = choose_modes(
        module, name, device, grad_sync=grad_sync, params=params, precision=precision
    )
    logger.info("engine %s on %s, %s: %s", name, device, precision, modes.reason)
    bf16 = precision == "bf16"
    if name == "ddp":
        return DDPEngine(
            module, optimizer_factory, device=device, bf16=bf16, grad_sync=modes.grad_sync
        )
    if name == "fsdp2":
        from pixelrag.engine.fsdp2 import FSDP2Engine

        return FSDP2Engine(
            module,
            optimizer_factory,
            device=device,
            blocks=blocks,
            bf16=bf16,
            grad_sync=modes.grad_sync,
            resident=modes.resident,
            offload_optimizer=offload_optimizer,
        )
    return _build_zero(
        module,
        optimizer_factory,
        int(name[-1]),
        device,
        bf16,
        modes,
        offload_optimizer,
        deepspeed,
    )


def _build_zero(
    module: nn.Module,
    optimizer_factory: OptimizerFactory,
    stage: int,
    device: torch.device,
    bf16: bool,
    modes: Modes,
    offload_optimizer: bool,
    path: str | Path | None,
) -> Engine:
    import torch.distributed as dist

    from pixelrag.engine.deepspeed import DeepSpeedEngine
    from pixelrag.engine.ds_config import read_ds_config, resolve

    ds_config = resolve(
        read_ds_config(path) if path else None,
        stage=stage,
        world_size=dist.get_world_size(),
        bf16=bf16,
        per_chunk=modes.grad_sync == "per_chunk",
        resident=modes.resident,
        offload_optimizer=offload_optimizer,
        num_trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        source=str(path or "engine.deepspeed"),
    )
    return DeepSpeedEngine(
        module,
        optimizer_factory,
        stage=stage,
        ds_config=ds_config,
        device=device,
        grad_sync=modes.grad_sync,
        resident=modes.resident,
    )
