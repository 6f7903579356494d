"""Broken fields are told by their rule, whatever their kind, without a validator's own wording."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cost_model.field_rules import NumberFields, place_of, rule_of, sentence


class Inner(BaseModel):
    share: float = Field(default=0.5, gt=0, lt=1, allow_inf_nan=False)


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1, le=9)
    name: Annotated[str, Field(min_length=2, max_length=4)] = "ab"
    mode: Literal["a", "b"] = "a"
    flag: bool = False
    items: list[int] = Field(default=[], max_length=2)
    first: list[int] = Field(default=[1], min_length=1)
    inner: Inner = Inner()
    needed: int

    @model_validator(mode="after")
    def _even(self) -> Form:
        if self.needed % 2:
            raise ValueError("needed is even, in pairs")
        return self


CASES: list[tuple[dict[str, Any], str]] = [
    ({"count": 0}, "count must be at least 1"),
    ({"count": 10}, "count must be at most 9"),
    ({"count": "128K"}, "count must be a whole number"),
    ({"count": 1.5}, "count must be a whole number"),
    ({"count": None}, "count must be a whole number"),
    ({"count": "9" * 5000}, "count must be a whole number of few digits"),
    ({"name": "a"}, "name must have at least 2 characters"),
    ({"name": "abcde"}, "name must have at most 4 characters"),
    ({"name": 3}, "name must be text"),
    ({"mode": "c"}, "mode must be 'a' or 'b'"),
    ({"flag": "perhaps"}, "flag must be true or false"),
    ({"items": 3}, "items must be a list"),
    ({"first": []}, "first must not be empty"),
    ({"items": [1, 2, 3]}, "items must have at most 2 entries"),
    ({"inner": 3}, "inner must be a mapping"),
    ({"inner": {"share": 0}}, "inner.share must be above 0"),
    ({"inner": {"share": 1}}, "inner.share must be below 1"),
    ({"inner": {"share": float("nan")}}, "inner.share must be finite"),
    ({"other": 1}, "other is no key that is known here"),
    ({"needed": 3}, "the form: needed is even, in pairs"),
]


@pytest.mark.parametrize(("change", "said"), CASES, ids=[said for _, said in CASES])
def test_a_broken_field_is_told_by_its_rule(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate({"needed": 2, **change})
    assert sentence(caught.value.errors()[0], "the form") == said


def test_what_is_missing_is_asked_for() -> None:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate({})
    (finding,) = caught.value.errors()
    assert (place_of(finding, "the form"), rule_of(finding)) == ("needed", "must be given")


class Numbers(NumberFields):
    count: int = 1
    share: Annotated[float, Field(ge=0)] | None = None
    flag: bool = False
    either: bool | int = 0
    listed: list[Annotated[int, Field(ge=0)]] = Field(default=[])


@pytest.mark.parametrize("field", ["count", "share"])
def test_true_is_no_number(field: str) -> None:
    for value in (True, False):
        with pytest.raises(ValidationError) as refused:
            Numbers.model_validate({field: value})
        (finding,) = refused.value.errors()
        assert sentence(finding, "the form") == f"{field}: must be a number, not true or false"


def test_true_stays_where_it_is_meant() -> None:
    assert Numbers.model_validate({"flag": True, "either": True, "listed": [1]}).either is True
    assert Numbers.model_validate({"count": 1, "share": None}).count == 1
    with pytest.raises(ValidationError, match="valid list"):
        Numbers.model_validate({"listed": True})
