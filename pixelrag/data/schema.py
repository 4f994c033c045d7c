"""What one line of a data file means: PixelRAG's JSONL and its text form.

A row asks for one document and may name documents that look right and are not:

    {"query": "...", "chunk_path": "tiles/7.png", "neg_chunk_paths": ["tiles/9.png"]}
    {"query": "...", "passage": "...",            "neg_passages": ["..."]}

A query with several right answers names the others beside the first, of either kind; they may all
be found, and none of them is another's negative:

    {"query": "...", "chunk_path": "tiles/7.png", "pos_chunk_paths": ["tiles/8.png"],
     "pos_passages": ["..."], "neg_chunk_paths": ["tiles/9.png"]}

Rows of ms-swift's form are read as well, see `pixelrag.data.swift`.

All kinds may stand in one file. Paths are relative to the file they stand in. `null`, `[]` and a
missing key all mean "none". Every other key is ignored, so that PixelRAG's own files (which also
carry `source_dataset`, `retrieve_top20`, `positive_score`, ...) are read as they are.

Nothing here opens an image: see `pixelrag.data.images`.
"""

import difflib
import itertools
import json
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pixelrag.data.archives import normal_path
from pixelrag.data.forms import FORMS
from pixelrag.data.retrieved import KEY, retrieved_negatives
from pixelrag.errors import DataError
from pixelrag.json_text import parse_json

