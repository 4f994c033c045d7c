"""Options of an evaluation on questions about tiles (PixelRAG's miniv8), and its readers."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.problems import Conflict
from pixelrag.config.section import Section

TILE_METRICS = ("miniv8/hit@1", "miniv8/hit@5", "miniv8/hit@10", "miniv8/mrr")
READER_KEY, GRADER_KEY = "PIXELRAG_READER_API_KEY", "PIXELRAG_GRADER_API_KEY"
_ANSWERING = ("reader_url", "reader_model", "grader_url", "grader_model")


class TileQuestionOptions(Section):
    miniv8: str | None = None
    """PixelRAG's question file (tiles_dir, questions, golden_mapping): search its tiles as well."""
    max_questions: int | None = Field(None, ge=1)
    """Use the first so many questions of eval.miniv8; null = all."""
    reader_url: str | None = None
    """OpenAI-compatible API that answers the questions from the tiles found; null = no answers."""
    reader_model: str | None = None
    """Model of the reader (its key: environment variable PIXELRAG_READER_API_KEY)."""
    reader_tiles: int = Field(3, ge=1)
    """Tiles that the reader sees of a question, the best first."""
    grader_url: str | None = None
    """OpenAI-compatible API that judges the answers."""
    grader_model: str | None = None
    """Model of the grader (its key: environment variable PIXELRAG_GRADER_API_KEY)."""
    answer_timeout_seconds: float = Field(60, gt=0)
    """How long reader and grader may each take for a reply; three attempts."""

    @field_validator("reader_url", "grader_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PydanticCustomError("paths", "a URL such as http://localhost:8201/v1")
        if parts.username or parts.password:
            # It would stand in config.yaml.
            raise PydanticCustomError(
                "paths", "a URL without a name or password in it; keys come from the environment"
            )
        return value.rstrip("/")


def tile_conflicts(options: TileQuestionOptions) -> Iterator[Conflict]:
    """Yield what cannot stand together."""
    given = [name for name in _ANSWERING if getattr(options, name) is not None]
    lacking = [name for name in _ANSWERING if getattr(options, name) is None]
    if given and lacking:
        yield Conflict(
            tuple(f"eval.{name}" for name in _ANSWERING),
            got=f"eval.{given[0]} without eval.{', eval.'.join(lacking)}",
            remedy="give all four, or none",
        )
    defaults = TileQuestionOptions()
    for name, value in _without_file(options, defaults):
        needs = "miniv8" if options.miniv8 is None else "reader_url"
        yield Conflict(
            (f"eval.{name}", f"eval.{needs}"),
            got=f"eval.{name} {value} without eval.{needs}",
            remedy=f"leave eval.{name} out, or give eval.{needs}",
        )


def _without_file(
    options: TileQuestionOptions, defaults: TileQuestionOptions
) -> Iterator[tuple[str, Any]]:
    """Options that nothing uses as the others stand."""
    names: tuple[str, ...] = ()
    if options.miniv8 is None:
        names += ("max_questions", *_ANSWERING)
    if options.reader_url is None:
        names += ("reader_tiles", "answer_timeout_seconds")
    for name in names:
        if getattr(options, name) != getattr(defaults, name):
            yield name, getattr(options, name)
