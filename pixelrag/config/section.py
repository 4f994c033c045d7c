"""The base of every configuration section: frozen, strict about names, finite numbers only."""

import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


def accepts(annotation: Any, wanted: type) -> bool:
    """Whether `annotation` (a type, a union, an `Annotated`) has `wanted` among its members."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return accepts(typing.get_args(annotation)[0], wanted)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(member, wanted) for member in typing.get_args(annotation))
    return annotation is wanted or origin is wanted


class Section(BaseModel):
    """A named part of a job's configuration. The string under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number is expected: pydantic would read it as 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and not accepts(annotation, bool):
            if accepts(annotation, int):
                raise PydanticCustomError("not_a_number", "an integer")
            if accepts(annotation, float):
                raise PydanticCustomError("not_a_number", "a number")
        return value
