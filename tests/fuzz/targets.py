"""What is fuzzed: a function of bytes for each parser, and the seeds to begin with.

A target returns where the input is read or refused in the project's own words, and raises whatever
else happens. Where there is something to compare a result with, it compares.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import socket
import struct
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelrag.config.base import dump, load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.ds_file import DeepSpeedFileError, read_deepspeed_file
from pixelrag.config.rag import RagConfig
from pixelrag.config.section import Section
from pixelrag.data.archives import ArchiveError, _scan
from pixelrag.data.array_file import map_array, read_arrays
from pixelrag.data.chat import parse_text_row
from pixelrag.data.images import check_image, strict_decoding
from pixelrag.data.passage_sources import parse_passage
from pixelrag.data.questions import parse_question
from pixelrag.data.schema import RowError, decode_line, parse_row
from pixelrag.data.text_encoder import TextEncoder
from pixelrag.data.tile_questions import load_tile_set
from pixelrag.data.token_store import TokenStore
from pixelrag.distributed.launched import adopt
from pixelrag.engine.ds_config import read_ds_config, resolve
from pixelrag.errors import ConfigError, DataError, PixelragError
from pixelrag.evaluate.runs import read_qrels, read_run
from pixelrag.models import wire
from pixelrag.models.answer_cache import Manifest as CacheManifest
from pixelrag.models.images import fit_image
from pixelrag.provenance.artifact import read_artifact
from pixelrag.retrieval.generation import Manifest
from pixelrag.train.atomic import read_manifest
from tests.unit.chat_templates import BRACKETS, CHATML, MARKED, chat_tokenizer
from tests.unit.token_stores import token_store

ROOT = Path(__file__).parents[2]
_HERE = Path("rows.jsonl")


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, inputs to begin with, and words that its inputs are made of."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[str, ...] = ()


@functools.cache
def scratch() -> Path:
    """A folder of this process, in memory where that can be."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - made anew below
    return Path(tempfile.mkdtemp(prefix="pixelrag-fuzz-", dir=memory))


def clean_up() -> None:
    """Remove what the targets wrote."""
    if scratch.cache_info().currsize:
        shutil.rmtree(scratch(), ignore_errors=True)
        scratch.cache_clear()


