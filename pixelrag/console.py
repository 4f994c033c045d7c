"""What a command prints for its user."""

import sys


def say(line: str = "") -> None:
    """Print one line on standard output at once, where a pipe would hold it back."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
