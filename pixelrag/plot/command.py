"""The command: read runs, draw them, write one file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pixelrag.arguments import Parser
from pixelrag.console import say
from pixelrag.errors import ConfigError

if TYPE_CHECKING:
    from pixelrag.charts import Chart

_SUFFIXES = (".html", ".png")
_COLUMNS = 2
_MARGIN = 40  # pixels


def main(argv: Sequence[str]) -> int:
    """Draw runs; returns the exit code.

    Raises:
        ConfigError: the command line is wrong, matplotlib is missing, or the file cannot be
            written.
        DataError: a run is not there or its record is broken; names file and line.
    """
    parser = Parser(
        prog="pixelrag plot",
        description="Draw what runs have logged (loss, held-out figures, tokens a second, memory, "
        "the index's lag) over their steps, runs over each other, on one page that needs nothing "
        "but itself. Runs that still go may be drawn, too.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run's output_dir")
    parser.add_argument(
        "--output", type=Path, help="file to write, .html or .png (default RUN/plot.html)"
    )
    options = parser.parse_args(list(argv))
    output: Path = options.output or options.run[0] / "plot.html"
    if output.suffix not in _SUFFIXES:
        raise ConfigError(f"--output {output}: expected a name that ends in .html or .png")
    from pixelrag.plot.run import read_runs

    runs = read_runs(options.run)
    from pixelrag.charts import Chart, page
    from pixelrag.plot.figures import sections

    drawn = sections(runs)
    title = f"{', '.join(run.name for run in runs)}: training"
    if output.suffix == ".html":
        content = page(title, drawn).encode()
    else:
        charts = [part for section in drawn for part in section.parts if isinstance(part, Chart)]
        content = _sheet(title, charts)
    from pixelrag.retrieval.durable import put

    try:
        put(output, lambda temporary: _write(temporary, content))
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    say(f"wrote {output}")
    return 0


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sheet(title: str, charts: Sequence[Chart]) -> bytes:
    """The charts side by side and below each other under their title, as one PNG on white."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    images = [Image.open(io.BytesIO(chart.png())) for chart in charts]
    width, height = max(i.width for i in images), max(i.height for i in images)
    columns, rows = min(_COLUMNS, len(images)), -(-len(images) // _COLUMNS)
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), 28)
    heading = textwrap.wrap(title, 45 * columns)
    top = _MARGIN * 2 + 36 * len(heading)
    size = (width * columns + 2 * _MARGIN, top + height * rows + _MARGIN)
    sheet = Image.new("RGB", size, "white")
    ImageDraw.Draw(sheet).text((_MARGIN, _MARGIN), "\n".join(heading), fill="#1d2127", font=font)
    for number, image in enumerate(images):
        row, column = divmod(number, _COLUMNS)
        sheet.paste(image, (_MARGIN + column * width, top + row * height))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    return written.getvalue()
