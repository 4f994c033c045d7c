"""Encodes shards of passages for a refresh, and refuses what cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.errors import IndexError_, ProvenanceError
from pixelrag.retrieval.refresh_spec import WEIGHTS, RefreshSpec


class ShardEncoder:
    """Encodes shards of passages.

    Args:
        work: folder of the snapshot, which is read at once.
        spec: what to do.
        device: where to encode.
        beat: called while it gets on.
        images: check what images show as well; for passages of another host.

    Raises:
        ProvenanceError: the passages are not those that the run began with.
    """

    def __init__(
        self,
        work: Path,
        spec: RefreshSpec,
        device: str,
        beat: Callable[[], None],
        *,
        images: bool = False,
    ) -> None:
        self._spec = spec
        self._store = open_passages(spec, images=images)
        self._encoder = spec.encoder(weights=work / WEIGHTS, device=device, progress=beat)

    def __call__(self, shard: int) -> np.ndarray:
        """Vectors of one shard, float32 [rows, D].

        Raises:
            IndexError_: one is not finite.
        """
        rows = self._spec.rows_of(shard)
        encoded = self._encoder([self._store[row] for row in rows])
        vectors_MD = checked_vectors(encoded, len(rows), self._spec.dim)
        require_finite(vectors_MD, rows.start, self._store)
        return vectors_MD


def open_passages(spec: RefreshSpec, *, images: bool = False) -> Any:
    """The passages, checked to be the run's own; what images show only with ``images``."""
    store = spec.passages()
    got = expected = spec.fingerprints["passages"]
    # Images are hashed byte by byte: once a refresh will do.
    if images or not getattr(store, "has_images", False):
        got = store.fingerprint
    if (len(store), got) != (spec.num_passages, expected):
        raise ProvenanceError(
            f"the passages have changed since the run began: {len(store)} with fingerprint "
            f"{got}, expected {spec.num_passages} with {expected}. Restore them, or start a new run"
        )
    return store


def checked_vectors(vectors: Any, num_rows: int, dim: int) -> np.ndarray:
    """As contiguous float32 [num_rows, dim].

    Raises:
        IndexError_: they are of another shape.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if vectors.shape != (num_rows, dim):
        raise IndexError_(
            f"the encoder made vectors of shape {list(vectors.shape)}, expected {[num_rows, dim]}"
        )
    return vectors


def require_finite(vectors_MD: np.ndarray, first_row: int, store: Any) -> None:
    """Refuse vectors, of passages from ``first_row`` on, that are not finite.

    Raises:
        IndexError_: names the first passage.
    """
    bad = np.flatnonzero(~np.isfinite(vectors_MD).all(axis=1))
    if len(bad):
        passage = store[first_row + int(bad[0])]
        raise IndexError_(
            f"the vector of passage {passage.id} is not finite ({len(bad)} of "
            f"{len(vectors_MD)}); the document encoder has diverged"
        )
