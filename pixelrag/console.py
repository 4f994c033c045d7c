"""What a command prints for its user."""

import sys


def say(line: str = "") -> None:
    """Print one line on standard output at once, where a pipe would hold it back."""
    # File names may hold bytes, and data halves of surrogate pairs, that no terminal takes.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
