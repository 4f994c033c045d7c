"""The folder of all generations: what is there, what is being made, what may go.

gen-000007/              published, whole, never written to again
gen-000008.part/         being made: its files, and work/ (spec, snapshot, shards, logs)
.gen-000003.trash/       being deleted

Publication is one rename. Until then the generation is not there for anyone; after it every file
is on the disk and described in the manifest, which was written last. A process killed at any
point leaves one of the states above, and every one of them is understood on the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pixelrag.errors import IndexError_, ProvenanceError
from pixelrag.retrieval import durable
from pixelrag.retrieval.generation import MANIFEST, Generation, Manifest

logger = logging.getLogger("pixelrag")

WORK = "work"
_PUBLISHED = re.compile(r"gen-(\d{6,})")
_PART = re.compile(r"gen-(\d{6,})\.part")
_TRASH = re.compile(r"\.gen-(\d{6,})(\.part|\.work)?\.trash")


class Generations:
    """All generations of one run.

    Args:
        root: their folder, `<output_dir>/index`; on storage that all ranks share.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, number: int) -> Path:
        """Folder of a published generation."""
        return self.root / f"gen-{number:06d}"

    def part(self, number: int) -> Path:
        """Folder of a generation in the making."""
        return self.root / f"gen-{number:06d}.part"

    def numbers(self) -> list[int]:
        """Published generations, ascending; other files and folders are left alone."""
        return self._matching(_PUBLISHED)

    def parts(self) -> list[int]:
        """Generations in the making, ascending."""
        return self._matching(_PART)

    def newest(self) -> int:
        """The highest number published; 0 = none."""
        return max(self.numbers(), default=0)

    def open(self, number: int, **options: Any) -> Generation:
        """Open one generation; ``options`` are those of `Generation`.

        Raises:
            IndexError_: it is not there, or damaged.
        """
        return Generation(self.path(number), **options)

    def open_newest(
        self, expected: Mapping[str, str], *, verify: bool = True, **options: Any
    ) -> Generation:
        """The newest generation that is whole; a damaged one is reported and passed over.

        Args:
            expected: fingerprints it must have.
            verify: compare the hashes as well as the sizes.
            options: those of `Generation`.

        Raises:
            IndexError_: none is whole.
            ProvenanceError: the newest whole one was made from something else.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            try:
                generation = self.open(number, **options)
                if verify:
                    generation.verify()
            except ProvenanceError:
                raise
            except IndexError_ as error:
                logger.warning("%s. Passed over", error)
                continue
            generation.manifest.check(generation.path, expected)
            return generation
        many = f"none of the {len(numbers)} generations is whole" if numbers else "no generation"
        raise IndexError_(f"{self.root}: {many}; the passages must be encoded first")

    def seal(self, number: int, **manifest: Any) -> None:
        """Describe the files of a part in its manifest, its last file.

        Args:
            number: of the generation.
            manifest: fields of `Manifest` but `generation` and `files`.
        """
        part = self.part(number)
        files = sorted(p for p in part.iterdir() if p.is_file() and p.name != MANIFEST)
        with ThreadPoolExecutor(max_workers=4) as pool:
            hashes = list(pool.map(durable.sha256, files))
        described = {
            file.name: {"size": file.stat().st_size, "sha256": digest}
            for file, digest in zip(files, hashes, strict=True)
        }
        Manifest(generation=number, files=described, **manifest).write(part)

    def publish(self, number: int) -> Path:
        """Give a sealed part its lasting name: the commit point.

        Raises:
            IndexError_: it is not sealed, or a generation of this number is there already.
        """
        part, final = self.part(number), self.path(number)
        Manifest.read(part)
        if final.exists():
            raise IndexError_(f"{final} is there already; published generations never change")
        self._to_trash(part / WORK, f".gen-{number:06d}.work.trash")
        durable.fsync(part)
        os.rename(part, final)
        durable.fsync(self.root)
        self.empty_trash()
        return final

    def manifest_of_part(self, number: int) -> Manifest:
        """The manifest of a part that was sealed but not yet published.

        Raises:
            IndexError_: it is not sealed.
        """
        return Manifest.read(self.part(number))

    def discard_part(self, number: int) -> None:
        """Delete a generation in the making."""
        self._to_trash(self.part(number), f".gen-{number:06d}.part.trash")
        self.empty_trash()

    def drop_old(self, keep: int, pinned: Collection[int] = ()) -> list[int]:
        """Delete published generations but the newest ``keep`` and the pinned ones.

        Processes that still map a deleted file go on reading it. Returns what was deleted.
        """
        numbers = self.numbers()
        kept = {*numbers[len(numbers) - keep :], *pinned}
        return self._drop([number for number in numbers if number not in kept])

    def drop_after(self, step: int) -> list[int]:
        """Delete what was made from snapshots later than ``step``, published or not.

        For a run that resumes from a checkpoint of that step: it will come to those snapshots
        anew. Returns the published ones that were deleted.
        """
        dropped = []
        for number in self.numbers():
            with contextlib.suppress(IndexError_):  # a damaged one stays for `open_newest` to tell
                if Manifest.read(self.path(number)).step > step:
                    dropped.append(number)
        return self._drop(dropped)

    def empty_trash(self) -> None:
        """Delete what a dead process had begun to delete."""
        for entry in self._entries():
            if not _TRASH.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the folder for one run; a run that was killed holds nothing.

        Raises:
            IndexError_: another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise IndexError_(
                    f"{self.root}: another run (process {lock.read().strip() or '?'}) makes "
                    "generations there; give each run its own output_dir"
                ) from error
            lock.truncate(0)
            lock.write(json.dumps(os.getpid()))
            lock.flush()
            yield

    def _drop(self, numbers: list[int]) -> list[int]:
        # Renamed first: a half-deleted generation must never look like one.
        for number in numbers:
            self._to_trash(self.path(number), f".gen-{number:06d}.trash")
        self.empty_trash()
        return numbers

    def _to_trash(self, folder: Path, name: str) -> None:
        trash = self.root / name
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, trash)

    def _matching(self, pattern: re.Pattern[str]) -> list[int]:
        matches = (pattern.fullmatch(entry.name) for entry in self._entries() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
