"""A teacher's answers on disk: final hidden states (exact or int8), or top-k logits.

An answer is kept for each document and found by the document's own tokens, so neither packing nor
the order, split or number of samples matters, and a wrong answer cannot be found by mistake.

manifest.json           what the answers are of: teacher, vocabulary, data, lengths, temperature
index.safetensors       documents: key, shard, first row, rows, digest of the answer
head.safetensors        the head, for hidden states
part-*.safetensors      the answers, row after row; mapped, read where they are used

Each answer is compared with its digest where it is read: caches are too large to be hashed at every
start, and a flipped bit or two files exchanged would teach something else without a word.

The ceiling of top-k: of Qwen's 151,669 tokens, 8 are 0.0053 %. What the others are worth together
is known (1 minus the k probabilities) and costs as one further outcome; how it is spread among
them is lost, and at T = 2 it is often most of the mass. Hidden states lose nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from pixelrag.errors import ProvenanceError
from pixelrag.json_text import is_beside, read_json
from pixelrag.losses.kd import Head, Projected, TopK
from pixelrag.models.state_codec import Codec, decode
from pixelrag.models.teacher import TeacherRequest

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
HEAD = "head.safetensors"
FORMAT = 2

Kind = Literal["hidden_states", "top_k"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a cache holds, and of what.

    Attributes:
        kind: `hidden_states` or `top_k`.
        teacher: name of the model.
        dtype: of its states.
        vocab_size: real tokens.
        vocabulary: fingerprint of the map from id to token over these.
        max_length: tokens of a row (`packing.length`); longer samples were cut.
        overlong: how they were cut.
        data: fingerprints of the tokenized data sets.
        num_documents, num_tokens: documents, and supervised tokens among them.
        codec: of hidden states; "" for top-k.
        k: kept tokens; 0 for hidden states.
        temperature: of the kept log-probabilities; 0 for hidden states.
        logit_scale, soft_cap: of the head.
        parts: names of the files that hold the answers.
        head: SHA-256 of the head's file; "" for top-k.
    """

    kind: Kind
    teacher: str
    dtype: str
    vocab_size: int
    vocabulary: str
    max_length: int
    overlong: str
    data: tuple[str, ...]
    num_documents: int
    num_tokens: int
    codec: Codec | Literal[""] = ""
    k: int = 0
    temperature: float = 0.0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    parts: tuple[str, ...] = ()
    head: str = ""

    def to_json(self) -> str:
        """As the file has it."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "digest": _digest_of(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a cache's manifest.

        Raises:
            ProvenanceError: there is none, or it cannot be read.
        """
        path = folder / MANIFEST
        try:
            content = read_json(path)
            digest = content.pop("digest", None)
            if content["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            if digest != _digest_of(content):
                raise ValueError("it is altered")
            del content["format"]
            lists = {name: tuple(content[name]) for name in ("data", "parts")}
            if not all(map(is_beside, lists["parts"])):
                raise ValueError(f"parts are files beside it, got {lists['parts']}")
            return cls(**content | lists)
        except FileNotFoundError:
            raise ProvenanceError(
                f"teacher.path {folder}: no {MANIFEST} there; `pixelrag cache-states` and "
                "`pixelrag cache-logits` write one when they are done"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProvenanceError(
                f"{path}: cannot be read ({error}); write the cache anew"
            ) from error

    def check(self, folder: Path, expected: Mapping[str, Any]) -> None:
        """Refuse a cache that is of something else.

        Args:
            folder: for messages.
            expected: what the run needs, by attribute; of `data`, what must be among it.

        Raises:
            ProvenanceError: names every difference.
        """
        differing = []
        for name, wanted in expected.items():
            has = getattr(self, name)
            same = set(wanted) <= set(has) if name == "data" else has == wanted
            if not same:
                differing.append(f"{name}: the cache has {_short(has)}, the run {_short(wanted)}")
        if differing:
            raise ProvenanceError(
                f"teacher.path {folder} does not belong to this run:\n"
                + "\n".join(f"  {text}" for text in differing)
                + "\nWrite it anew with this configuration, or restore the settings and data"
            )


class CachedTeacher:
    """Answers from a cache.

    Args:
        folder: of the cache.
        device: where answers are needed.

    Raises:
        ProvenanceError: files are missing or do not fit together.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.manifest = Manifest.read(folder)
        self._folder = folder
        self._device = device
        try:
            index = load_file(folder / INDEX)
            keys, self._places = index["keys"].numpy(), index["places"].tolist()
            self._digests = index["digests"].numpy()
            if keys.dtype != np.uint8 or keys.shape != (len(keys), 16):
                raise ValueError(f"{INDEX}: keys are {keys.dtype} {list(keys.shape)}")
            self._rows = {key.tobytes(): row for row, key in enumerate(keys)}
            self._parts = [
                safe_open(folder / name, framework="pt").__enter__() for name in self.manifest.parts
            ]
            self._names = list(self._parts[0].keys())
            self._require_places()
            self._head = self._read_head() if self.manifest.kind == "hidden_states" else None
        except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
            raise ProvenanceError(
                f"teacher.path {folder}: {error}; write the cache anew"
            ) from error
        if len(self._rows) != self.manifest.num_documents:
            raise ProvenanceError(
                f"teacher.path {folder}: {len(self._rows)} documents, expected "
                f"{self.manifest.num_documents}; write the cache anew"
            )

    def _require_places(self) -> None:
        """Every document's answers lie within their file."""
        sizes = [
            min(part.get_slice(name).get_shape()[0] for name in self._names) for part in self._parts
        ]
        for part, start, count in self._places:
            if not 0 <= part < len(sizes) or not 0 <= start <= start + count <= sizes[part]:
                raise ValueError(f"{INDEX}: rows {start} to {start + count} of part {part}")

    def _read_head(self) -> Head:
        if file_digest(self._folder / HEAD) != self.manifest.head:
            raise ProvenanceError(f"{self._folder / HEAD} is altered; write the cache anew")
        tensors = {n: t.to(self._device) for n, t in load_file(self._folder / HEAD).items()}
        return Head(
            tensors["weight"],
            tensors.get("bias"),
            None,
            logit_scale=self.manifest.logit_scale,
            soft_cap=self.manifest.soft_cap,
        )

    def answer(self, request: TeacherRequest) -> Projected | TopK:
        """Look the documents up.

        Raises:
            ProvenanceError: one of them is not there.
        """
        found = [self._document(key, tokens) for key, tokens in document_keys(request)]
        joined = {
            name: torch.cat([part[name] for part in found])
            if found
            else self._parts[0].get_slice(name)[0:0]
            for name in self._names
        }
        if self._head is None:
            return TopK(joined["ids"].long().to(self._device), joined["log_probs"].to(self._device))
        states_NH = decode(joined, getattr(torch, self.manifest.dtype))
        return Projected(states_NH.to(self._device), self._head)

    def _document(self, key: bytes, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        row = self._rows.get(key)
        if row is None:
            raise ProvenanceError(
                f"teacher.path {self._folder}: no answer for a document of {len(tokens)} tokens "
                f"that begins with {tokens[:8].tolist()}; was the cache written from the same "
                "data with the same data.*, packing.length and packing.overlong?"
            )
        part, start, count = self._places[row]
        file = self._parts[part]
        found = {name: file.get_slice(name)[start : start + count] for name in self._names}
        if answer_digest(found) != self._digests[row].tobytes():
            raise ProvenanceError(
                f"{self._folder / self.manifest.parts[part]}: rows {start} to {start + count} are "
                "not what the teacher said: the file is altered, or another's; write the cache anew"
            )
        return found

    def close(self) -> None:
        """Unmap the files."""
        for part in self._parts:
            part.__exit__(None, None, None)
        self._parts = []


def document_keys(request: TeacherRequest) -> Iterator[tuple[bytes, torch.Tensor]]:
    """For each document with supervised tokens its key, and the tokens that the key stands for.

    States depend on the tokens up to their own, so what follows the last supervised position (a
    separator, the end of a row) is no part of it.
    """
    ids_T = request.rows.input_ids_BT.flatten()
    bounds = torch.tensor(request.rows.bounds)
    owners_N = torch.searchsorted(bounds, request.supervised_N, right=True) - 1
    documents, counts = owners_N.unique_consecutive(return_counts=True)
    for document, positions in zip(
        documents.tolist(), request.supervised_N.split(counts.tolist()), strict=True
    ):
        start = request.rows.bounds[document]
        tokens = ids_T[start : int(positions[-1]) + 1]
        digest = hashlib.blake2b(digest_size=16)
        digest.update(tokens.to(torch.int32).numpy().tobytes())
        digest.update(b"|")
        digest.update((positions - start).to(torch.int32).numpy().tobytes())
        yield digest.digest(), tokens


def answer_digest(answer: Mapping[str, torch.Tensor]) -> bytes:
    """Eight bytes that tell a document's answer from any other."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(answer):
        digest.update(name.encode())
        digest.update(answer[name].contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    values = value if isinstance(value, tuple | list) else [value]
    texts = [str(item) for item in values]
    return ", ".join(t if len(t) <= 40 else t[:12] + "..." for t in texts) or "nothing"
