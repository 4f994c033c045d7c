"""Vectors that an earlier generation holds already, for a refresh that would make the same."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

from pixelrag.errors import IndexError_
from pixelrag.retrieval import refresh_spec as files
from pixelrag.retrieval.durable import put
from pixelrag.retrieval.generation import VECTORS, Generation, Manifest
from pixelrag.retrieval.generations import WORK, Generations
from pixelrag.retrieval.refresh_spec import RefreshSpec, weights_hash, write_json

logger = logging.getLogger("pixelrag")


def reuse_earlier(generations: Generations, part: Path, spec: RefreshSpec) -> None:
    """`reuse` the newest generation of a folder that holds what this refresh would make, if any.

    For a run that begins where another has left generations. The log says which is used, or what
    the newest differs in.

    Args:
        generations: of the folder.
        part, spec: as for `reuse`.

    Raises:
        OSError: it cannot be copied.
    """
    wanted = spec.fingerprints | {"weights": weights_hash(part / WORK)}
    differs = ""
    for number in reversed(generations.numbers()):
        path = generations.path(number)
        try:
            found = Manifest.read(path).fingerprints
            others = [name for name, value in wanted.items() if found.get(name) != value]
            if not others:
                reuse(path, part, spec)
                logger.info("%s: of the same passages, weights and settings; used again", path)
                return
            differs = (
                differs or f"{path}, of an earlier run, is not used: other {', '.join(others)}"
            )
        except IndexError_ as error:
            logger.warning("%s. Passed over", error)
    if differs:
        logger.info(
            "%s. The passages are encoded anew. To use it, give the run the document encoder, "
            "passages and settings that made it", differs,
        )  # fmt: skip


def reuse(source: Path, part: Path, spec: RefreshSpec) -> None:
    """Copy vectors, and index files of the same kind, into a generation in the making.

    It is validated like any other: with a second encoding, and with what the training encodes.

    Args:
        source: a generation, or a folder of generations, of which the newest counts.
        part: the generation in the making, with its spec and snapshot.
        spec: of the refresh.

    Raises:
        IndexError_: there is none, or it is damaged.
        ProvenanceError: it was made of other passages or weights, or in another way.
        OSError: it cannot be copied.
    """
    if newest := Generations(source).newest():
        source = Generations(source).path(newest)
    found = Generation(source, shards=lambda count: ())
    weights = weights_hash(part / WORK)
    found.manifest.check(
        source,
        spec.fingerprints | {"weights": weights},
        "Make one with `pixelrag index` and this configuration, or leave index.start_from out",
    )
    found.verify()
    names = [VECTORS]
    kind = (found.manifest.index, len(found.manifest.index_files))
    if kind == (spec.index, spec.num_index_shards):
        names += found.manifest.index_files
    for name in names:
        put(part / name, partial(shutil.copyfile, source / name))
    write_json(part / WORK / files.BUILT, {"vectors from": str(source)})
    write_json(part / WORK / files.SEALED, {"seal": spec.seal(weights)})
