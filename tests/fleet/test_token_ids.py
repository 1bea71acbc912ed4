import json
from typing import Any

import httpx
import pytest

from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import PROMPT, complete, succeeded

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]

ROUTE = "/inference/v1/generate"


def generate(client: httpx.Client, sampling: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | (sampling or {})
    return client.post(
        ROUTE, json={"token_ids": PROMPT, "sampling_params": sampling} | fields, headers=headers
    )


def test_its_tokens_are_those_of_the_completions_route(fleet: Fleet) -> None:
    with fleet.client() as client:
        answer = succeeded(generate(client, {"logprobs": 1}, model=MODEL)).json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == complete(client, PROMPT, 8).token_ids
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        # As vLLM named it before 0.32, and as verifiers demands it.
        assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in choice["token_ids"]]


def test_what_verifiers_and_skyrl_send_is_understood(fleet: Fleet) -> None:
    verifiers = {
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 4,
            "stop_token_ids": [2],
            "logprobs": 1,
            "skip_special_tokens": False,
            "routed_experts_prompt_start": 0,
        },
        "cache_salt": "7",
        "priority": 0,
    }
    skyrl = {
        "sampling_params": {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0, "max_tokens": 4}
    }
    with fleet.client() as client:
        for sent, choices in ((verifiers, 1), (skyrl, 2)):
            body = {"model": MODEL, "token_ids": PROMPT, **sent}
            answer = succeeded(client.post(ROUTE, json=body, headers={"X-Session-ID": "trajectory-1"})).json()
            assert len(answer["choices"]) == choices
        assert len(answer["prompt_logprobs"]) == len(PROMPT)
        # It has an effect with vLLM's `scheduling_policy: priority`; without it all are equal.
        succeeded(generate(client, priority=1))


def test_answers_and_streams_have_versions(fleet: Fleet) -> None:
    with fleet.client() as client:
        answer = succeeded(generate(client, {"n": 2, "temperature": 1}))
        version = fleet.version()
        assert answer.json()["weight_version"] == int(answer.headers["x-weight-version"]) == version
        for choice in answer.json()["choices"]:
            # vLLM's own spans: as text, so that its models and /derender read the answer.
            assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 8}]
        events = succeeded(generate(client, stream=True)).text.split("\n\n")
        chunks = [json.loads(event[len("data: ") :]) for event in events if event.startswith("data: {")]
        assert chunks[-1]["weight_version"] == version
        assert chunks[-1]["choices"][0]["weight_versions"] == [
            {"version": str(version), "start": 0, "end": 8}
        ]
        assert events[-2] == "data: [DONE]"
