"""Every error that is the user's to mend, one class a cause, each with the exit code it ends in.

A message names the thing, the place (file and line, rank, sample, config path), what was got and
expected, and what fixes it. `pixelrag.cli` prints the message alone; `--debug` shows the traceback.
Code 1 is any other exception: a fault of pixelrag itself, shown with its traceback.
"""


class PixelragError(Exception):
    """Base of all errors below; ends the command with `exit_code`."""

    exit_code = 1
    told_by_main = False
    """Set where every rank raises the same error: rank 0 alone prints it."""


class ConfigError(PixelragError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class DataError(PixelragError):
    """A data file, row or image is missing or broken."""

    exit_code = 3


class ModelError(PixelragError):
    """A model is not there, does not load, or does not fit what it is asked to do."""

    exit_code = 4


class CheckpointError(PixelragError):
    """A checkpoint cannot be written, or is missing, truncated or of another run."""

    exit_code = 5


class EngineError(PixelragError):
    """The training engine cannot do what was asked, or the ranks cannot be reconciled."""

    exit_code = 6


class NonFiniteError(PixelragError):
    """A loss or gradient became NaN or infinite; all ranks stop at that step."""

    exit_code = 7


class IndexError_(PixelragError):
    """A retrieval index is missing, torn or of other vectors (the builtin name is taken)."""

    exit_code = 8


class ProvenanceError(PixelragError):
    """An artefact does not come from what it is said to come from."""

    exit_code = 9
