"""From named sources to tokenized samples, with every bad row named."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pixelrag.data.chat import Chat, Completion, PlainText, parse_text_row
from pixelrag.data.lines import BadRow, file_labels, listing
from pixelrag.data.schema import RowError
from pixelrag.data.text_encoder import TextEncoder, Tokens
from pixelrag.data.text_sources import (
    STREAM_SHUFFLE_SEED,
    TextSource,
    parse_source,
    read_rows,
)
from pixelrag.data.token_store import TokenStore, TokenStoreBuilder
from pixelrag.errors import DataError

logger = logging.getLogger("pixelrag")

_BATCH = 256


@dataclass(frozen=True, slots=True)
class TextReport:
    """What `read_texts` found.

    Attributes:
        num_rows: rows read, good and bad.
        num_samples: samples kept.
        num_tokens: their tokens.
        num_supervised: tokens that are learnt from.
        bad: every fault, in the order in which rows were read.
    """

    num_rows: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    bad: list[BadRow]

    @property
    def num_bad_rows(self) -> int:
        """Rows with at least one fault."""
        return len({(fault.file, fault.line) for fault in self.bad})


def load_texts(
    sources: str | Sequence[str],
    encoder: TextEncoder,
    *,
    bad_rows: Literal["error", "skip"] = "error",
    **options: Any,
) -> tuple[TokenStore, TextReport]:
    """Read, check and tokenize every row of every source; refuse what cannot be trained on.

    Args:
        sources, encoder, options: as for `read_texts`.
        bad_rows: "error" refuses bad rows, in one message; "skip" leaves them out and says so.

    Raises:
        DataError: as for `read_texts`; or rows are bad and `bad_rows` is "error"; or no row is
            usable.
        ModelError: as for `read_texts`.
    """
    store, report = read_texts(sources, encoder, **options)
    _refuse_or_skip(report, [sources] if isinstance(sources, str) else sources, bad_rows)
    return store, report


def read_texts(
    sources: str | Sequence[str],
    encoder: TextEncoder,
    *,
    split: str = "train",
    max_samples: int | None = None,
    streaming: bool = False,
    shuffle_seed: int = STREAM_SHUFFLE_SEED,
    shuffle_buffer: int = 10_000,
    progress: Callable[[int], None] | None = None,
) -> tuple[TokenStore, TextReport]:
    """Read, check and tokenize every row of every source; the report names every bad one.

    Args:
        sources: files and data sets, see `pixelrag.data.text_sources`.
        encoder: makes tokens of rows.
        split: of data sets that do not name their own.
        max_samples: keep at most so many good rows, drawn by `shuffle_seed`, of several sources in
            turns; None keeps all, in their order.
        streaming: read data sets as streams, shuffled.
        shuffle_seed, shuffle_buffer: of the draw, and rows that a stream is shuffled within.
        progress: told the number of rows read.

    Raises:
        DataError: a source cannot be read or is named twice.
        ModelError: the tokenizer has no usable chat template.
    """
    names = [sources] if isinstance(sources, str) else list(sources)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"Data named twice: {', '.join(repeated)}")
    parsed = [parse_source(name, split) for name in names]
    labels = _labels(parsed)
    drawn = streaming or max_samples is not None
    streams = [
        read_rows(
            source,
            streaming=streaming,
            shuffle=drawn,
            seed=shuffle_seed,
            buffer_size=shuffle_buffer,
        )
        for source in parsed
    ]
    rows = _in_turns(streams) if max_samples is not None else _one_by_one(streams)
    builder = TokenStoreBuilder()
    bad: list[BadRow] = []
    num_rows = num_supervised = 0
    while max_samples is None or len(builder) < max_samples:
        # Read no further than needed: a stream's rows cost traffic.
        wanted = _BATCH if max_samples is None else min(_BATCH, max_samples - len(builder))
        batch = list(itertools.islice(rows, wanted))
        if not batch:
            break
        num_rows += len(batch)
        for source, number, tokens in _encoded(batch, encoder):
            if isinstance(tokens, RowError):
                name = names[source] if parsed[source].kind != "hub" else labels[source]
                bad += [BadRow(name, number, reason) for reason in tokens.reasons]
                continue
            builder.add(tokens, source, number)
            num_supervised += int(tokens.supervised[1:].sum())
        if progress is not None:
            progress(num_rows)
    store = builder.build(labels)
    report = TextReport(num_rows, len(store), len(store.ids), num_supervised, bad)
    if max_samples is not None and len(store) < max_samples:
        logger.warning(
            "data.max_samples is %d, but the data has %d usable rows", max_samples, len(store)
        )
    return store, report


def _encoded(
    batch: list[tuple[int, int, object]], encoder: TextEncoder
) -> Iterator[tuple[int, int, Tokens | RowError]]:
    """(source, number, tokens or RowError) of each row, in order."""
    parsed: list[Chat | Completion | PlainText | RowError] = []
    for _, number, value in batch:
        try:
            if isinstance(value, RowError):
                raise value
            parsed.append(parse_text_row(value, str(number)))
        except RowError as error:
            parsed.append(error)
    encoded = iter(encoder.encode([row for row in parsed if not isinstance(row, RowError)]))
    for (source, number, _), row in zip(batch, parsed, strict=True):
        tokens = row if isinstance(row, RowError) else next(encoded)
        if not isinstance(tokens, RowError) and not tokens.supervised[1:].any():
            tokens = RowError("", ["nothing would be learnt from it"])
        yield source, number, tokens


def _refuse_or_skip(report: TextReport, names: Sequence[str], bad_rows: str) -> None:
    if not report.num_rows:
        raise DataError(f"{', '.join(names) or 'data.train'}: no rows")
    if not report.bad:
        return
    summary = f"{report.num_bad_rows:,} of {report.num_rows:,} rows cannot be used"
    summary += listing(report.bad)
    if not report.num_samples:
        raise DataError(f"No row is left: {summary}")
    if bad_rows == "error":
        raise DataError(f"{summary}\n`data.bad_rows: skip` trains without them.")
    logger.warning("Skipping bad rows: %s", summary)


def _labels(sources: list[TextSource]) -> list[str]:
    """Names for sample ids: short, and no two the same."""
    paths = [source.name for source in sources if source.kind != "hub"]
    short = dict(zip(paths, file_labels(paths), strict=True))
    return [short.get(source.name, source.label) for source in sources]


def _one_by_one(
    streams: Sequence[Iterator[tuple[int, object]]],
) -> Iterator[tuple[int, int, object]]:
    for source, stream in enumerate(streams):
        yield from ((source, number, row) for number, row in stream)


def _in_turns(
    streams: Sequence[Iterator[tuple[int, object]]],
) -> Iterator[tuple[int, int, object]]:
    left = list(enumerate(streams))
    while left:
        alive = []
        for source, stream in left:
            if (item := next(stream, None)) is not None:
                yield source, *item
                alive.append((source, stream))
        left = alive
