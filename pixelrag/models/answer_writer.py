"""Writes a cache of a teacher's answers, document by document; several ranks share the work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pixelrag.errors import ProvenanceError
from pixelrag.losses.kd import Projected
from pixelrag.models.answer_cache import (
    HEAD,
    INDEX,
    MANIFEST,
    Manifest,
    answer_digest,
    document_keys,
    file_digest,
)
from pixelrag.models.causal import head_logits
from pixelrag.models.state_codec import encode
from pixelrag.models.teacher import LiveTeacher, TeacherRequest

PART_BYTES = 1 << 30
"""Answers of a file, at most, but for a last batch."""
_CHUNK = 256


class AnswerWriter:
    """One rank's part of a cache.

    Args:
        folder: of the cache, already there.
        manifest: what it will hold; counts and parts are filled in at the end.
        teacher: whose answers.
        rank: this process, for the names of its files.
    """

    def __init__(self, folder: Path, manifest: Manifest, teacher: LiveTeacher, rank: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._teacher = teacher
        self._rank = rank
        self._seen: set[bytes] = set()
        self._keys: list[bytes] = []
        self._places: list[tuple[int, int, int]] = []
        self._digests: list[bytes] = []
        self._waiting: list[dict[str, torch.Tensor]] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._num_parts = 0

    def add(self, request: TeacherRequest) -> None:
        """Ask the teacher and keep its answers to documents that are new."""
        answer = self._teacher.answer(request)
        if not isinstance(answer, Projected):
            raise ProvenanceError(
                "the teacher's head cannot be used apart from its model, so its states are of no "
                "use without it; use teacher.source live"
            )
        start = 0
        for (key, _), count in zip(document_keys(request), _counts(request), strict=True):
            if key not in self._seen:
                self._seen.add(key)
                self._keep(key, answer.hidden_TH[start : start + count])
            start += count
        if self._waiting_bytes >= PART_BYTES:
            self._flush()

    def _keep(self, key: bytes, states_NH: torch.Tensor) -> None:
        manifest = self._manifest
        if manifest.kind == "top_k" or manifest.codec == "":
            parts = self._top_k(states_NH)
        else:
            parts = encode(states_NH, manifest.codec)
        self._keys.append(key)
        self._digests.append(answer_digest(parts))
        self._places.append((self._num_parts, self._waiting_rows, len(states_NH)))
        self._waiting.append(parts)
        self._waiting_rows += len(states_NH)
        self._waiting_bytes += sum(t.numel() * t.element_size() for t in parts.values())

    @torch.no_grad()
    def _top_k(self, states_NH: torch.Tensor) -> dict[str, torch.Tensor]:
        """The k likeliest tokens and their log-probabilities over the whole vocabulary."""
        manifest, ids, log_probs = self._manifest, [], []
        for chunk in states_NH.split(_CHUNK):
            logits_CV = head_logits(chunk, self._teacher.head)[:, : manifest.vocab_size]
            top = (logits_CV / manifest.temperature).log_softmax(-1).topk(manifest.k, -1)
            ids.append(top.indices.int().cpu())
            log_probs.append(top.values.float().cpu())
        return {"ids": torch.cat(ids), "log_probs": torch.cat(log_probs)}

    def _flush(self) -> None:
        if not self._waiting:
            return
        joined = {
            name: torch.cat([parts[name] for parts in self._waiting]) for name in self._waiting[0]
        }
        save_file(joined, self._folder / _part_name(self._rank, self._num_parts))
        self._num_parts += 1
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def finish(self) -> None:
        """Write this rank's last file and its share of the index."""
        self._flush()
        save_file(
            {
                "keys": _bytes(self._keys, 16),
                "digests": _bytes(self._digests, 8),
                "places": torch.tensor(self._places, dtype=torch.int64).reshape(-1, 3),
            },
            self._folder / f"index-{self._rank}.safetensors",
        )
        if self._rank == 0 and self._manifest.kind == "hidden_states":
            head = self._teacher.head
            tensors = {"weight": head.weight_VH, "bias": head.bias_V}
            save_file(
                {n: t.cpu().contiguous() for n, t in tensors.items() if t is not None},
                self._folder / HEAD,
            )


def join_ranks(folder: Path, manifest: Manifest, num_ranks: int) -> Manifest:
    """Make one index of the ranks' and write the manifest; on one rank, when all have finished."""
    keys: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    digests: list[torch.Tensor] = []
    parts: list[str] = []
    for rank in range(num_ranks):
        path = folder / f"index-{rank}.safetensors"
        index = load_file(path)
        mine = index["places"].clone()
        mine[:, 0] += len(parts)
        keys.append(index["keys"].clone())
        places.append(mine)
        digests.append(index["digests"].clone())
        count = int(index["places"][:, 0].max()) + 1 if len(mine) else 0
        parts += [_part_name(rank, number) for number in range(count)]
        path.unlink()
    all_keys, all_places = torch.cat(keys), torch.cat(places)
    # Two ranks may have met the same document.
    first_of = {key.tobytes(): row for row, key in reversed(list(enumerate(all_keys.numpy())))}
    rows = torch.tensor(sorted(first_of.values()), dtype=torch.int64)
    all_keys, all_places = all_keys[rows], all_places[rows]
    index = {"keys": all_keys, "places": all_places, "digests": torch.cat(digests)[rows]}
    save_file(index, folder / INDEX)
    manifest = replace(
        manifest,
        num_documents=len(all_keys),
        num_tokens=int(all_places[:, 2].sum()),
        parts=tuple(parts),
        head=file_digest(folder / HEAD) if manifest.kind == "hidden_states" else "",
    )
    # Written last: without it the folder is no cache.
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _counts(request: TeacherRequest) -> Iterable[int]:
    bounds = torch.tensor(request.rows.bounds)
    owners_N = torch.searchsorted(bounds, request.supervised_N, right=True) - 1
    return owners_N.unique_consecutive(return_counts=True)[1].tolist()


def _bytes(values: list[bytes], size: int) -> torch.Tensor:
    """[N, size] uint8."""
    return torch.from_numpy(np.frombuffer(b"".join(values), np.uint8).reshape(-1, size).copy())


def _part_name(rank: int, number: int) -> str:
    return f"part-{rank:03d}-{number:05d}.safetensors"
