"""The self-test of step 0: documents that share a row must not see each other.

Whether they do depends on the attention backend, the library's version and how the model is
called, and a leak raises nothing by itself. So every run tries its own models on its own backend,
with documents of a few random tokens, in two ways:

Perturbation   Other tokens in one document leave the logits of all others as they were. Shapes and
               kernels are the same in both passes, so what is isolated is equal to the last bits,
               in any precision.
Comparison     The packed rows' logits are those of each document alone: also positions are right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import torch

from pixelrag.errors import ModelError
from pixelrag.models.rows import Rows

logger = logging.getLogger("pixelrag")

LENGTHS = ((13, 1, 9, 17), (5, 21, 2, 12))
"""Documents of the two rows; one token and up, none where another row has one."""

# Relative L2 error between a document packed and alone: rounding of a few dozen layers. A leak, or
# a position that is off, changes a good part of the logits.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
# Other tokens elsewhere in the batch: nothing changes but, with some kernels, the order of sums.
_PERTURBED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}

Forward = Callable[[Rows], torch.Tensor]


def check_isolation(
    forward: Forward,
    *,
    name: str,
    vocab_size: int,
    precision: torch.dtype,
    device: torch.device,
    setting: str,
) -> float:
    """Run a model on packed and separate documents and compare.

    Where parameters are sharded every rank must call this: all of them run the same forwards.

    Args:
        forward: logits (or any function of the final states) [B, T, ...] of rows, as the run
            computes them, in eval mode and without gradients.
        name: `student` or `teacher`, for messages.
        vocab_size: real tokens, to draw from.
        precision: in which the model computes; picks the tolerance.
        device: where rows go.
        setting: the option to change if it fails (`student.attention`).

    Returns:
        The largest relative difference between a document packed and alone.

    Raises:
        ModelError: documents see each other, or differ from the same documents alone.
    """
    ids_BT = _tokens(vocab_size)
    packed = forward(_rows(ids_BT).to(device))
    _check_perturbed(forward, ids_BT, packed, name, precision, device, setting)
    worst, where = 0.0, ""
    for row, lengths in enumerate(LENGTHS):
        for number, (start, stop) in enumerate(_bounds(lengths)):
            alone = forward(Rows.single(ids_BT[row : row + 1, start:stop]).to(device))[0]
            difference = _relative(packed[row, start:stop], alone)
            if not difference <= worst:  # also true of NaN
                worst, where = difference, f"document {number} of row {row} ({stop - start} tokens)"
    tolerance = TOLERANCES[precision]
    if not worst <= tolerance:
        raise ModelError(
            f"self-test of the {name}: {where} has other logits packed than alone, relative "
            f"difference {worst:.3g}, tolerance {tolerance:g} in {_short(precision)}. Its "
            f"positions or its attention are not those of separate rows. Set {setting} to sdpa or "
            "eager, or packing.enabled to false"
        )
    logger.info(
        "self-test: packed documents of the %s are isolated (relative difference %.2g, tolerance "
        "%g in %s)",
        *(name, worst, tolerance, _short(precision)),
    )
    return worst


def _check_perturbed(
    forward: Forward,
    ids_BT: torch.Tensor,
    packed: torch.Tensor,
    name: str,
    precision: torch.dtype,
    device: torch.device,
    setting: str,
) -> None:
    """Change the first document of each row; the others' logits must stay."""
    changed_BT = ids_BT.clone()
    others_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        changed_BT[row, : lengths[0]] = ids_BT[row, : lengths[0]].flip(0).roll(1)
        others_BT[row, : lengths[0]] = False
    again = forward(_rows(changed_BT).to(device))
    others_BT = others_BT.to(packed.device)
    difference = _relative(again[others_BT], packed[others_BT])
    if not difference <= _PERTURBED[precision]:
        largest = (again[others_BT] - packed[others_BT]).abs().max().item()
        raise ModelError(
            f"self-test of the {name}: documents that share a row see each other. Other tokens in "
            f"the first one changed the logits of the rest by up to {largest:.3g} (relative "
            f"{difference:.3g}, tolerance {_PERTURBED[precision]:g}); training would leak. Set "
            f"{setting} to varlen, sdpa or eager, or packing.enabled to false"
        )


def check_head(
    split: torch.Tensor, whole: torch.Tensor, *, name: str, precision: torch.dtype
) -> float:
    """Compare logits that the lent head makes with those of the model itself.

    Args:
        split: logits of a few tokens from final states and head.
        whole: of the same tokens by the model's own forward.
        name: `student` or `teacher`.
        precision: in which the model computes; picks the tolerance.

    Returns:
        The relative difference.

    Raises:
        ModelError: they differ: the model does something to its logits that is not known here.
    """
    difference, tolerance = _relative(split, whole), TOLERANCES[precision]
    if not difference <= tolerance:
        raise ModelError(
            f"self-test of the {name}: final states and head alone do not make the model's logits "
            f"(relative difference {difference:.3g}, tolerance {tolerance:g} in "
            f"{_short(precision)}); the model changes its logits in a way that pixelrag does not "
            "know. Set loss.implementation to logits"
        )
    return difference


def sample_rows(vocab_size: int) -> Rows:
    """The self-test's packed rows, on the CPU: two rows of four documents."""
    return _rows(_tokens(vocab_size))


def _tokens(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (len(LENGTHS), sum(LENGTHS[0])), generator=generator)


def _rows(ids_BT: torch.Tensor) -> Rows:
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    return Rows.of(ids_BT, torch.stack(positions))


def _bounds(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return list(pairwise(ends))


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
