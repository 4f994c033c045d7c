"""Encoders: loading, preprocessing, pooling, adapters."""

from pixelrag.models.embedder import Embedder
from pixelrag.models.load import load_embedder
from pixelrag.models.preprocess import Preprocessor

__all__ = ["Embedder", "Preprocessor", "load_embedder"]
