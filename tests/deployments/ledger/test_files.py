import pytest

from deployments.protocol.errors import Conflict, InvalidRequest, RoundAborted, SlipstreamError
from deployments.protocol.poll import Body, Check, FilePart, Outcome, Receive, Verify
from tests.deployments.ledger.ledger_scene import Scene, report_of

PART = FilePart(
    directory="/c",
    path="/c/model.safetensors",
    names=("w",),
    dtypes=("F32",),
    shapes=((2,),),
    ranges=((100, 108),),
    digests=("00" * 8,),
)
REJECTED, DONE = Outcome.REJECTED, Outcome.DONE
TRANSFER_FAILED, REPLICA_FAILED = Outcome.TRANSFER_FAILED, Outcome.REPLICA_FAILED


def opened(scene: Scene) -> int:
    scene.token = scene.ledger.acquire("directory", scene.now).token
    return scene.open(file_bytes=16, persist=True)


def received(scene: Scene) -> int:
    round_id = opened(scene)
    scene.send(round_id, PART)
    scene.poll()
    return round_id


def committed(scene: Scene) -> int:
    """The version of a whole round of files."""
    call = scene.close(received(scene))
    scene.poll(6)
    return report_of(call).version


def test_a_round_of_files_needs_no_connection_and_is_committed_like_any_other() -> None:
    scene = Scene(replicas=2)
    round_id = opened(scene)
    for sent in (8, 16):
        scene.send(round_id, PART)
        current = scene.status().round
        assert current is not None and (current.sent_bytes, current.file_bytes) == (sent, 16)
        scene.poll()
    call = scene.close(round_id, "step-7")
    scene.poll(6)
    report = report_of(call)
    assert (report.version, report.label) == (1, "step-7") and Check.DIGESTS in report.checks
    assert all(each.version == 1 for each in scene.replicas) and scene.status().stored_version == 1
    payloads = [each.body.payload for each in scene.replicas[0].ran if isinstance(each.body, Receive)]
    assert payloads == [PART, PART]


def fenced(scene: Scene) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(scene.replicas) if each.fenced is not None)


@pytest.mark.parametrize("body", [Receive, Verify])
@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((REJECTED, DONE), RoundAborted, ()),  # the directory is missing on one host
        ((REJECTED, DONE, DONE), RoundAborted, ()),
        ((REJECTED, REJECTED), InvalidRequest, ()),
        ((TRANSFER_FAILED, DONE), RoundAborted, ()),
        ((REPLICA_FAILED, REJECTED, DONE), RoundAborted, (0,)),
    ],
)
def test_what_a_replica_cannot_read_aborts_the_round_and_fences_nobody_for_it(
    body: type[Body], outcomes: tuple[Outcome, ...], error: type[SlipstreamError], who: tuple[int, ...]
) -> None:
    scene = Scene(replicas=len(outcomes))
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        replica.outcomes[body] = outcome
    for _ in range(4):  # more often than a member may fail to receive
        round_id = opened(scene)
        call = scene.send(round_id, PART)
        if body is Verify:
            scene.poll()
            call = scene.close(round_id)
        scene.poll(4)
        assert type(call.error) is error
        rejecting = [f"r{i}" for i, each in enumerate(outcomes) if each in (REJECTED, TRANSFER_FAILED)]
        assert call.error is not None and sorted(call.error.detail["replicas"]) == rejecting
        if error is RoundAborted:
            assert all(name in call.error.message for name in rejecting)
        assert fenced(scene) == who
        if who:
            return
    assert all(each.admitted and each.version == 0 for each in scene.replicas)
    for replica in scene.replicas:
        replica.outcomes.clear()
    scene.ledger.release(scene.token, scene.now)
    assert report_of(scene.publish()).version == 1


def test_another_publishers_connection_outlives_a_round_of_files() -> None:
    scene = Scene(replicas=2)
    scene.connect({"rank_offset": 1})
    scene.ledger.release(scene.token, scene.now)
    assert committed(scene) == 1
    scene.ledger.release(scene.token, scene.now)
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    call = scene.close(scene.receive())
    scene.poll(6)
    assert report_of(call).version == 2


def test_a_connection_is_of_no_use_to_another_publisher() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    scene.ledger.release(scene.token, scene.now)
    scene.token = scene.ledger.acquire("somebody else", scene.now).token
    with pytest.raises(Conflict, match="connect before opening a round"):
        scene.open()