def _file(name: str, content: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


# --- rows ---------------------------------------------------------------------------------------


def rows(raw: bytes) -> None:
    """One line as each kind of row."""
    try:
        value = decode_line(raw, _HERE, 1)
    except RowError as error:
        _is_told(error)
        return
    for parse in (
        lambda: parse_row(value, _HERE, 1),
        lambda: parse_row(value, _HERE, 1, retrieved=True),
        lambda: parse_passage(value, _HERE, 1),
        lambda: parse_question(value, _HERE, 1),
        lambda: parse_text_row(value, "rows.jsonl:1"),
    ):
        try:
            found = parse()
        except RowError as error:
            _is_told(error)
        else:
            repr(found).encode("utf-8")  # what is taken can be tokenized and written


def _is_told(error: RowError) -> None:
    assert error.reasons
    assert str(error).startswith("rows.jsonl:1: ")
    assert len(str(error)) < 100_000


def _row_seeds() -> list[bytes]:
    some = [
        {"query": "q", "passage": "p", "neg_passages": ["n"], "pos_passages": ["x"]},
        {"query": "q", "chunk_path": "a/b_chunk_1.png", "neg_chunk_paths": ["t.tar::c.png"],
         "retrieve_top20": [{"rank": 1, "path": "d.png", "score": 0.5, "article_id": "7"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
         "positive_messages": [[{"role": "user", "content": "<image>"}]],
         "positive_images": [["a.png"]], "negative_messages": [[{"role": "user", "content": "n"}]]},
        {"id": 7, "text": "t", "title": "T"},
        {"question": "q", "answers": ["a", "b"], "passage_ids": [7, "8"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                      {"role": "assistant", "content": "y", "reasoning_content": "z",
                       "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
         "tools": '[{"type": "function"}]', "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "p", "completion": "c"},
        {"text": "\ud83d\ude00 \u00e9"},
    ]  # fmt: skip
    return [json.dumps(row).encode() for row in some] + [b"\xef\xbb\xbf{}", b"[[[[]]]]", b"1e999"]


# --- masks of chat templates --------------------------------------------------------------------


@functools.cache
def _encoders() -> dict[str, TextEncoder]:
    templates = {"chatml": CHATML, "marked": MARKED, "brackets": BRACKETS}
    return {name: TextEncoder(chat_tokenizer(text)) for name, text in templates.items()}


def masks(raw: bytes) -> None:
    """Answers out of the bytes, one on each odd line; exactly they are to be learnt."""
    turns = raw.decode("utf-8", "replace").split("\n")[:6]
    turns = turns[: len(turns) // 2 * 2]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    try:
        chat = parse_text_row({"messages": messages}, "row")
    except RowError:
        return
    for name, encoder in _encoders().items():
        (tokens,) = encoder.encode([chat])
        if isinstance(tokens, RowError):
            assert tokens.reasons
            continue
        begin = " " if name == "brackets" else ""
        expected = "".join(f"{begin}{answer}<|im_end|>" for answer in turns[1::2])
        got = encoder._tokenizer.decode(tokens.ids[tokens.supervised])
        assert _nfc(got) == _nfc(expected), (name, got, expected)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _mask_seeds() -> list[bytes]:
    return [
        *(b"why?\nso", b"a\nb\nc\nd", b"\n\n", "é\ne\u0301\nx\n y ".encode()),
        *(b"<think>\n</think>x", b"a\n<|im_start|>user", b"[INST] a\n[/INST] b", b"a\na\na\na"),
        b"assistant\nassistant\nuser\nassistant",
    ]


# --- configurations -----------------------------------------------------------------------------

JOBS: tuple[type[Section], ...] = (ContrastiveConfig, DistillConfig, RagConfig)


def config(raw: bytes) -> None:
    """A YAML file of a job; what is taken reads back as it was written."""
    job = JOBS[len(raw) % len(JOBS)]
    with contextlib.suppress(ConfigError):
        found, _ = load(job, ["--config", str(_file("run.yaml", raw))])
        written = _file("again.yaml", dump(found).encode())
        try:
            again, _ = load(job, ["--config", str(written)])
        except ConfigError as error:
            raise AssertionError("it does not read what it has written") from error
        assert again == found


def flags(raw: bytes) -> None:
    """A command line, its words apart by line ends."""
    words = raw.decode("utf-8", "surrogateescape").replace("\0", "").split("\n")
    words = [word for word in words if not word.startswith("--config")]
    with contextlib.suppress(ConfigError):
        load(JOBS[len(raw) % len(JOBS)], words)


def _config_seeds() -> list[bytes]:
    files = [*(ROOT / "recipes").glob("*.yaml")]
    return [path.read_bytes() for path in sorted(files)] + [
        b"a: &a [*a]",
        b"<<: {b: 1}",
        b"a: !!int x",
    ]


def _flag_seeds() -> list[bytes]:
    lines = [
        ["--data.train", "[a, b]", "--output_dir=x", "--optim.max_steps", "3"],
        ["--preset", "pixelrag", "--learning-rate", "1e-5", "--deepspeed", "x.json"],
        ["--model.name_or_path=m", "--data.train", "a,b", "--lora.enabled", "true", "--resume"],
    ]
    return ["\n".join(words).encode() for words in lines]


def deepspeed(raw: bytes) -> None:
    """A DeepSpeed file; what is resolved has no "auto" left."""
    path = _file("ds.json", raw)
    with contextlib.suppress(DeepSpeedFileError):
        read_deepspeed_file(path)
    try:
        user = read_ds_config(path)
    except ConfigError:
        return
    for stage in (1, 3):
        with contextlib.suppress(ConfigError):
            found = resolve(
                user, stage=stage, world_size=2, bf16=False, per_chunk=False, resident=True,
                offload_optimizer=False, num_trained=1000,
            )  # fmt: skip
            assert "auto" not in set(_values(found))


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _values(item)


def _deepspeed_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "ds_configs").glob("*.json"))]


def hosts(raw: bytes) -> None:
    """Slurm's variables, a line each: what Slurm's own hosts and tasks are called."""
    lines = raw.decode("utf-8", "surrogateescape").split("\n")
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_PROCID", "SLURM_NTASKS")
    environ = {"SLURM_STEP_ID": "0"} | dict(zip(names, lines, strict=False))
    with contextlib.suppress(ConfigError):
        adopt(environ)
        assert int(environ.get("LOCAL_WORLD_SIZE", "0")) >= 0


# --- what a run leaves behind -------------------------------------------------------------------


def manifests(raw: bytes) -> None:
    """One JSON file as each kind of manifest."""
    for name, read in (
        ("m/manifest.json", Manifest.read),
        ("m/manifest.json", CacheManifest.read),
        ("m/manifest.json", read_artifact),
        ("c/COMPLETE", read_manifest),
        ("c/COMPLETE", read_artifact),
        ("a/adapter_config.json", read_artifact),
    ):
        path = _file(name, raw)
        with contextlib.suppress(PixelragError):
            read(path.parent)
    _file("c/COMPLETE", b'{"format": 1, "info": {}, "versions": {}, "files": {}}')
    _file("c/state.json", raw)
    read_artifact(scratch() / "c")
    with contextlib.suppress(DataError):
        load_tile_set(_file("q.json", raw))
    store = scratch() / "store"
    if not store.exists():
        token_store([[True] * 3, [False, True]]).save(store)
    (store / "manifest.json").write_bytes(raw)
    with contextlib.suppress(DataError):
        TokenStore.load(store)


def _manifest_seeds() -> list[bytes]:
    files = {"vectors.npy": {"size": 1, "sha256": "0"}, "ids.npz": {"size": 1, "sha256": "0"}}
    generation = {
        **{"format": 1, "generation": 1, "step": 0, "num_passages": 1, "dim": 2},
        **{"metric": "inner_product", "index": {"factory": "Flat"}, "index_files": ["i.faiss"]},
        **{"fingerprints": {"weights": "w"}, "validation": {"recall": 1.0}, "files": files},
    }
    cache = CacheManifest(
        **{"kind": "top_k", "teacher": "t", "dtype": "float32", "vocab_size": 9, "vocabulary": "v"},
        **{"max_length": 9, "overlong": "drop", "data": ("d",), "num_documents": 1},
        **{"num_tokens": 1, "parts": ("part-0.safetensors",)},
    )
    info = {"engine": "ddp", "world_size": 1}
    checkpoint = {"format": 1, "info": info, "versions": {"torch": "2"}, "files": files}
    state = {"step": 1, "position": {"data": "d"}, "best": None, "fingerprint": "f"}
    tiles = {
        "tiles_dir": ".",
        "questions": [{"id": 1, "problem": "p", "answer": "a"}],
        "golden_mapping": {"1": ["a"]},
    }
    store = token_store([[True] * 3, [False, True]])
    tokens = {"format": 1, "fingerprint": store.fingerprint, "labels": ["train.jsonl"],
              "num_samples": 2, "num_tokens": 5}  # fmt: skip
    adapter = {"base_model_name_or_path": "m", "r": 8}
    found = [generation, checkpoint, state, tiles, tokens, adapter]
    return [json.dumps(one).encode() for one in found] + [cache.to_json().encode()]


def arrays(raw: bytes) -> None:
    """An .npz and an .npy file; nothing is larger than the file."""
    path = _file("array", raw)
    with contextlib.suppress(ValueError, OSError):
        found = read_arrays(path)
        assert sum(array.nbytes for array in found.values()) <= len(raw)
    with contextlib.suppress(ValueError, OSError):
        assert map_array(path).nbytes <= len(raw)


def _array_seeds() -> list[bytes]:
    one = io.BytesIO()
    np.savez(one, utf8=np.zeros(3, np.uint8), ends=np.array([1, 3]))
    two = io.BytesIO()
    np.savez_compressed(two, a=np.zeros(100))
    three = io.BytesIO()
    np.save(three, np.arange(6).reshape(2, 3))
    return [one.getvalue(), two.getvalue(), one.getvalue()[:-30], three.getvalue()]


def trec(raw: bytes) -> None:
    """A run and qrels; scores are finite and fall."""
    path = _file("trec", raw)
    with contextlib.suppress(DataError):
        for found in read_run(path).values():
            scores = [score for _, score in found]
            assert np.isfinite(scores).all()
            assert scores == sorted(scores, reverse=True)
    with contextlib.suppress(DataError):
        assert read_qrels(path)


# --- images, archives, messages -----------------------------------------------------------------


def images(raw: bytes) -> None:
    """An image file: what the check passes, training can read."""
    path = _file("image", raw)
    with strict_decoding(1_000_000):
        fault = check_image(path)
    try:
        fit_image(path, factor=32, min_tokens=1, max_tokens=16)
    except DataError:
        assert fault is not None, "passed the check, and cannot be read"


def _image_seeds() -> list[bytes]:
    seeds = []
    for mode, kinds in {
        "RGB": ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
        **{"CMYK": ("JPEG", "TIFF"), "P": ("PNG", "GIF"), "LA": ("PNG",), "1": ("PNG", "TIFF")},
        **{"I;16": ("PNG", "TIFF"), "F": ("TIFF",), "RGBA": ("PNG", "WEBP")},
    }.items():
        for kind in kinds:
            buffer = io.BytesIO()
            exif = Image.Exif()
            exif[0x0112] = 6
            extra: dict[str, Any] = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP") else {}
            Image.new(mode, (9, 5)).save(buffer, kind, **extra)
            seeds.append(buffer.getvalue())
    return seeds


def tar(raw: bytes) -> None:
    """A tar archive; every member lies within it, and its name within the archive."""
    path = _file("t.tar", raw)
    with contextlib.suppress(ArchiveError):
        for name, (offset, size) in _scan(path, len(raw)).items():
            assert 0 <= offset <= offset + size <= len(raw)
            assert not name.startswith("/")
            assert ".." not in name.split("/")


def _tar_seeds() -> list[bytes]:
    seeds = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for name in ("a/b.png", "é" * 30, "long/" * 25 + "x"):
                member = tarfile.TarInfo(name)
                member.size = 5
                with contextlib.suppress(ValueError):
                    archive.addfile(member, io.BytesIO(b"12345"))
        seeds.append(buffer.getvalue()[:4096])
    sparse = tarfile.TarInfo("s")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.size": "9"}
    return [*seeds, sparse.tobuf(tarfile.PAX_FORMAT) + bytes(1024)]


def messages(raw: bytes) -> None:
    """Messages to a teacher."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(raw[:100_000])
        theirs.shutdown(socket.SHUT_WR)
        ours.settimeout(5)
        with contextlib.suppress(ValueError, ConnectionError):
            while wire.receive(ours) is not None:
                pass


def _message_seeds() -> list[bytes]:
    def packed(header: dict[str, Any], body: bytes = b"") -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    return [
        packed({"ask": "greeting", "tensors": []}),
        packed({"ask": "states", "tensors": [["ids", "int64", [2, 1]]]}, bytes(16)),
        packed({"tensors": [["a", "bfloat16", [0]], ["b", "int8", [3]]]}, b"abc"),
    ]


TARGETS: dict[str, Target] = {
    "rows": Target(
        rows, _row_seeds, ("query", "chunk_path", "messages", "\\ud800", "NaN", "tools")
    ),
    "masks": Target(masks, _mask_seeds, ("<|im_end|>", "<|im_start|>", "<think>", "[INST]")),
    "config": Target(config, _config_seeds, ("!!int", "!!python/name:x", "&a", "*a", "<<:", "~")),
    "flags": Target(flags, _flag_seeds, ("--preset", "--optim.", "[", "null", "=")),
    "deepspeed": Target(deepspeed, _deepspeed_seeds, ('"auto"', '"params"', '"enabled"', "NaN")),
    "hosts": Target(hosts, lambda: [b"8(x2),4\n1\n3\n9", b"2\n0\n0\n2", b"1(x3)\n2"], ("(x", "),")),
    "manifests": Target(manifests, _manifest_seeds, ('"format"', '"files"', '"../x"', "null")),
    "arrays": Target(arrays, _array_seeds, ("PK\x03\x04", "\x93NUMPY", "'descr'", "'|O'")),
    "trec": Target(trec, lambda: [b"q Q0 d 1 0.5 t\n", b"q 0 d 1\nq 0 e 0\r\n"], ("NaN", "1e999")),
    "images": Target(images, _image_seeds, ("IHDR", "eXIf", "tRNS", "acTL", "JFIF", "VP8X")),
    "tar": Target(tar, _tar_seeds, ("ustar", "GNU.sparse.map=", "size=", "path=")),
    "messages": Target(messages, _message_seeds, ('"tensors"', '"int8"', "[1]")),
}


def regressions(name: str) -> Iterator[bytes]:
    """What was found once, by the name of a target."""
    for path in sorted((Path(__file__).parent / "regressions" / name).glob("*")):
        yield path.read_bytes()
