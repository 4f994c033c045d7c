"""Lines of the report."""

import sys


def say(line: str) -> None:
    """Print one line on standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
