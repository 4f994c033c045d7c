"""A starter for the contrastive job: pairs of text or tiles, hard negatives, a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelrag.config.parts import ModelConfig
from pixelrag.data.files import data_files
from pixelrag.data.lengths import Lengths, Sample, quantile, token_lengths, visual_lengths
from pixelrag.data.schema import PairRow, parse_row
from pixelrag.errors import DataError, ModelError
from pixelrag.init import shared
from pixelrag.init.look import count, kind_of_file, power_of_two, rows_of
from pixelrag.init.starter import Choice

VISION_MODEL = "Qwen/Qwen3-VL-Embedding-2B"
_MOST_VISUAL = 1280


class Pairs:
    """What the rows to train on look like."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.queries: Sample[str] = Sample()
        self.texts: Sample[str] = Sample()
        self.images: Sample[tuple[Path, str]] = Sample()
        self.negatives: Sample[int] = Sample()

    def add(self, row: PairRow) -> None:
        """Take a row into account."""
        self.num_rows += 1
        self.queries.add(row.query)
        self.negatives.add(len(row.negatives))
        for document in row.documents:
            if document.image is not None:
                self.images.add((document.image, row.sample_id))
            elif document.text is not None:
                self.texts.add(document.text)

    def said(self) -> str:
        """In words."""
        kinds = [
            f"{sample.seen:,} {name}"
            for name, sample in (("texts", self.texts), ("images", self.images))
            if sample.seen
        ]
        return f"{count(self.num_rows, 'row')} that name {' and '.join(kinds)} as documents"


def choices(paths: list[str], given: dict[str, Any]) -> Iterator[Choice]:
    """Look at the files, and choose.

    Raises:
        DataError: a file holds something else; names file and line.
    """
    train, held_out, corpus = _sorted(paths)
    pairs = Pairs()
    files = [str(file) for path in train for file in data_files(path, "train")]
    others = [str(file) for path in held_out for file in data_files(path, "eval")]
    outside = shared.Outside([*files, *others])
    for file in [*files, *others]:
        for row in rows_of(file, "pair", parse_row, skip=shared.bad_rows(given) == "skip"):
            if file in files:
                pairs.add(row)
            for document in row.documents:
                if document.image is not None:
                    outside.add(document.image)
    model = given.get("model", {}).get("name_or_path") or _default_model(pairs)
    vision, tokenizer, factor = _read_model(model, given)
    if vision is False and pairs.images.seen:
        raise DataError(
            f"{', '.join(train)}: {pairs.images.seen:,} documents are images, such as "
            f"{pairs.images.items[0][0]}, but {model} reads text only; name a vision model such as "
            f"{VISION_MODEL} in --model.name_or_path"
        )
    vision = bool(pairs.images.seen) if vision is None else vision
    gpu = shared.has_gpu()
    yield shared.output_dir("contrastive", train[0])
    yield from _model(model, vision, gpu, pairs, tokenizer, factor)
    yield from _data(train, held_out, pairs)
    yield from outside.choice("data.image_roots")
    batch = min(64 if vision else 128, max(2, power_of_two(pairs.num_rows / 4)))
    yield from _batch(batch, vision)
    steps, length = shared.length_of_run(pairs.num_rows, batch, "rows")
    yield from length
    if vision:
        yield Choice("optim.learning_rate", 1e-5, "For adapters of a model that embeds already.")
    else:
        yield Choice("optim.learning_rate", 2e-5, "For all weights of a small encoder.")
    held = bool(held_out)
    yield from shared.evaluation(steps, "eval/ndcg@10", held, "data.eval=held_out.jsonl")
    if corpus and held:
        yield Choice("eval.corpus", corpus[0], "Documents to search, of a file of passages.")
    elif held:
        yield Choice(
            "eval.corpus", "corpus.jsonl",
            'Search these documents, {"id", "text" or "chunk_path"}, not only those of the rows.',
            off=True,
        )  # fmt: skip
    yield from shared.engine(gpu)


def _sorted(paths: list[str]) -> tuple[list[str], list[str], list[str]]:
    """(to train on, held out, corpus)."""
    kinds = {}
    for path in paths:
        file = data_files(path, "train")[0]
        kinds[path] = kind_of_file(str(file), ["pair", "passage"])
    pairs = [path for path in paths if kinds[path] == "pair"]
    corpus = [path for path in paths if kinds[path] == "passage"]
    if not pairs:
        raise DataError(
            f"{', '.join(corpus)}: passages alone; name a file of queries with their documents too"
        )
    if len(corpus) > 1:
        raise DataError(f"{' and '.join(corpus)}: one file of passages is a corpus; name one")
    train, held_out = shared.by_use(pairs)
    # A folder holds train.jsonl, and often eval.jsonl beside it.
    for path in train:
        if Path(path).is_dir():
            try:
                data_files(path, "eval")
            except DataError:
                continue
            held_out.append(path)
    return train, held_out, corpus


