"""Forms of rows that are turned into those of `schema` before anything looks at them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pixelrag.data import swift


class Form(NamedTuple):
    """A form of rows.

    Attributes:
        matches: whether a row, a JSON object, is of it.
        plain: the same row with the keys of `schema`; what is wrong with it goes to the list.
    """

    matches: Callable[[dict[str, Any]], bool]
    plain: Callable[[dict[str, Any], list[str]], dict[str, Any]]


FORMS = (Form(swift.is_swift_row, swift.plain_row),)
