"""What a student writes beside its teacher and the data, as one HTML page to read."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pixelrag.charts import Markup, Section, page
from pixelrag.evaluate.found_page import STYLE, figures_section

_STYLE = """
.prompt { white-space: pre-wrap; max-height: 16em; overflow: auto; color: var(--soft);
  border-left: 3px solid var(--rule); padding-left: 0.7rem; }
.sides { display: grid; gap: 0.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); margin: 0.6rem 0; }
.sides > div { border: 1px solid var(--rule); border-radius: 4px; padding: 0.4rem 0.6rem;
  min-width: 0; }
.sides .text { max-height: 22em; }
"""


@dataclass(frozen=True, slots=True)
class WrittenSample:
    """A prompt and what came behind it.

    Attributes:
        sample_id: where it comes from.
        prompt: as text.
        reference: what the data has there.
        student: what the student writes.
        teacher: what the teacher writes; None where none can be asked.
    """

    sample_id: str
    prompt: str
    reference: str
    student: str
    teacher: str | None = None


def sample_sheet(
    samples: Sequence[WrittenSample], figures: Mapping[str, float], *, title: str
) -> str:
    """The page, HTML: figures, then each sample with its texts side by side."""
    return page(
        title,
        [figures_section(figures), *(Section(s.sample_id, [Markup(_block(s))]) for s in samples)],
        style=STYLE + _STYLE,
    )


def _block(sample: WrittenSample) -> str:
    texts = {"reference": sample.reference, "student": sample.student, "teacher": sample.teacher}
    sides = "".join(
        f'<div><span class="meta">{name}</span>'
        f'<span class="text">{html.escape(text) or "(nothing)"}</span></div>\n'
        for name, text in texts.items()
        if text is not None
    )
    return (
        f'<div class="prompt">{html.escape(sample.prompt)}</div>\n<div class="sides">\n{sides}'
        "</div>\n"
    )