# JSON can spell characters that no tokenizer, file system or UTF-8 encoder takes.
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")
# What is longer is no spelling mistake, and no path that a system would open.
_MAX_KEYS, _LONGEST_KEY, _LONGEST_PATH = 64, 40, 4096
_POSITIVES = ("pos_passages", "pos_chunk_paths")
_NEGATIVES = (("neg_passages", "passage"), ("neg_chunk_paths", "chunk_path"))
_KEYS = ("query", "passage", "chunk_path", "neg_passages", "neg_chunk_paths", *_POSITIVES)


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of text or the path of an image: exactly one of the two.

    `key` tells documents apart without opening them: "text:" and a hash of the passage, or "image:"
    and the absolute path. Equal keys mean the same document, in any row of any file.
    """

    text: str | None
    image: Path | None
    key: str

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError(f"Document {self.key!r}: give exactly one of text and image")

    @classmethod
    def of_text(cls, text: str) -> "Document":
        """The document that consists of this passage."""
        digest = blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
        return cls(text=text, image=None, key=f"text:{digest}")

    @classmethod
    def of_image(cls, path: str | os.PathLike[str]) -> "Document":
        """The document that this image shows; the path is made absolute, not opened.

        Raises:
            ValueError: it names no place within its archive, see `archives.normal_path`.
        """
        # Without "..", so that two spellings of a path are one document.
        image = normal_path(path)
        return cls(text=None, image=image, key=f"image:{image}")


@dataclass(frozen=True, slots=True)
class PairRow:
    """A query, the documents that answer it (mostly one), and its hard negatives.

    Each in the order of the file. `sample_id` ("train.jsonl:12", lines counted from 1) is what
    errors name.
    """

    query: str
    positives: tuple[Document, ...]
    negatives: tuple[Document, ...]
    sample_id: str

    @property
    def positive(self) -> Document:
        """The first of the documents that answer the query."""
        return self.positives[0]

    @property
    def documents(self) -> tuple[Document, ...]:
        """Positives, then negatives."""
        return self.positives + self.negatives


class RowError(DataError):
    """A line that is no usable row.

    Attributes:
        reasons: everything that is wrong with it, each a sentence for the user.
        images: the images that it names all the same, so that a caller can check them as well and
            report the whole row at once.
    """

    def __init__(self, where: str, reasons: list[str], images: list[Path] | None = None) -> None:
        super().__init__(f"{where}: " + "; ".join(reasons))
        self.reasons = reasons
        self.images = images or []


def decode_line(raw: bytes, file: Path, line: int) -> object:
    """The JSON value of one line (without its line ending).

    Raises:
        RowError: not UTF-8, not JSON, nested too deeply, or an object that names a key twice
            (of which Python's parser silently keeps the last). `NaN` passes: Python's writers put
            it into fields such as `positive_score`, which nothing here reads.
    """
    try:
        return parse_json(raw, finite=False, one_line=True)
    except ValueError as error:
        raise RowError(f"{file}:{line}", [str(error)]) from error


def parse_row(
    obj: object, file: Path, line: int, *, label: str | None = None, retrieved: bool = False
) -> PairRow:
    """Turn the JSON value of one line into a row; no file is opened.

    Args:
        obj: the decoded line, see `decode_line`.
        file: the file it stands in; relative image paths start from its folder.
        line: its line number, from 1.
        label: name of the file in `sample_id` (default: the file's own name).
        retrieved: where it names no negatives, take them from its `retrieve_top20`.

    A document named twice in a row is kept once, since the second would only double the weight of
    the first in the softmax.

    Raises:
        RowError: listing everything that is wrong with the row.
    """
    where = f"{file}:{line}"
    if not isinstance(obj, dict):
        raise RowError(where, [f"a row is a JSON object, got {kind_of(obj)}"])
    reasons: list[str] = []
    for form in FORMS:
        if form.matches(obj):
            obj = form.plain(obj, reasons)
            break
    query = usable_text(obj.get("query"), "query", reasons)
    passage, chunk_path = obj.get("passage"), obj.get("chunk_path")
    positive: Document | None = None
    if passage is not None and chunk_path is not None:
        reasons.append(
            "has both passage and chunk_path; name one, and further positives in "
            + " or ".join(_POSITIVES)
        )
    elif passage is None and chunk_path is None:
        keys = ", ".join(map(_show, list(obj)[:12])) or "no key at all"
        reasons.append(f"has neither passage nor chunk_path; it has {keys}")
    elif passage is not None:
        positive = _document(passage, "passage", file, reasons)
    else:
        positive = _document(chunk_path, "chunk_path", file, reasons)

    for key in [key for key in itertools.islice(obj, _MAX_KEYS) if len(key) <= _LONGEST_KEY]:
        meant = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.85)
        if key not in _KEYS and meant and meant[0] not in obj:
            reasons.append(f"has a key {_show(key)}; did you mean {meant[0]}?")
    positives = {} if positive is None else {positive.key: positive}
    for name in _POSITIVES:
        found = _documents(obj.get(name), name, file, reasons)
        positives |= {document.key: document for document in found}
    if retrieved and not reasons and chunk_path is not None and not obj.get("neg_chunk_paths"):
        paths = [chunk_path, *(obj.get("pos_chunk_paths") or [])]
        obj = obj | {"neg_chunk_paths": retrieved_negatives(obj.get(KEY) or [], paths, reasons)}
    negatives: dict[str, Document] = {}
    for name, partner in _NEGATIVES:
        found = _documents(obj.get(name), name, file, reasons)
        if found and obj.get(partner) is None:
            reasons.append(f"has {name} without {partner}; the two go together")
        negatives |= {document.key: document for document in found}
    if positives.keys() & negatives.keys():
        reasons.append("names its positive document among its negatives")
    if reasons or query is None:
        named = [*positives.values(), *negatives.values()]
        raise RowError(where, reasons, [document.image for document in named if document.image])
    sample_id = f"{label or file.name}:{line}"
    return PairRow(query, tuple(positives.values()), tuple(negatives.values()), sample_id)


def parse_corpus_entry(obj: object, file: Path, line: int) -> tuple[str, Document]:
    """Turn one line of a corpus, `{"id", "text"}` or `{"id", "chunk_path"}`, into id and document.

    Raises:
        RowError: listing everything that is wrong with the entry.
    """
    where = f"{file}:{line}"
    if not isinstance(obj, dict):
        raise RowError(where, [f"an entry is a JSON object, got {kind_of(obj)}"])
    reasons: list[str] = []
    identity = obj.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    identity = usable_text(identity, "id", reasons)
    named = [name for name in ("text", "chunk_path") if obj.get(name) is not None]
    document: Document | None = None
    if len(named) == 1:
        document = _document(obj[named[0]], named[0], file, reasons)
    else:
        reasons.append("has " + ("both" if named else "neither") + " of text and chunk_path")
    if reasons or identity is None or document is None:
        images = [document.image] if document and document.image else []
        raise RowError(where, reasons, images)
    return identity, document


def _document(value: object, name: str, file: Path, reasons: list[str]) -> Document | None:
    text = usable_text(value, name, reasons)
    if text is None:
        return None
    if "chunk_path" in name:
        if len(text) > _LONGEST_PATH:
            reasons.append(f"{name} has {len(text):,} characters, which is no path")
            return None
        try:
            return Document.of_image(file.parent / text)
        except ValueError as error:
            reasons.append(f"{name} {error}")
            return None
    return Document.of_text(text)


def _documents(value: object, name: str, file: Path, reasons: list[str]) -> list[Document]:
    if value is None:
        return []
    if not isinstance(value, list):
        reasons.append(f"{name} is a list of strings, got {kind_of(value)}")
        return []
    found = [_document(item, f"{name}[{i}]", file, reasons) for i, item in enumerate(value)]
    return [document for document in found if document is not None]


def usable_text(value: object, name: str, reasons: list[str], *, blank: bool = False) -> str | None:
    """The value when it is a usable string (`blank`: perhaps an empty one), else None and one
    more reason."""
    if value is None:
        reasons.append(f"{name} is missing")
    elif not isinstance(value, str):
        reasons.append(f"{name} is a string, got {kind_of(value)}")
    elif not value.strip() and not blank:
        reasons.append(f"{name} is empty")
    elif bad := _UNUSABLE.search(value):
        which = "a NUL" if bad.group() == "\x00" else f"half a surrogate pair {bad.group()!a}"
        reasons.append(f"{name} contains {which} at character {bad.start() + 1}")
    else:
        return value
    return None


def kind_of(value: object) -> str:
    """A JSON value's kind and its beginning, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    kind = "null" if value is None else names.get(type(value), "a number")
    return kind if value is None else f"{kind} ({_show(value)})"


def _show(value: object) -> str:
    # A data set's rows may hold what JSON does not, such as days.
    text = json.dumps(value, default=str)  # ASCII only, so that any terminal and log takes it
    return text if len(text) <= 40 else text[:37] + "..."
