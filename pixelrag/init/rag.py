"""A starter for the RAG job: questions with answers, and a knowledge base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelrag.config.parts import ModelConfig
from pixelrag.data.lengths import SAMPLE, Sample, token_lengths, visual_lengths
from pixelrag.data.passage_sources import Passage
from pixelrag.data.passages import PassageStore, load_passages
from pixelrag.data.questions import Question, QuestionDataset
from pixelrag.errors import DataError, ModelError
from pixelrag.init import generator, shared
from pixelrag.init.look import count, kind_of_file, power_of_two
from pixelrag.init.starter import Choice

_EXACT = 50_000
_LONG = 256
_MOST_VISUAL = 1280


def choices(paths: list[str], given: dict[str, Any]) -> Iterator[Choice]:
    """Look at the files, and choose.

    Raises:
        DataError: a file holds something else; names file and line.
    """
    files, source = _sorted(paths)
    train, held_out = shared.by_use(files)
    passages = load_passages(source, open_images=False)
    bad_rows = shared.bad_rows(given)
    questions = QuestionDataset(train, bad_rows, passages=passages)
    for path in held_out:
        QuestionDataset(path, bad_rows, passages=passages)
    sample: Sample[Question] = Sample()
    for question in questions:
        sample.add(question)
    gpu = shared.has_gpu()
    yield shared.output_dir("rag", train[0])
    yield from _knowledge(source, passages)
    read = _read(passages)
    if Path(source).is_file():
        outside = shared.Outside([source])
        for passage in read:
            if passage.image is not None:
                outside.add(passage.image)
        yield from outside.choice("knowledge_base.image_roots")
    yield from _encoder(read, len(passages), sample, given)
    yield from generator.choices(questions, sample.items, read, given, gpu)
    yield from _questions(train, held_out, questions)
    batch = min(16, max(2, power_of_two(len(questions) / 8)))
    k = min(5, len(passages))
    yield Choice(
        "batch.per_device_batch_size", batch, f"Questions of a process in a step, {k} prompts each."
    )
    yield Choice("batch.generator_chunk_size", 4, "Prompts at once: the memory, not the result.")
    yield Choice("retrieval.k", k, "Passages that an answer is written from.")
    steps, length = shared.length_of_run(len(questions), batch, "questions")
    yield from length
    yield Choice("optim.learning_rate", 3e-5 if gpu else 1e-4, "Of AdamW, at its peak.")
    exact = len(passages) <= _EXACT
    yield Choice(
        "index.factory",
        "Flat" if exact else "HNSW32",
        f"{count(len(passages), 'passage')}: {'few enough to look at each' if exact else 'many'}.",
    )
    often = max(1, steps // 5)
    yield Choice(
        "refresh.every_steps", often, "Passages are encoded and indexed anew, beside the training."
    )
    yield from shared.evaluation(steps, "eval/em", bool(held_out), "data.eval=held_out.jsonl")
    yield from shared.engine(gpu)


def _sorted(paths: list[str]) -> tuple[list[str], str]:
    """(files of questions, the knowledge base)."""
    sources: list[str] = []
    files: list[str] = []
    for path in paths:
        lines = Path(path).suffix.lower() in (".jsonl", ".ndjson") and not Path(path).is_dir()
        kind = kind_of_file(path, ["question", "passage"]) if lines else "passage"
        (files if kind == "question" else sources).append(path)
    if not files:
        raise DataError(
            f"{', '.join(sources)}: no questions; name a JSONL file of them too, with question and "
            "answers"
        )
    if len(sources) != 1:
        found = "none" if not sources else " and ".join(sources)
        raise DataError(
            f"knowledge base: got {found}, expected one: JSONL of passages (id, text or "
            "chunk_path), a folder of images, or a data set"
        )
    return files, sources[0]


def _knowledge(source: str, passages: PassageStore) -> Iterator[Choice]:
    characters = int(passages.lengths.max())
    what = "images among them" if passages.has_images else "texts alone"
    yield Choice(
        "knowledge_base.source",
        source,
        f"{count(len(passages), 'passage')}, {what}; the longest text has {characters:,} "
        "characters.",
    )


def _encoder(
    passages: list[Passage], num_passages: int, questions: Sample[Question], given: dict[str, Any]
) -> Iterator[Choice]:
    from pixelrag.models.load import outline_embedder, read_preprocessor

    asked = given.get("question_encoder", {}).get("name_or_path")
    default = "sentence-transformers/all-MiniLM-L6-v2"
    if shared.is_installed(shared.MINILM):
        default = f"package:{shared.MINILM}/model"
    images = [(passage.image, passage.id) for passage in passages if passage.image is not None]
    if images:
        default = "Qwen/Qwen3-VL-Embedding-2B"
    model = ModelConfig(name_or_path=asked or default)
    tokenizer, side = None, 32
    try:
        preprocessor = read_preprocessor(model, outline_embedder(model))
        tokenizer, side = preprocessor.tokenizer, preprocessor.visual_side or 32
        reads = preprocessor.has_vision
    except ModelError:
        if asked:
            raise
        reads = bool(images)
    if images and not reads:
        raise DataError(
            f"the knowledge base holds images, but {asked} reads text only; name a vision model "
            "such as Qwen/Qwen3-VL-Embedding-2B in --question_encoder.name_or_path"
        )
    yield Choice("question_encoder.name_or_path", model.name_or_path, "Reads both sides.")
    spare = 64 if reads else 0
    asks = token_lengths([question.text for question in questions.items], tokenizer)
    yield Choice(
        "question_encoder.query_max_length",
        asks.at_most(512) + spare,
        asks.why("questions", questions.seen),
    )
    texts = [f"{p.title}\n{p.text}" if p.title else p.text for p in passages if p.text is not None]
    longest, whys = 0, []
    if texts:
        lengths = token_lengths(texts, tokenizer)
        longest = lengths.at_most(8192)
        whys.append(lengths.why("passages", num_passages) + " What is longer is cut.")
        if longest > _LONG and not images:
            yield Choice("knowledge_base.split", "words", "Long passages are cut to pieces.")
            yield Choice("knowledge_base.length", 100, "As in DPR.")
            longest = _LONG
    if images:
        visual = visual_lengths(images, side)
        most = visual.at_most(_MOST_VISUAL)
        yield Choice("question_encoder.max_visual_tokens", most, visual.why("images", num_passages))
        longest = max(longest, most)
    yield Choice("question_encoder.document_max_length", longest + spare, " ".join(whys) or "Room.")


def _read(passages: PassageStore) -> list[Passage]:
    step = max(1, -(-len(passages) // SAMPLE))
    return [passages[row] for row in range(0, len(passages), step)]


def _questions(
    train: list[str], held_out: list[str], questions: QuestionDataset
) -> Iterator[Choice]:
    gold = sum(bool(question.passage_ids) for question in questions)
    yield Choice(
        "data.train",
        shared.one_or_list(train),
        f"{count(len(questions), 'question')}, {gold:,} of which name their passages.",
    )
    if held_out:
        yield Choice("data.eval", shared.one_or_list(held_out), "Held out, by name.")
    if gold:
        yield Choice(
            "loss.contrastive_weight",
            0.1,
            "Teach the encoder the passages that questions name, beside what answers tell of them.",
            off=True,
        )
