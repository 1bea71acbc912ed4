import pytest

from deployments.ledger.state import PendingCall
from deployments.protocol import errors
from deployments.protocol.poll import Body, Check, Connect, FilePart, Outcome, Receive, Verify
from tests.deployments.ledger.ledger_scene import GROUP, SEPARATE, Scene, report_of

TRANSFER_FAILED, REPLICA_FAILED = Outcome.TRANSFER_FAILED, Outcome.REPLICA_FAILED
REJECTED, DONE = Outcome.REJECTED, Outcome.DONE


def scene_with(body: type[Body], outcomes: tuple[Outcome, ...], world_size: int = 1) -> Scene:
    scene = Scene(replicas=len(outcomes), world_size=world_size)
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        replica.outcomes[body] = outcome
    return scene


def fenced(scene: Scene) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(scene.replicas) if each.fenced is not None)


@pytest.mark.parametrize("init_info", [GROUP, SEPARATE])
@pytest.mark.parametrize("body", [Receive, Verify])
@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((TRANSFER_FAILED, TRANSFER_FAILED), errors.TransferAborted, ()),
        ((TRANSFER_FAILED, DONE), errors.TransferAborted, ()),
        ((TRANSFER_FAILED, REPLICA_FAILED), errors.TransferAborted, (1,)),
        ((TRANSFER_FAILED, REJECTED), errors.InvalidRequest, ()),  # what one has seen and refused, all would
        ((TRANSFER_FAILED, REJECTED, DONE), errors.TransferAborted, (1,)),
    ],
)
def test_a_receiver_that_lost_its_peers_is_intact(
    body: type[Body],
    outcomes: tuple[Outcome, ...],
    error: type[errors.SlipstreamError],
    who: tuple[int, ...],
    init_info: dict[str, int],
) -> None:
    scene = scene_with(body, outcomes)
    scene.connect(init_info)
    call = scene.send(scene.open()) if body is Receive else scene.close(scene.receive())
    scene.poll(4)
    assert type(call.error) is error and fenced(scene) == who
    assert "r0: transfer_failed here" in call.error.message or error is errors.InvalidRequest
    for index, replica in enumerate(scene.replicas):
        assert index in who or (replica.admitted and replica.version == 0 and "drop" in replica.names())


def test_after_a_failed_transfer_the_round_can_be_sent_again() -> None:
    scene = scene_with(Receive, (TRANSFER_FAILED, TRANSFER_FAILED))
    scene.connect(GROUP)
    error = sent(scene).error
    assert isinstance(error, errors.RoundAborted) and error.status == 409
    assert error.detail["send_again"] is True and "send the round again" in error.message
    for replica in scene.replicas:
        replica.outcomes.clear()
    assert report_of(scene.publish()).version == 1 and fenced(scene) == ()


def sent(scene: Scene) -> PendingCall:
    call = scene.send(scene.open())
    scene.poll()
    return call


def test_the_others_do_not_wait_for_a_member_of_the_group_that_was_lost() -> None:
    scene = Scene(replicas=3)
    scene.connect(GROUP)
    for replica in scene.replicas:
        replica.hangs_in.add(Receive)
    call = sent(scene)
    assert not call.done
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert isinstance(call.error, errors.TransferAborted) and "r1: its process is gone" in call.error.message
    others = [scene.replicas[0], scene.replicas[2]]
    scene.poll(only=others)
    assert all("drop" in each.names() and each.admitted for each in others)


@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((REPLICA_FAILED, None), errors.TransferAborted, (0,)),
        ((DONE, REPLICA_FAILED, None), errors.TransferAborted, (1,)),
        ((TRANSFER_FAILED, None), None, ()),
    ],
)
def test_the_others_do_not_wait_for_a_member_that_has_failed_itself(
    outcomes: tuple[Outcome | None, ...], error: type[errors.SlipstreamError] | None, who: tuple[int, ...]
) -> None:
    scene = Scene(replicas=len(outcomes))
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        if outcome is None:
            replica.hangs_in.add(Receive)
        else:
            replica.outcomes[Receive] = outcome
    scene.connect(GROUP)
    call = sent(scene)
    assert (None if call.error is None else type(call.error)) is error and fenced(scene) == who
    assert ("drop" in scene.replicas[-1].names()) is (error is not None)


def test_a_member_that_was_lost_before_the_first_byte_ends_the_sending_at_once() -> None:
    scene = Scene(replicas=2)
    scene.connect(GROUP)
    round_id = scene.open()
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert isinstance(scene.send(round_id).error, errors.TransferAborted)


def test_a_replica_that_has_received_everything_does_not_need_the_lost_member() -> None:
    scene = Scene(replicas=2)
    scene.replicas[1].hangs_in.add(Receive)
    scene.connect(GROUP)
    round_id = scene.open()
    call = scene.send(round_id)
    scene.poll()
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert call.done and call.error is None
    closed = scene.close(round_id)
    scene.poll(8, only=scene.replicas[:1])
    assert set(report_of(closed).replicas) == {"r0"}


