"""The jobs that can be planned."""

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig

PlannedConfig = ContrastiveConfig | DistillConfig | RagConfig
