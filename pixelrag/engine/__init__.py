"""One protocol over plain replication, DeepSpeed ZeRO 0-3 and PyTorch FSDP2."""

from pixelrag.engine.base import Engine, OptimizerFactory
from pixelrag.engine.factory import build_engine

__all__ = ["Engine", "OptimizerFactory", "build_engine"]