def test_with_too_few_left_the_round_is_not_to_be_sent_again() -> None:
    scene = Scene(replicas=2, min_replicas=2)
    scene.connect(GROUP)
    scene.replicas[0].hangs_in.add(Receive)
    call = sent(scene)
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert type(call.error) is errors.RoundAborted and "send_again" not in call.error.detail


def test_a_rendezvous_that_a_lost_member_cannot_join_ends_at_once() -> None:
    scene = Scene(replicas=3)
    for replica in scene.replicas:
        replica.hangs_in.add(Connect)
    call = scene.connect(GROUP)
    assert not call.done
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert isinstance(call.error, errors.Conflict) and call.error.detail["connect_again"]
    assert "r1: its process is gone" in call.error.message
    others = [scene.replicas[0], scene.replicas[2]]
    for replica in others:
        replica.hangs_in.clear()
    scene.poll(only=others)
    assert all("drop" in each.names() and each.admitted for each in others)
    scene.connect(GROUP)
    round_id = scene.open()
    scene.send(round_id)
    scene.poll(only=others)
    closed = scene.close(round_id)
    scene.poll(8, only=others)
    assert set(report_of(closed).replicas) == {"r0", "r2"}


def test_replicas_with_connections_of_their_own_go_on_connecting_without_the_lost_one() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Connect)
    call = scene.connect(SEPARATE)
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert not call.done


@pytest.mark.parametrize("lost", ["expired", "taken anew"])
def test_no_replica_waits_in_a_rendezvous_for_a_publisher_that_is_gone(lost: str) -> None:
    scene = Scene(replicas=2, lease_s=5.0)
    for replica in scene.replicas:
        replica.hangs_in.add(Connect)
    call = scene.connect(GROUP)
    if lost == "expired":
        scene.wait(6.0)
    else:
        scene.token = scene.ledger.acquire("trainer", scene.now).token
    assert isinstance(call.error, errors.Conflict)
    scene.poll()
    assert all("drop" in each.names() and each.fenced is None for each in scene.replicas)


@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((TRANSFER_FAILED, TRANSFER_FAILED), errors.Conflict, ()),
        ((TRANSFER_FAILED, DONE), errors.Conflict, ()),
        ((TRANSFER_FAILED, REPLICA_FAILED), errors.Conflict, (1,)),
        ((TRANSFER_FAILED, REJECTED), errors.Conflict, ()),
        ((REPLICA_FAILED, DONE), errors.Conflict, (0,)),
        ((REPLICA_FAILED, REPLICA_FAILED), errors.InvalidRequest, ()),
    ],
)
def test_a_publisher_whose_rendezvous_failed_is_asked_to_connect_again(
    outcomes: tuple[Outcome, ...], error: type[errors.SlipstreamError], who: tuple[int, ...]
) -> None:
    scene = scene_with(Connect, outcomes)
    call = scene.connect(GROUP)
    assert type(call.error) is error and fenced(scene) == who
    assert bool(call.error.detail.get("connect_again")) is (error is errors.Conflict)
    with pytest.raises(errors.Conflict, match="no publisher is connected"):
        scene.open()
    for replica in scene.replicas:
        replica.outcomes.clear()
    scene.poll()
    assert report_of(scene.publish()).version == 1


def attempt(scene: Scene, body: type[Body], init_info: dict[str, int] = SEPARATE) -> PendingCall:
    """One round that fails at this instruction."""
    call = scene.connect(init_info)
    if body is Connect:
        return call
    call = scene.send(scene.open()) if body is Receive else scene.close(scene.receive())
    scene.poll(4)
    return call


@pytest.mark.parametrize("body", [Connect, Receive, Verify])
def test_a_replica_that_alone_fails_to_receive_again_and_again_is_fenced(body: type[Body]) -> None:
    scene = scene_with(body, (TRANSFER_FAILED, DONE, DONE))
    for _ in range(2):
        assert attempt(scene, body).error is not None and fenced(scene) == ()
    assert attempt(scene, body).error is not None
    scene.poll()
    times = "failed 3 times in a row while others received"
    assert scene.replicas[0].fenced == f"{body.name}: {times}: transfer_failed here"
    assert fenced(scene) == (0,)
    assert report_of(scene.publish()).version == 1, "the others go on without it"


@pytest.mark.parametrize("outcome", [TRANSFER_FAILED, REPLICA_FAILED])
def test_a_replica_that_was_lost_after_it_had_failed_fences_nobody(outcome: Outcome) -> None:
    scene = scene_with(Receive, (outcome, DONE, DONE))
    scene.replicas[1].hangs_in.add(Receive)
    scene.connect(SEPARATE)
    call = sent(scene)
    scene.ledger.lost([("r0", "r0-1")], "its process is gone", scene.now)
    scene.replicas[1].hangs_in.clear()
    scene.poll(only=scene.replicas[1:])
    assert call.done and [scene.state_of(each) for each in scene.replicas] == ["gone", "serving", "serving"]


def test_a_version_that_arrived_ends_the_row() -> None:
    scene = Scene(replicas=2)
    for _ in range(3):
        scene.replicas[0].outcomes[Receive] = TRANSFER_FAILED
        for _ in range(2):
            attempt(scene, Receive)
        scene.replicas[0].outcomes.clear()
        assert report_of(scene.publish()).phase == "committed"
    assert fenced(scene) == ()


