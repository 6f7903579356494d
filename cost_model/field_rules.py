"""What pydantic finds wrong, said as the rule that a field keeps."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationInfo, field_validator

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "dict": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "dataclass": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "finite_number": "finite",
}
_LIMITS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be above {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be below {}"),
    "literal_error": ("expected", "must be {}"),
    "enum": ("expected", "must be {}"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "too_long": ("max_length", "must have at most {} entries"),
    "too_short": ("min_length", "must have at least {} entries"),
    "string_pattern_mismatch": ("pattern", "must match {}"),
}
_WHOLE = {
    "missing": "must be given",
    "extra_forbidden": "is no key that is known here",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number of few digits",
}


def rule_of(finding: Mapping[str, Any]) -> str:
    """The rule that one entry of ``ValidationError.errors()`` broke, to be read after the field's name.

    >>> rule_of({"type": "int_parsing", "msg": "Input should be a valid integer", "input": "x"})
    'must be a whole number'
    """
    kind = str(finding["type"])
    if kind in _WHOLE:
        return _WHOLE[kind]
    if kind in _LIMITS:
        name, text = _LIMITS[kind]
        limit = (finding.get("ctx") or {}).get(name)
        if name == "min_length" and limit == 1:
            return "must not be empty"
        return text.format(int(limit) if isinstance(limit, float) and limit.is_integer() else limit)
    stem = kind.removesuffix("_type").removesuffix("_parsing")
    if stem in _KINDS:
        return f"must be {_KINDS[stem]}"
    message = str(finding["msg"])
    if kind in ("value_error", "assertion_error"):
        return message.partition(", ")[2] or message
    return message.replace("Input should", "must").replace("must be a valid", "must be a")


def place_of(finding: Mapping[str, Any], whole: str) -> str:
    """Dotted path of the field; ``whole`` where the finding is about all of it."""
    return ".".join(str(part) for part in finding["loc"]) or whole


def sentence(finding: Mapping[str, Any], whole: str) -> str:
    """Field and rule as one sentence; a rule of several fields already names them."""
    rule = rule_of(finding)
    place = place_of(finding, whole)
    return f"{place}: {rule}" if finding["type"] in ("value_error", "assertion_error") else f"{place} {rule}"


class NumberFields(BaseModel):
    """A model whose numbers are not given as ``true`` or ``false``, which pydantic reads as 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _members(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError("must be a number, not true or false")
        return value


def _members(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]
