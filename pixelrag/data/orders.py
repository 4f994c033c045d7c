"""Orders in which the rows of one or several sets make global batches; pure functions of a number.

A batch of any number can be named without walking there, so that a run resumes wherever it stopped
and sees the same batches on any number of processes. Only the seed and the sizes of the sets go in.

No order puts a row into a batch twice: its document would be a negative of its own query.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pixelrag.errors import ConfigError, DataError

RowOrder = Literal["shuffled", "file", "reversed"]


class BatchOrder(Protocol):
    """Names the rows of every global batch.

    Attributes:
        batches_per_epoch: global batches of one pass over the data.
    """

    batches_per_epoch: int

    def batch(self, position: int) -> NDArray[np.int64]:
        """Rows of global batch `position`, counted from 0 over all epochs; [R] int64."""

    def identity(self) -> dict[str, object]:
        """What tells it from other orders of the same rows, as JSON."""

    def place(self, position: int) -> dict[str, object]:
        """What a reader of a checkpoint may want to know of a position, as JSON."""


def row_order(num_rows: int, order: RowOrder, *entropy: int) -> NDArray[np.int64]:
    """A permutation of `num_rows` rows that depends on `entropy` alone, [num_rows] int64."""
    if order != "shuffled":
        return np.arange(num_rows)[:: -1 if order == "reversed" else 1]
    # Sorting raw draws, since NumPy promises the same raw stream in every release, but not
    # the same `Generator.permutation`: a resumed run must not depend on the release.
    draws = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


class _Kept:
    """`row_order`, with the last result of each set kept."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order
        self._last: dict[int, tuple[tuple[int, ...], NDArray[np.int64]]] = {}

    def __call__(self, part: int, num_rows: int, *entropy: int) -> NDArray[np.int64]:
        if part not in self._last or self._last[part][0] != entropy:
            self._last[part] = entropy, row_order(num_rows, self.order, *entropy)
        return self._last[part][1]


class _Order:
    """What the orders below have in common."""

    _identity: dict[str, object]

    def identity(self) -> dict[str, object]:
        return self._identity

    def place(self, position: int) -> dict[str, object]:
        return {}