def _default_model(pairs: Pairs) -> str:
    if pairs.images.seen:
        return VISION_MODEL
    if shared.is_installed(shared.MINILM):
        return f"package:{shared.MINILM}/model"
    return "sentence-transformers/all-MiniLM-L6-v2"


def _read_model(name: str, given: dict[str, Any]) -> tuple[bool | None, Any | None, int]:
    """Whether it reads images, its tokenizer, pixels of a visual token; None = it is not there."""
    from pixelrag.models.load import outline_embedder, read_preprocessor

    # The flags' other options are judged once the whole file is.
    model = ModelConfig(name_or_path=name)
    try:
        preprocessor = read_preprocessor(model, outline_embedder(model))
    except ModelError:
        if "model" in given:
            raise
        return None, None, 32
    return preprocessor.has_vision, preprocessor.tokenizer, preprocessor.visual_side or 32


def _model(
    name: str, vision: bool, gpu: bool, pairs: Pairs, tokenizer: Any | None, factor: int
) -> Iterator[Choice]:
    here = "It comes with an installed package: nothing is downloaded." if ":" in name else ""
    yield Choice(
        "model.name_or_path",
        name,
        f"{'Reads text and images' if vision else 'Reads text alone'}. {here}".strip(),
    )
    queries = token_lengths(pairs.queries.items, tokenizer)
    yield Choice(
        "model.query_max_length",
        queries.at_most(2048) + (64 if vision else 0),
        queries.why("queries", pairs.queries.seen)
        + (" The instruction takes some as well." if vision else ""),
    )
    texts = token_lengths(pairs.texts.items, tokenizer) if pairs.texts.items else None
    images = visual_lengths(pairs.images.items, factor) if pairs.images.items else None
    yield from _document_lengths(pairs, texts, images)
    if vision:
        yield Choice(
            "model.gradient_checkpointing", gpu, "Less memory for a third more time.", off=not gpu
        )
        yield Choice("lora.enabled", True, "Train adapters: all weights would need several GPUs.")
        yield Choice("lora.vision", "all", "Adapt the vision tower too: tiles are unlike photos.")


def _document_lengths(
    pairs: Pairs, texts: Lengths | None, images: Lengths | None
) -> Iterator[Choice]:
    if images is None and texts is not None:
        yield Choice(
            "model.document_max_length",
            texts.at_most(8192),
            texts.why("documents", pairs.texts.seen) + " What is longer is cut.",
        )
    elif images is not None:
        visual = images.at_most(_MOST_VISUAL)
        why = images.why("images", pairs.images.seen)
        yield Choice("model.max_visual_tokens", visual, why + " Larger images are scaled down.")
        longest = max(visual, texts.at_most(8192) if texts else 0)
        yield Choice(
            "model.document_max_length",
            longest + 128,
            "An image is never cut: its tokens and the instruction must fit."
            + (" " + texts.why("texts among the documents", pairs.texts.seen) if texts else ""),
        )


def _data(train: list[str], held_out: list[str], pairs: Pairs) -> Iterator[Choice]:
    yield Choice("data.train", shared.one_or_list(train), f"{pairs.said().capitalize()}.")
    if held_out:
        yield Choice("data.eval", shared.one_or_list(held_out), "Held out, by name.")
    if len(train) > 1:
        yield Choice(
            "data.mixing", "proportional",
            "Exact shares of all sets in every batch; else rows of all sets are shuffled together.",
            off=True,
        )  # fmt: skip
    fewest, most = min(pairs.negatives.items), max(pairs.negatives.items)
    if most:
        yield Choice(
            "data.num_hard_negatives",
            min(7, quantile(pairs.negatives.items, 0.9)) or 1,
            f"Rows name {fewest} to {most} hard negatives; each costs as much as a document.",
        )
    else:
        yield Choice(
            "data.num_hard_negatives", 2,
            "No row names hard negatives: `pixelrag mine` finds some with a model.", off=True,
        )  # fmt: skip


def _batch(size: int, vision: bool) -> Iterator[Choice]:
    yield Choice(
        "batch.per_device_batch_size", size,
        f"A query is told from the other rows' documents: {size - 1} in-batch negatives on one "
        "process, more on several. More make a harder task for more time and hardly any memory.",
    )  # fmt: skip
    yield Choice(
        "batch.chunk_size", min(size, 4 if vision else 16),
        "Rows at once through the model: the memory, never the result. Raise it until memory is "
        "full.",
    )  # fmt: skip
