"""Charts and pages: the one place that draws, and that makes an HTML page of what was drawn.

    chart = line_chart("Loss", [Line("train", steps, losses)], x="step", y="loss", log_y=True)
    put_text(folder / "loss.html", page("My run", [Section("Training", [chart])]))
    (folder / "loss.png").write_bytes(chart.png())

A page stands alone: no script, style sheet, font or image from elsewhere, light or dark as the
reader's system is, and readable on a phone. The same sections as text: `markdown`.
"""

from pixelrag.charts.draw import Bars, Chart, Line, bar_chart, histogram, line_chart
from pixelrag.charts.page import Markup, Part, Section, Table, markdown, page

__all__ = [
    "Bars", "Chart", "Line", "Markup", "Part", "Section", "Table", "bar_chart", "histogram",
    "line_chart", "markdown", "page",
]  # fmt: skip
