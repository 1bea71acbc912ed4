"""What a caller is told of a wrong body."""

import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.serving import MAX_BODY_BYTES, client


@pytest.mark.parametrize("content", [b"", b" \n", b"{}", b'{"label": null}'])
@pytest.mark.parametrize("media_type", ["application/json", "application/x-www-form-urlencoded", None])
async def test_body_is_json_whatever_its_media_type_and_may_be_empty(
    content: bytes, media_type: str | None
) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    trainer = FakeTrainer()
    async with client(FakeController(), trainer=trainer) as fleet:
        answer = await fleet.post("/train/publish", content=content, headers=headers)
    assert (answer.status_code, trainer.received) == (200, [None])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{x", "the body must be JSON: key must be a string"),
        (b"\xff", "the body must be JSON: expected value"),
        (b"[" * 900, "the body must be JSON: recursion limit exceeded"),
        (b'{"label": "\\ud800"}', "the body must be JSON: unexpected end of hex escape"),
        (b"null", "the body: expected an object, got None"),
        (b"[1]", "the body: expected an object, got list"),
        (b'"a"', "the body: expected an object, got 'a'"),
        (b'{"step": "7"}', "step: expected a valid integer, got '7'"),
        (b'{"step": 7.0}', "step: expected a valid integer, got 7.0"),
        (b'{"lable": 1}', "expected no other fields than ['after', 'label', 'step'], got 'lable'"),
        (b'{"step": [], "lable": 1}', "step: expected a valid integer, got list; expected no other"),
        (b'{"step": "' + b"7" * 900 + b'"}', "step: expected a valid integer, got '" + "7" * 60 + "'"),
        (b'{"label": "' + b"x" * MAX_BODY_BYTES, "the body must have at most 1000 bytes"),
    ],
)
async def test_wrong_body_is_refused_with_what_was_expected_and_what_came(
    content: bytes, message: str
) -> None:
    async with client(FakeController(), trainer=FakeTrainer()) as fleet:
        answer = await fleet.post("/train/publish", content=content)
    assert answer.status_code == (413 if len(content) > MAX_BODY_BYTES else 400)
    assert answer.json()["error"]["message"].startswith(message)


async def test_payload_may_hold_any_json() -> None:
    controller = FakeController()
    async with client(controller) as fleet:
        await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
        await fleet.post("/start_weight_update")
        content = b'{"update_info": {"a": [1, null, {"b": NaN}], "c": "\xc3\xa9"}, "ignored": 1}'
        assert (await fleet.post("/update_weights", content=content)).status_code == 200
    assert repr(controller.sent) == "[{'a': [1, None, {'b': nan}], 'c': 'é'}]"


async def test_head_is_answered_where_get_is() -> None:
    async with client(FakeController()) as fleet:
        assert (await fleet.head("/health")).status_code == 200
        assert (await fleet.head("/get_world_size?include_dp=perhaps")).status_code == 400
        for path, allowed in (("/fleet/events", "GET"), ("/pause", "POST")):
            answer = await fleet.head(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert (await fleet.post("/health")).headers["allow"] == "GET, HEAD"
