"""Encoders: loading, preprocessing, pooling, adapters."""

from pixelrag.distributed.env import name_accelerator

name_accelerator()  # the imports below reach DeepSpeed

from pixelrag.models.embedder import Embedder  # noqa: E402
from pixelrag.models.load import load_embedder  # noqa: E402
from pixelrag.models.preprocess import Preprocessor  # noqa: E402

__all__ = ["Embedder", "Preprocessor", "load_embedder"]