@pytest.mark.parametrize("body", [Connect, Receive, Verify])
def test_a_transfer_that_fails_everywhere_says_nothing_of_any_replica(body: type[Body]) -> None:
    scene = scene_with(body, (TRANSFER_FAILED, TRANSFER_FAILED))
    for _ in range(6):
        assert attempt(scene, body).error is not None
    assert fenced(scene) == ()


# -- which connections survive an aborted round ----------------------------------------------------


@pytest.mark.parametrize("sent_before", [True, False], ids=["in the middle", "before the first byte"])
def test_after_an_aborted_round_a_communicator_is_refused_until_its_publisher_connects_again(
    sent_before: bool,
) -> None:
    """The drop makes every replica leave it. vLLM's own publisher cannot know, and is told at the start."""
    scene = Scene(replicas=2)
    scene.connect(GROUP)
    round_id = scene.receive() if sent_before else scene.open()
    scene.ledger.abort_round(scene.token, round_id, "changed its mind", scene.now)
    scene.poll()
    for _ in range(2):
        with pytest.raises(
            errors.Conflict, match=r"ended with round 1, which was aborted; connect again$"
        ) as caught:
            scene.open()
        assert caught.value.detail == {"connect_again": True}
    late = scene.start()
    scene.connect(GROUP)
    assert "connect" in late.names(), "who joined meanwhile takes part"
    assert report_of(scene.publish()).version == 1


@pytest.mark.parametrize(("init_info", "in_place"), [(SEPARATE, False), (GROUP, True)])
def test_a_connection_survives_an_aborted_round_that_dropped_no_group(
    init_info: dict[str, int], in_place: bool
) -> None:
    """Those that reach each replica separately; and vLLM's communicator, if nothing was sent over it."""
    scene = Scene(replicas=0)
    for _ in range(2):
        scene.start(updates_in_place=in_place)
    scene.connect(init_info)
    round_id = scene.open() if in_place else scene.receive()
    scene.ledger.abort_round(scene.token, round_id, "changed its mind", scene.now)
    scene.poll()
    call = scene.close(scene.receive())
    scene.poll(10)
    assert report_of(call).version == 1


# -- a transfer of all members fails because of one: the others name it -----------------------------


def missing(body: type[Body], said: tuple[tuple[int, ...], ...]) -> Scene:
    """Replicas of two workers: ranks 1 and 2, 3 and 4, 5 and 6; what each says of its peers."""
    scene = scene_with(body, (TRANSFER_FAILED,) * len(said), world_size=2)
    for replica, ranks in zip(scene.replicas, said, strict=True):
        replica.missing_ranks = ranks
    return scene


@pytest.mark.parametrize("body", [Connect, Receive])
def test_a_member_that_its_peers_miss_three_times_is_fenced_and_the_others_go_on(body: type[Body]) -> None:
    scene = missing(body, ((4,), (), (4,)))
    for _ in range(3):
        assert fenced(scene) == ()
        assert attempt(scene, body, GROUP).error is not None
        scene.poll()
    assert fenced(scene) == (1,)
    times = "failed 3 times in a row and did not answer its peers"
    assert scene.replicas[1].fenced == f"{body.name}: {times}: missed by ['r0', 'r2']"
    for replica in scene.replicas:
        replica.outcomes.clear()
    scene.connect(GROUP)
    assert report_of(scene.publish()).version == 1


@pytest.mark.parametrize("said", [((0,), (0,), (0,)), ((1, 2), (3,), ()), ((), (), ())])
def test_a_missing_publisher_names_no_replica_and_nobody_names_itself(
    said: tuple[tuple[int, ...], ...],
) -> None:
    scene = missing(Receive, said)
    for _ in range(5):
        assert attempt(scene, Receive, GROUP).error is not None
        scene.poll()
    assert fenced(scene) == ()


# -- rounds of files, which need no connection ------------------------------------------------------


PART = FilePart(
    directory="/c",
    path="/c/model.safetensors",
    names=("w",),
    dtypes=("F32",),
    shapes=((2,),),
    ranges=((100, 108),),
    digests=("00" * 8,),
)


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


@pytest.mark.parametrize("body", [Receive, Verify])
@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((REJECTED, DONE), errors.RoundAborted, ()),  # the directory is missing on one host
        ((REJECTED, DONE, DONE), errors.RoundAborted, ()),
        ((REJECTED, REJECTED), errors.InvalidRequest, ()),
        ((TRANSFER_FAILED, DONE), errors.RoundAborted, ()),
        ((REPLICA_FAILED, REJECTED, DONE), errors.RoundAborted, (0,)),
    ],
)
def test_what_a_replica_cannot_read_aborts_the_round_and_fences_nobody_for_it(
    body: type[Body], outcomes: tuple[Outcome, ...], error: type[errors.SlipstreamError], who: tuple[int, ...]
) -> None:
    scene = scene_with(body, outcomes)
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
        if error is errors.RoundAborted:
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
    with pytest.raises(errors.Conflict, match="connect before opening a round"):
        scene.open()