class PooledOrder(_Order):
    """All rows in one permutation an epoch, cut into batches; the last one may be smaller.

    Args:
        num_rows: rows.
        batch_size: rows of a batch.
        seed: of the permutations.
        drop_last: leave out the last batch where it is smaller.
        order: of the rows.
        key: tells this order's permutations from those of others with the same seed.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        *,
        drop_last: bool = False,
        order: RowOrder = "shuffled",
        key: tuple[int, ...] = (),
    ) -> None:
        whole, rest = divmod(num_rows, batch_size)
        self.batches_per_epoch = whole if drop_last else whole + (rest > 0)
        self.num_rows = num_rows
        self._batch_size = batch_size
        self._entropy = seed, key
        self._rows = _Kept(order)
        self._identity = {} if order == "shuffled" else {"order": order}

    def epoch_rows(self, epoch: int) -> NDArray[np.int64]:
        """All rows in the order of an epoch, [num_rows] int64."""
        seed, key = self._entropy
        return self._rows(0, self.num_rows, seed, epoch, *key)

    def batch(self, position: int) -> NDArray[np.int64]:
        epoch, number = divmod(position, self.batches_per_epoch)
        start = number * self._batch_size
        return self.epoch_rows(epoch)[start : start + self._batch_size]


class ProportionalOrder(_Order):
    """Every batch holds rows of all sets, in proportion to their weights.

    The counts of an epoch are whole numbers that add up to its rows (largest remainder), spread
    evenly: no batch has one row more or less of a set than its share rounded down or up; none at
    all where shares are whole numbers. Without weights every row is served once an epoch. With
    them a set walks around its rows, in a new permutation once it has been through.

    Args:
        sizes: rows of each set; their rows are numbered one set after the other.
        weights: share of each set, in any unit; None = its rows.
        batch_size, seed, drop_last, order: as for `PooledOrder`.
        names: of the sets, for messages.

    Raises:
        DataError: a set would have no row in an epoch, or one more than once in a batch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        batch_size: int,
        seed: int,
        *,
        drop_last: bool = False,
        order: RowOrder = "shuffled",
        names: Sequence[str] = (),
    ) -> None:
        total = sum(sizes)
        if drop_last:
            total -= total % batch_size
        self._sizes, self._seed = list(sizes), seed
        self._identity = _identity("proportional", sizes, weights, order)
        self._counts = _counts(total, sizes, weights, names)
        self._pattern = evenly(self._counts)
        self._batch_size = batch_size
        self.batches_per_epoch = -(-total // batch_size)
        self._rows = _Kept(order)
        # How many rows of each set stand before each batch of an epoch.
        ends = np.minimum(np.arange(self.batches_per_epoch + 1) * batch_size, total)
        before = [np.cumsum(self._pattern == part) for part in range(len(sizes))]
        self._before = np.stack([np.concatenate([[0], sums])[ends] for sums in before], axis=1)
        for part, most in enumerate(np.diff(self._before, axis=0).max(axis=0).tolist()):
            if most > sizes[part]:
                raise DataError(
                    f"{_name(names, part)} has {sizes[part]} usable rows, and data.weights asks "
                    f"for {most} of them in a batch of {batch_size}; lower its weight or "
                    "batch.per_device_batch_size"
                )

    def batch(self, position: int) -> NDArray[np.int64]:
        epoch, number = divmod(position, self.batches_per_epoch)
        start = number * self._batch_size
        parts = self._pattern[start : start + self._batch_size]
        rows = np.empty(len(parts), dtype=np.int64)
        offset = 0
        for part, size in enumerate(self._sizes):
            places = parts == part
            # One permutation serves as many epochs as the set lasts, so that a batch never stands
            # across two of them.
            lasting = max(1, -(-size // self._counts[part]))
            group, since = divmod(epoch, lasting)
            first = since * self._counts[part] + self._before[number, part]
            walk = np.arange(first, first + places.sum()) % size
            rows[places] = offset + self._rows(part, size, self._seed, group, part + 1)[walk]
            offset += size
        return rows


class HomogeneousOrder(_Order):
    """Every batch is of one set, so that all its negatives are of one kind.

    A set is served in passes, each a new permutation cut into batches of which the last may be
    smaller. Without weights an epoch is a pass over every set. With them it has as many batches,
    shared out by weight (largest remainder); the sets' batches alternate evenly.

    Args:
        sizes, weights, batch_size, seed, drop_last, order, names: as for `ProportionalOrder`;
            `drop_last` leaves out the smaller batches.

    Raises:
        DataError: a set would have no batch in an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        batch_size: int,
        seed: int,
        *,
        drop_last: bool = False,
        order: RowOrder = "shuffled",
        names: Sequence[str] = (),
    ) -> None:
        self._sets = [
            PooledOrder(size, batch_size, seed, drop_last=drop_last, order=order, key=(part + 1,))
            for part, size in enumerate(sizes)
        ]
        passes = [pooled.batches_per_epoch for pooled in self._sets]
        if 0 in passes:
            part = passes.index(0)
            raise DataError(
                f"{_name(names, part)} has {sizes[part]} usable rows, expected at least "
                f"{batch_size}, one global batch; lower batch.per_device_batch_size, or set "
                "data.drop_last: false"
            )
        self._identity = _identity("homogeneous", sizes, weights, order)
        self._counts = _counts(sum(passes), passes, weights, names)
        self._pattern = evenly(self._counts)
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.batches_per_epoch = len(self._pattern)

    def batch(self, position: int) -> NDArray[np.int64]:
        epoch, number = divmod(position, self.batches_per_epoch)
        part = int(self._pattern[number])
        earlier = int((self._pattern[:number] == part).sum())
        rows = self._sets[part].batch(epoch * self._counts[part] + earlier)
        return self._offsets[part] + rows


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights (largest remainder).

    Of equal remainders the first gets the unit. Computed in fractions, so exact.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda part: counts[part] - quotas[part])
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def evenly(counts: Sequence[int]) -> NDArray[np.int16]:
    """Part numbers, each as often as its count says, spread as evenly as can be; [sum] int16."""
    keys = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    parts = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    return parts[np.argsort(keys, kind="stable")]


def _counts(
    total: int, units: Sequence[int], weights: Sequence[float] | None, names: Sequence[str]
) -> list[int]:
    if weights is not None and len(weights) != len(units):
        raise ConfigError(f"data.weights: got {len(weights)} weights for {len(units)} sets")
    counts = apportion(total, units if weights is None else weights)
    if 0 in counts:
        raise DataError(
            f"{_name(names, counts.index(0))} has so small a share that an epoch of {total} would "
            "hold none of it; raise its weight in data.weights, or leave it out"
        )
    return counts


def _identity(
    mixing: str, sizes: Sequence[int], weights: Sequence[float] | None, order: str
) -> dict[str, object]:
    weights = None if weights is None else [float(weight) for weight in weights]
    return {"mixing": mixing, "sizes": list(sizes), "weights": weights, "order": order}


def _name(names: Sequence[str], part: int) -> str:
    return names[part] if part < len(names) else f"set {part + 1}"
