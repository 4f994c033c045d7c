"""The rows of an epoch: a pure function of the data's fingerprint, the settings, seed and epoch.

Which lengths share a row is decided once, by first-fit decreasing; that is the same in every
epoch, as the lengths are. Which of the samples of a length goes where is drawn anew each epoch:
the ties of first-fit decreasing are broken by an order drawn from (fingerprint, seed, epoch). So
every epoch has the same number of rows, and any row of any epoch can be named without having
walked there.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.packing import pack, stable_argsort
from pixelrag.data.pieces import Overlong, cut
from pixelrag.data.token_store import TokenStore
from pixelrag.errors import ConfigError, DataError

Attention = Literal["isolated", "concatenated"]


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How rows are made.

    Attributes:
        row_length: tokens of a row, at least 2.
        packed: several samples to a row; False is one, and padding.
        attention: "isolated" lets a sample see itself alone, "concatenated" all that precedes it.
        overlong: what becomes of samples longer than a row.
        separator_id: token put between the samples of a row, never learnt from; None = none.
        mask_first_token: do not learn a sample's first token from the sample before it. With
            isolated attention it never is.
        attention_cost: cost of a pair of tokens that attend to one another, in that of a token.
            For a transformer of `P` parameters outside the embeddings, `layers` and attention
            width `d` (heads times head size), causal attention costs d * layers / P.
    """

    row_length: int
    packed: bool = True
    attention: Attention = "isolated"
    overlong: Overlong = "truncate"
    separator_id: int | None = None
    mask_first_token: bool = False
    attention_cost: float = 2e-5

    def __post_init__(self) -> None:
        if self.row_length < 2:
            raise ConfigError(f"packing.length: got {self.row_length}, expected at least 2")
        if self.attention == "concatenated" and not self.packed:
            raise ConfigError("packing.attention: concatenated needs packing.enabled true")

    @property
    def separator(self) -> int:
        """Tokens between two samples."""
        return 0 if self.separator_id is None or not self.packed else 1

    @property
    def learns_openings(self) -> bool:
        """Whether a sample's first token is learnt from the sample before it."""
        return self.attention == "concatenated" and not self.mask_first_token


@dataclass(frozen=True, slots=True)
class EpochRows:
    """The rows of one epoch.

    Attributes:
        pieces: pieces of the plan, row after row; [P] int64.
        offsets: row `r` holds `pieces[offsets[r] : offsets[r + 1]]`; [R + 1] int64.
        tokens: tokens of each row, separators included, padding not; [R] int64.
        supervised: tokens of each row that are learnt from; [R] int64.
        costs: tokens and attention of each row, in tokens; [R] float64.
    """

    pieces: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    costs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, row: int) -> NDArray[np.int64]:
        """The pieces of a row, in order."""
        return self.pieces[self.offsets[row] : self.offsets[row + 1]]


class PackPlan:
    """Rows of tokenized samples, epoch by epoch.

    Args:
        store: the samples.
        settings: how rows are made.
        seed: of the draws.
        samples: which samples (None = all).

    Attributes:
        pieces: what goes into rows.
        report: what cutting did.

    Raises:
        DataError: nothing is left to learn from.
    """

    def __init__(
        self,
        store: TokenStore,
        settings: RowSettings,
        *,
        seed: int = 0,
        samples: NDArray[np.int64] | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.seed = seed
        self.pieces, self.report = cut(store, settings.row_length, settings.overlong, samples)
        if not len(self.pieces):
            raise DataError(f"No row can be made: {self.report}")
        digest = hashlib.sha256(store.fingerprint.encode())
        if samples is not None:
            digest.update(np.ascontiguousarray(samples, "<i8").data)
        self.fingerprint: str = digest.hexdigest()
        """Of the samples, and of which of them are used."""
        self._longest = int(self.pieces.lengths.max())
        # A separator goes between samples, so as if each brought one and a row had room for one
        # more: that is exact.
        descending = -np.sort(-self.pieces.lengths)
        if settings.packed:
            shape = pack(descending + settings.separator, settings.row_length + settings.separator)
            self._slots, self._offsets = shape.items, shape.offsets
        else:
            self._slots = np.arange(len(descending), dtype=np.int64)
            self._offsets = np.arange(len(descending) + 1, dtype=np.int64)
        self._epoch: tuple[int, EpochRows] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self._offsets) - 1

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold tokens of samples."""
        return self.report.num_tokens / (self.num_rows * self.settings.row_length)

    def identity(self) -> dict[str, object]:
        """What the rows depend on, for a checkpoint to compare."""
        settings = asdict(self.settings)
        # It decides who computes a row, not what is in it.
        del settings["attention_cost"]
        return {"data": self.fingerprint, "seed": self.seed, **settings}

    def epoch(self, epoch: int) -> EpochRows:
        """The rows of an epoch; the last one asked for is kept.

        Args:
            epoch: its number, from 0.
        """
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._rows(epoch)
        return self._epoch[1]

    def _rows(self, epoch: int) -> EpochRows:
        pieces, settings = self.pieces, self.settings
        drawn = self._draw(epoch)
        # Longest first, equal ones in the drawn order: the sequence the slots were numbered by.
        by_length = drawn[stable_argsort(self._longest - pieces.lengths[drawn])]
        ordered = by_length[self._slots]
        firsts = self._offsets[:-1]
        lengths = pieces.lengths[ordered].copy()
        # A separator stands behind every sample but a row's last one, and belongs to it.
        lengths += settings.separator
        lengths[self._offsets[1:] - 1] -= settings.separator
        tokens = np.add.reduceat(lengths, firsts)
        supervised = np.add.reduceat(pieces.supervised[ordered], firsts)
        if settings.learns_openings:
            opens = pieces.opens[ordered].copy()
            opens[firsts] = 0
            supervised += np.add.reduceat(opens, firsts)
        if settings.attention == "isolated":
            pairs = np.add.reduceat(lengths.astype(np.float64) ** 2, firsts)
        else:
            pairs = tokens.astype(np.float64) ** 2
        costs = tokens + settings.attention_cost * pairs
        return EpochRows(ordered, self._offsets, tokens, supervised, costs)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        words = np.frombuffer(bytes.fromhex(self.fingerprint), "<u4").tolist()
        draws = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, *words]))
        # Raw draws: NumPy promises these in every release, but not `Generator.permutation`.
        return np.argsort(draws.random_raw(len(self.pieces)), kind="stable")
