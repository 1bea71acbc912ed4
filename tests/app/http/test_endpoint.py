"""Bodies and queries as models, and what is said of those that are wrong."""

import pytest
from pydantic import BaseModel, ConfigDict

from app.http.endpoint import parse_body
from app.http.requests import UpdateWeightsBody
from deployments.errors import InvalidRequest


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    version: int = 0
    payload: dict[str, int] | list[int] = []


@pytest.mark.parametrize("content", [b"", b" \n", b"{}"])
def test_an_empty_body_is_an_empty_object(content: bytes) -> None:
    assert parse_body(content, Body) == Body()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{x", "the body must be JSON: key must be a string"),
        (b"\xff", "the body must be JSON: expected value"),
        (b"[1]", "the body: expected an object, got list"),
        (b'"a"', "the body: expected an object, got 'a'"),
        (b'{"version": "7"}', "version: expected a valid integer, got '7'"),
        (b'{"version": 7.0}', "version: expected a valid integer, got 7.0"),
        (b'{"payload": 7}', "payload: expected an object or a valid array, got 7"),
        (b'{"lable": 1}', "expected no other fields than ['payload', 'version'], got 'lable'"),
        (b'{"version": null, "lable": 1}', "version: expected a valid integer, got None; expected no other"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected_and_what_was_given(
    content: bytes, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(content, Body)
    assert caught.value.message.startswith(message)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(b'{"version": "' + b"7" * 10_000 + b'"}', Body)
    assert len(caught.value.message) < 120


def test_a_payload_may_hold_any_json() -> None:
    content = b'{"update_info": {"a": [1, null, {"b": NaN}], "c": "\xc3\xa9"}, "ignored": 1}'
    body = parse_body(content, UpdateWeightsBody)
    assert repr(body.update_info) == "{'a': [1, None, {'b': nan}], 'c': 'é'}"
