"""A starter for distillation: chats, prompts with completions, or plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelrag.config.distill_parts import StudentConfig
from pixelrag.data.chat import Chat, Completion, PlainText, TextRow, parse_text_row
from pixelrag.data.lengths import CHARACTERS_A_TOKEN, Lengths, Sample, quantile
from pixelrag.data.schema import RowError
from pixelrag.data.text_sources import TextSource, parse_source, read_rows
from pixelrag.errors import ConfigError, DataError, ModelError
from pixelrag.init import shared
from pixelrag.init.look import count, kind_of_file, power_of_two, rows_of
from pixelrag.init.starter import Choice

_FORMS = {Chat: "chat", Completion: "prompt with completion", PlainText: "plain text"}


_Placed = tuple[TextRow, str]  # a row, and where it stands


class Texts:
    """What the rows to train on look like."""

    def __init__(self) -> None:
        self.rows: Sample[_Placed] = Sample()
        self.forms: Counter[str] = Counter()
        self.most_answers = 0

    def add(self, placed: _Placed) -> None:
        """Take a row into account."""
        self.rows.add(placed)
        row, _ = placed
        self.forms[_FORMS[type(row)]] += 1
        if isinstance(row, Chat):
            self.most_answers = max(self.most_answers, len(row.answers))

    def said(self) -> str:
        """In words."""
        forms = [f"{number:,} of the form {form}" for form, number in self.forms.most_common()]
        return f"{count(self.rows.seen, 'row')}: {', '.join(forms)}"


def choices(paths: list[str], given: dict[str, Any]) -> Iterator[Choice]:
    """Look at the files, and choose.

    Raises:
        DataError: a file holds something else; names file and line.
        ConfigError: a student is named and no teacher.
    """
    train, held_out = shared.by_use(paths)
    texts = Texts()
    skip = shared.bad_rows(given) == "skip"
    for path in train:
        for row in _rows(path, skip):
            texts.add(row)
    for path in held_out:
        for _ in _rows(path, skip):
            pass
    gpu = shared.has_gpu()
    small = not gpu and shared.is_installed(shared.SMOLLM2)
    student = {"name_or_path": f"package:{shared.SMOLLM2}", "gguf_file": shared.SMOLLM2_FILE}
    student = student if small else {"name_or_path": "Qwen/Qwen3-1.7B"}
    asked = given.get("student", {})
    if "name_or_path" in asked:
        student = {key: asked[key] for key in ("name_or_path", "gguf_file") if key in asked}
    yield shared.output_dir("distill", train[0])
    yield from _models(student, given, small)
    lengths, most = _lengths(texts, student, required="student" in given, skip=skip)
    length = _row_length(lengths, most)
    yield Choice(
        "packing.length",
        length,
        lengths.why("samples", texts.rows.seen) + " Several share a row; what is longer is cut.",
    )
    if quantile(lengths.values, 1) > length:
        yield Choice("packing.overlong", "split", "Keep the rest of long samples.", off=True)
    yield from _data(train, held_out, texts)
    total = sum(lengths.values) / len(lengths.values) * texts.rows.seen
    yield from _length_of_run(total, length, held_out, texts.rows.seen)
    yield Choice(
        "loss.chunk_size", 2048 if gpu else 256, "Tokens whose logits exist at once: memory alone."
    )
    yield Choice("loss.temperature", 2.0, "Softens both distributions, as is usual.")
    yield Choice("loss.ce_weight", 0.3, "Of the data's own tokens; the teacher has the rest.")
    yield Choice("optim.learning_rate", 2e-5 if gpu else 2e-4, "Of AdamW, at its peak.")
    yield from shared.engine(gpu)


def _rows(path: str, skip: bool) -> Iterator[_Placed]:
    source = parse_source(path)
    if source.kind == "hub":
        raise DataError(f"{path} does not exist (looked for in {Path.cwd()}); init looks at files")
    if source.kind == "lines":
        kind_of_file(path, ["chat"])
        return rows_of(path, "chat", _placed, skip=skip)
    return _records(path, source, skip)


def _placed(value: object, file: Path, line: int) -> _Placed:
    where = f"{file}:{line}"
    return parse_text_row(value, where), where


def _records(path: str, source: TextSource, skip: bool) -> Iterator[_Placed]:
    number = -1
    for number, row in read_rows(source):
        try:
            yield _placed(row, Path(path), number)
        except RowError:
            if not skip:
                raise
    if number < 0:
        raise DataError(f"{path} has no rows")


def _models(student: dict[str, Any], given: dict[str, Any], small: bool) -> Iterator[Choice]:
    named = "name_or_path" in given.get("student", {})
    where = "It comes with an installed package: nothing is downloaded."
    for key, value in student.items():
        why = "The model to train." if key == "name_or_path" else "Its file."
        yield Choice(f"student.{key}", value, f"{why} {where}" if small and not named else why)
    if small and not named:
        yield Choice("student.num_layers", 15, "Half of the layers: a student of its teacher.")
    teacher = given.get("teacher", {})
    if teacher.get("source", "live") != "live" or "name_or_path" in teacher:
        return
    if named:
        raise ConfigError(
            f"--student.name_or_path {student['name_or_path']} without its teacher: name a larger "
            "model with the same tokenizer in --teacher.name_or_path"
        )
    yield Choice(
        "teacher.name_or_path",
        f"package:{shared.SMOLLM2}" if small else "Qwen/Qwen3-8B",
        "A larger model with the student's tokenizer.",
    )
    if small:
        yield Choice("teacher.gguf_file", shared.SMOLLM2_FILE, "Its file.")


def _lengths(
    texts: Texts, student: dict[str, Any], *, required: bool, skip: bool
) -> tuple[Lengths, int | None]:
    """Tokens of the sample with the chat template, and the most that the student can read."""
    from pixelrag.data.text_encoder import TextEncoder
    from pixelrag.models.causal_load import load_config, load_tokenizer, student_source

    try:
        source = student_source(StudentConfig(**student))
        tokenizer = load_tokenizer(source)
        most = load_config(source).get_text_config().max_position_embeddings
    except ModelError:
        if required:
            raise
        guesses = [len(str(row)) // CHARACTERS_A_TOKEN for row, _ in texts.rows.items]
        return Lengths(guesses, guessed=True), None
    whole = []
    rows, places = zip(*texts.rows.items, strict=True)
    for tokens, where in zip(TextEncoder(tokenizer).encode(rows), places, strict=True):
        if isinstance(tokens, RowError):
            if not skip:
                raise DataError(
                    f"{where}: {'; '.join(tokens.reasons)}\n--data.bad_rows skip leaves such rows "
                    "out"
                )
        else:
            whole.append(len(tokens.ids))
    if not whole:
        raise DataError("no row can be tokenized; `pixelrag distill` says of each why not")
    return Lengths(whole, guessed=False), most


def _row_length(lengths: Lengths, most: int | None) -> int:
    """A power of two that 99 % of the samples fit into, and several of the usual ones."""
    mean = sum(lengths.values) / len(lengths.values)
    wanted = max(64, quantile(lengths.values, 0.99), 4 * mean)
    return min(4096, most or 4096, 2 * power_of_two(wanted - 1))


def _data(train: list[str], held_out: list[str], texts: Texts) -> Iterator[Choice]:
    yield Choice("data.train", shared.one_or_list(train), f"{texts.said()}.")
    if held_out:
        yield Choice("data.eval", shared.one_or_list(held_out), "Held out, by name.")
    elif texts.rows.seen >= 20:
        yield Choice(
            "data.eval_samples",
            min(512, texts.rows.seen // 20),
            "Nothing is held out by name: so many rows (5 %, at most 512) are.",
        )
    if texts.most_answers > 1:
        yield Choice(
            "data.supervise",
            "last_assistant",
            f"Chats have up to {texts.most_answers} answers, and all of them are learnt from.",
            off=True,
        )


def _length_of_run(
    num_tokens: float, length: int, held_out: list[str], num_samples: int
) -> Iterator[Choice]:
    rows = max(1, round(num_tokens / length))
    a_step = min(8, max(1, power_of_two(rows / 20)))
    at_once = min(4, a_step)
    yield Choice(
        "batch.per_device_batch_size", at_once, "Rows at once through both models: the memory."
    )
    yield Choice(
        "batch.gradient_accumulation_steps",
        a_step // at_once,
        f"{a_step} rows of {length:,} tokens make a step of one process.",
    )
    steps, choice = shared.length_of_run(rows, a_step, "packed rows (about)")
    yield from choice
    held = bool(held_out) or num_samples >= 20
    yield from shared.evaluation(steps, "eval/loss", held, "data.eval=held_out.jsonl")
