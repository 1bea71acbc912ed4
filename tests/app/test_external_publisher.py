"""What a publisher of a part of a checkpoint sends, and what it makes of a lost answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import ParamMeta

from app.client.connection import Call, FleetClient, FleetError
from app.external_publisher import Publisher, outcome, source_of, whole_source
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus, History
from deployments.vllm_versions import Source
from tests.app.http.fake_status import report, status
from tests.app.http.serving import application, on_a_socket
from tests.deployments.controller_in_process import ControllerInProcess
from tests.tiny_models import tiny_llama


def test_what_the_model_does_not_have_is_sent_from_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(0)
    model.save_pretrained(tmp_path)
    vision = torch.arange(6.0).reshape(2, 3)
    save_file({"vision.weight": vision}, tmp_path / "vision.safetensors")
    own = dict(whole_source(model, None))
    sent = dict(whole_source(model, tmp_path))
    assert sent.keys() - own.keys() == {"vision.weight"}
    assert torch.equal(sent["vision.weight"], vision)
    assert "the model lacks 1 of " in caplog.text and caplog.text.endswith(
        "as they are there: vision.weight\n"
    )


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint: expected a directory with .*none'"):
        whole_source(tiny_llama(0), tmp_path / "none")


class Halves(Source):
    def specs(self) -> list[ParamMeta]:
        return [ParamMeta("half", torch.bfloat16, (2, 3))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "half", torch.full((2, 3), 0.5, dtype=torch.bfloat16)


def test_a_source_of_ones_own_has_every_tensor() -> None:
    with pytest.raises(ValueError, match="every tensor itself, got checkpoint='there' beside it"):
        source_of(Halves(), Path("there"))


@pytest.mark.slow
def test_a_source_of_ones_own_is_published(controller: ControllerInProcess) -> None:
    with (
        on_a_socket(application(controller, max_body_bytes=1 << 20)) as address,
        Publisher(f"http://{address}", Halves()) as made,
    ):
        assert made.publish().version == 1
    assert torch.equal(controller.received["half"], dict(Halves())["half"])


OPENED = status(3, ["a"], round_id=7)


class SilentFleet:
    """Answers the questions after some that it does not answer, and then once for each status."""

    def __init__(self, silent: int, statuses: Sequence[FleetStatus], ended: Sequence[RoundReport]) -> None:
        self.silent, self.statuses, self.ended = silent, [*statuses], ended

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.silent:
            self.silent -= 1
            raise httpx.ReadTimeout("no answer")
        if request.url.path == "/fleet":
            return json_of(FleetStatus, self.statuses[0])
        is_last = len(self.statuses) == 1
        if not is_last:
            self.statuses.pop(0)
        return json_of(History, History(rounds=self.ended if is_last else []))

    def outcome(self, limit_s: float = 60.0) -> RoundReport:
        with FleetClient(
            httpx.Client(transport=httpx.MockTransport(self), base_url="http://fleet")
        ) as client:
            return outcome(client, OPENED, limit_s)


def json_of(kind: type, value: object) -> httpx.Response:
    return httpx.Response(200, content=TypeAdapter(kind).dump_json(value))


def test_a_round_whose_commit_was_not_answered_is_found_by_its_number() -> None:
    ended = [report(6, 3), report(7, 4), report(8, 5)]
    fleet = SilentFleet(1, [OPENED, status(5, ["a"])], ended)
    assert fleet.outcome() == ended[1]


@pytest.mark.parametrize(
    ("now", "ended", "text"),
    [
        (status(3, ["a"]), [report(7, 4, phase="aborted")], "round 7 was aborted"),
        (status(3, ["a"]), [report(6, 3)], "round 7 of fleet fleet was committed is not known"),
        (replace(OPENED, fleet_id="new"), [report(7, 4)], "not known: fleet new, which has no record of it"),
        (OPENED, [], "round 7 may be committed: it has not ended yet"),
    ],
)
def test_a_round_that_is_not_committed_is_said_to_be_what_it_is(
    now: FleetStatus, ended: Sequence[RoundReport], text: str
) -> None:
    with pytest.raises(FleetError, match=text):
        SilentFleet(0, [now], ended).outcome(limit_s=0.0)


def test_a_fleet_that_stays_silent_leaves_the_outcome_open() -> None:
    with pytest.raises(FleetError, match="round 7 may be committed: no server answers"):
        SilentFleet(9, [OPENED], []).outcome(limit_s=0.0)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerInProcess]:
    made = ControllerInProcess(tmp_path)
    yield made
    made.close()


@pytest.fixture
def publisher(controller: ControllerInProcess) -> Iterator[Publisher]:
    with (
        on_a_socket(application(controller, max_body_bytes=1 << 20)) as address,
        Publisher(f"http://{address}", tiny_llama(0)) as made,
    ):
        yield made


@pytest.mark.slow
def test_a_publisher_goes_on_from_a_commit_that_was_not_answered(
    controller: ControllerInProcess, publisher: Publisher
) -> None:
    assert publisher.publish().version == 1
    controller.loses = {"close_round"}
    made = publisher.publish()
    controller.loses.clear()
    assert (made.version, made.phase) == (2, "committed")
    assert publisher.publish().version == 3


@pytest.mark.slow
def test_a_publish_that_is_refused_is_not_taken_for_the_interrupted_one_before(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = publisher._fleet.send

    def interrupted(call: Call[Any]) -> Any:
        answer = send(call)
        if call.path == "/finish_weight_update":
            raise KeyboardInterrupt  # Ctrl-C in a notebook
        return answer

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(publisher._fleet, "send", interrupted)
        publisher.publish()
    publisher._client.start_weight_update()
    with pytest.raises(FleetError, match="start_weight_update was called twice"):
        publisher.publish()
    with pytest.raises(FleetError, match="has brought no payload"):
        publisher._client.finish_weight_update()


@pytest.mark.slow
def test_a_publisher_that_fails_gives_its_round_up(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would wait until the lease of the first ends: 60 s."""
    for failure in (RuntimeError("out of memory"), KeyboardInterrupt(), FleetError("no answer")):

        def fails(update_info: object, failure: BaseException = failure) -> None:
            raise failure

        with monkeypatch.context() as patch, pytest.raises(type(failure)):
            patch.setattr(publisher._client, "update_weights", fails)
            publisher.publish()
    assert publisher.publish().version == 1
