"""`python -m tests.fuzz TARGET --seconds N`: search, guided by coverage; needs atheris.

A finding ends the search: its traceback, and the file that holds the input. Mend it, and add the
file to `tests/fuzz/regressions/TARGET/`.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    """Search in a child process, and end as it ends."""
    with atheris.instrument_imports(include=["pixelrag", "tarfile", "zipfile", "yaml", "PIL"]):
        from tests.fuzz.targets import TARGETS, clean_up, regressions, scratch
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="how long to search (60)")
    parser.add_argument("--corpus", type=Path, help="keep what reached new code here")
    options = parser.parse_args()
    target = TARGETS[options.target]
    folder = options.corpus or Path(tempfile.mkdtemp(prefix="pixelrag-corpus-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds(), *regressions(options.target)]):
        (folder / f"seed-{number}").write_bytes(seed)
    words = folder.with_suffix(".words")
    quoted = ("".join(f"\\x{byte:02x}" for byte in word.encode("latin-1")) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    arguments = [
        *(sys.argv[0], str(folder), f"-max_total_time={options.seconds}", f"-dict={words}"),
        *("-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1", "-max_len=4096"),
        f"-artifact_prefix={folder}/found-",
    ]
    scratch()  # of this process, so that it can be removed: libFuzzer ends its own at once
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        clean_up()
        if code == 0 and options.corpus is None:
            shutil.rmtree(folder)
            words.unlink()
        sys.exit(code)
    atheris.Setup(arguments, target.run)
    atheris.Fuzz()


main()
