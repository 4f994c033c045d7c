"""One function as a screenshot: a white page, a coloured title bar, highlighted code.

Drawn with Pillow and Pygments alone. The code is set in the fixed-width bitmap font that Pillow
carries (6 x 11 pixels a character) and the title in its outline font, so that no font, browser or
display of the machine is needed and equal input gives equal pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter

from PIL import Image, ImageDraw, ImageFont
from pygments.lexers.python import PythonLexer
from pygments.styles import get_style_by_name

TITLE_HEIGHT = 64
_PAPER, _GUTTER, _RULE, _NUMBER = "#ffffff", "#f6f8fa", "#e1e4e8", "#9aa4b0"
_CHAR, _LINE, _MARGIN, _PAD = 6, 14, 16, 10
# Whole visual tokens of Qwen3-VL (32 x 32 pixels), so that no model has to scale the page.
_GRID = 32


@dataclass(frozen=True, slots=True)
class PageStyle:
    """How a page looks.

    Attributes:
        width: of the page in pixels, a multiple of 32.
        max_height: longer code ends here, with a mark.
        line_numbers: a gutter with numbers at the left.
        code_style: name of a Pygments style with a light background.
    """

    width: int = 448
    max_height: int = 448
    line_numbers: bool = True
    code_style: str = "default"


def render_page(
    source: str, *, title: str, subtitle: str, colour: str, style: PageStyle | None = None
) -> Image.Image:
    """Draw a page.

    Args:
        source: Python code. Long lines are wrapped, as a browser does.
        title, subtitle: in large and small letters on the title bar.
        colour: of the title bar, dark enough for white letters ("#0b7285").
        style: see `PageStyle`.

    Returns:
        RGB image, `style.width` wide, its height a multiple of 32 from 160 to `style.max_height`.
    """
    style = style or PageStyle()
    gutter = _MARGIN + 4 * _CHAR if style.line_numbers else 0
    left = gutter + _PAD
    columns = (style.width - left - _PAD) // _CHAR
    rows = list(_wrapped(source, columns, style.code_style))
    body = TITLE_HEIGHT + _PAD
    needed = body + len(rows) * _LINE + _PAD
    height = min(max(160, -(-needed // _GRID) * _GRID), style.max_height // _GRID * _GRID)
    capacity = (height - body - _PAD) // _LINE
    if len(rows) > capacity:
        rows = [*rows[: capacity - 1], (None, [("...", _NUMBER)])]

    page = Image.new("RGB", (style.width, height), _PAPER)
    draw = ImageDraw.Draw(page)
    if gutter:
        draw.rectangle((0, TITLE_HEIGHT, gutter - 1, height), fill=_GUTTER)
        draw.line((gutter, TITLE_HEIGHT, gutter, height), fill=_RULE)
    draw.rectangle((0, 0, style.width, TITLE_HEIGHT - 1), fill=colour)
    room = style.width - 2 * _MARGIN
    draw.text((_MARGIN, 8), _fitted(title, 26, room), font=_outline(26), fill="white")
    draw.text((_MARGIN, 40), _fitted(subtitle, 13, room), font=_outline(13), fill="#ffffffd0")
    for row, (number, spans) in enumerate(rows):
        y = body + row * _LINE
        if gutter and number is not None:
            label = f"{number:>4}"
            draw.text((gutter - _PAD // 2 - 4 * _CHAR, y), label, font=_fixed(), fill=_NUMBER)
        x = left
        for text, ink in spans:
            if not text.isspace():
                # Some letters reach one pixel to the left, which is cut off at a text's beginning.
                draw.text((x - _CHAR, y), " " + text, font=_fixed(), fill=ink)
            x += len(text) * _CHAR
    return page


def _wrapped(
    source: str, columns: int, code_style: str
) -> Iterator[tuple[int | None, list[tuple[str, str]]]]:
    """Rows of the page: (line number, or None where a line goes on; spans of text and colour)."""
    lines: list[list[tuple[str, str]]] = [[]]
    for text, ink in _coloured(source, code_style):
        for i, piece in enumerate(text.split("\n")):
            if i:
                lines.append([])
            lines[-1] += [(character, ink) for character in piece]
    for number, line in enumerate(lines, start=1):
        shown: int | None = number
        indent = next((i for i, (character, _) in enumerate(line) if character != " "), 0)
        hanging = [(" ", "")] * min(indent + 4, columns // 2)
        while len(line) > columns:
            spaces = [i for i in range(len(hanging) + 1, columns) if line[i][0] == " "]
            end = spaces[-1] + 1 if spaces else columns
            yield shown, _spans(line[:end])
            shown, line = None, hanging + line[end:]
        yield shown, _spans(line)


def _spans(line: list[tuple[str, str]]) -> list[tuple[str, str]]:
    runs = groupby(line, key=itemgetter(1))
    return [("".join(character for character, _ in run), ink) for ink, run in runs]


def _coloured(source: str, code_style: str) -> Iterator[tuple[str, str]]:
    style = get_style_by_name(code_style)
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    # The bitmap font has the characters of Latin-1.
    printable = source.expandtabs(8).encode("latin-1", "replace").decode("latin-1")
    for token, text in lexer.get_tokens(printable):
        yield text, f"#{style.style_for_token(token)['color'] or '24292e'}"


def _fitted(text: str, size: int, width: int) -> str:
    """The text, or as much of its end as fits, since names differ at their ends."""
    if _outline(size).getlength(text) <= width:
        return text
    while text and _outline(size).getlength("..." + text) > width:
        text = text[1:]
    return "..." + text


@cache
def _outline(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@cache
def _fixed() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()
