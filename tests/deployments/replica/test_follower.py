"""The follower against a scripted controller and a member that records; no clock is waited for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments.protocol.poll import (
    Body,
    CatchUp,
    Connect,
    Directive,
    Drop,
    Instruction,
    Outcome,
    Receive,
    Report,
    StoredVersion,
    Verify,
)
from deployments.replica.follower import Follower
from tests.deployments.replica.round_instructions import COMMIT
from tests.deployments.replica.scripted_member import Member, Script

RECEIVE = Receive(round_id=1, payload=None)
VERIFY = Verify(round_id=1)
CATCH_UP = CatchUp(stored=StoredVersion(version=3, path="v3", fleet_id="fleet"))
DROP = Drop(round_id=1)


def tell(seq: int, body: Body, deadline_s: float = 5.0) -> Instruction:
    return Instruction(seq=seq, body=body, deadline_s=deadline_s)


async def run(
    script: Script, act: str = "", *, partially_updated: bool = False, interrupt_s: float = 60.0
) -> Member:
    member = Member(act)
    member.partially_updated = partially_updated
    await follow(member, script, interrupt_s=interrupt_s)
    assert member.fenced == "the end"
    return member


async def follow(member: Member, poll: Callable[[Report], Awaitable[Directive]], **options: Any) -> None:
    given = {"heartbeat_s": 0.02, "retry_s": 0.01, **options}
    follower = Follower(replica_id="r", incarnation="i", member=member, poll=poll, **given)
    await asyncio.wait_for(follower.run(), 10)


async def test_instructions_run_in_order_and_once() -> None:
    connect, receive = tell(1, Connect(init_info={})), tell(2, RECEIVE)
    member = await run(Script([connect, receive], [receive], [tell(3, VERIFY)]))
    assert member.ran == ["connect", "receive", "verify"]


async def test_acknowledgement_is_repeated_until_it_arrives() -> None:
    script = Script([tell(1, RECEIVE)], [])
    await run(script)
    assert [len(report.acknowledgements) for report in script.reports] == [0, 1, 0, 0]
    assert script.outcomes == {1: (Outcome.DONE, "")}


@pytest.mark.parametrize(
    ("act", "outcome", "words"),
    [
        ("reject", Outcome.REJECTED, "no such tensor"),
        ("lose a peer", Outcome.TRANSFER_FAILED, "a peer is gone"),
        ("fail", Outcome.REPLICA_FAILED, "RuntimeError: broken"),
    ],
)
async def test_outcome_tells_the_faulty_side(act: str, outcome: Outcome, words: str) -> None:
    script = Script([tell(1, RECEIVE)])
    await run(script, act)
    assert script.outcomes == {1: (outcome, words)}


async def test_deadline_before_the_commit_does_not_fail_the_replica() -> None:
    script = Script([tell(1, RECEIVE, 0.01)], *[[] for _ in range(20)])  # the fence must not overtake it
    await run(script, "hang")
    assert script.outcomes == {1: (Outcome.REJECTED, "receive took longer than 0.01 s")}


@pytest.mark.parametrize(("body", "partially_updated"), [(COMMIT, False), (RECEIVE, True)])
async def test_deadline_while_live_weights_change_fails_the_replica(
    body: Body, partially_updated: bool
) -> None:
    script = Script([tell(1, body, 0.01)], *[[] for _ in range(20)])
    await run(script, "hang", partially_updated=partially_updated)
    assert script.outcomes[1][0] is Outcome.REPLICA_FAILED


@pytest.mark.parametrize("act", ["hang", "wait for ever"])
async def test_drop_interrupts_an_instruction_that_waits_for_a_peer(act: str) -> None:
    """Also one that waits for bytes which do not count any more once the update is dropped."""
    hang, drop = tell(1, RECEIVE, 60.0), tell(2, DROP)
    member = await run(Script([hang], [hang], [hang, drop], [hang, drop]), act)
    assert member.ran == ["receive", "drop"]


async def test_unreachable_controller_is_polled_again() -> None:
    member = await run(Script(ConnectionError("away"), [tell(1, RECEIVE)]))
    assert member.ran == ["receive"]


@pytest.mark.parametrize("body", [RECEIVE, VERIFY, COMMIT])
async def test_fence_takes_effect_while_the_engine_hangs(body: Body) -> None:
    member = await run(Script([tell(1, body, 60.0)]), "engine hangs")
    assert member.ran == [body.name]


async def test_engine_that_ignores_an_interrupt_has_failed() -> None:
    script = Script([tell(1, RECEIVE, 0.01)], *[[] for _ in range(20)])
    await run(script, "engine hangs", interrupt_s=0.01)
    message = "receive took longer than 0.01 s, and its engine does not answer"
    assert script.outcomes == {1: (Outcome.REPLICA_FAILED, message)}


async def test_an_engine_that_answers_an_interrupt_with_an_error_has_not_failed() -> None:
    script = Script([tell(1, RECEIVE, 0.01)], *[[] for _ in range(20)])
    await run(script, "cannot be interrupted")
    message = "receive took longer than 0.01 s, and was not interrupted: the staging cannot be dropped"
    assert script.outcomes == {1: (Outcome.REJECTED, message)}


async def test_drop_overtakes_an_instruction_that_cannot_be_interrupted() -> None:
    hang, drop = tell(1, Connect(init_info={}), 60.0), tell(2, DROP)
    member = await run(Script([hang], [hang, drop], [hang, drop]), "engine hangs", interrupt_s=0.01)
    assert member.ran == ["connect", "drop"]


@pytest.mark.parametrize(
    ("body", "is_interrupted"),
    [(CATCH_UP, False), (COMMIT, False), (VERIFY, True), (Connect(init_info={}), True)],
)
async def test_uninterruptible_instruction_continues_with_heartbeats(
    body: Body, is_interrupted: bool
) -> None:
    """A checkpoint may take minutes: half of it, or a replica that is silent meanwhile, would be lost."""
    member, heard = Member("takes long"), 0
    long, drop = tell(1, body, 60.0), tell(2, DROP)
    script = Script([long], [long, drop], *[[long, drop] for _ in range(4)], [drop], [drop])

    async def poll(report: Report) -> Directive:
        nonlocal heard
        heard += 1
        if heard == 5:
            assert member.ran == [body.name]
            member.may_end.set()
        return await script(report)

    await follow(member, poll)
    assert member.ran == [body.name, "drop"]
    assert member.interrupted.is_set() == is_interrupted
    assert script.outcomes == {1: (Outcome.DONE, ""), 2: (Outcome.DONE, "")}


async def test_fence_is_confirmed_until_the_controller_has_received_it() -> None:
    script = Script([])
    lost = 2

    async def poll(report: Report) -> Directive:
        nonlocal lost
        directive = await script(report)
        if report.fenced and lost:
            lost -= 1
            raise ConnectionError("away")
        return directive

    member = Member("engine hangs")
    await follow(member, poll)
    assert [report.fenced for report in script.reports] == [False, False, True, True, True]


async def test_last_contact_is_when_the_report_was_sent() -> None:
    """The controller counts from its arrival, and takes a replica for lost that it has not heard since."""
    now = 100.0

    async def poll(report: Report) -> Directive:
        nonlocal now
        now += 15.0  # a slow answer
        return Directive(admitted=False, fenced="the end")

    contacts: list[float] = []

    class Listening(Member):
        def on_directive(self, directive: Directive) -> None:
            contacts.append(follower.last_contact)

    follower = Follower(
        replica_id="r", incarnation="i", member=Listening(), poll=poll, retry_s=0.01, clock=lambda: now
    )
    await asyncio.wait_for(follower.run(), 10)
    assert contacts == [100.0]


@pytest.mark.parametrize(("body", "partially_updated"), [(COMMIT, False), (RECEIVE, True)])
async def test_replica_with_mixed_weights_takes_no_request_before_its_fence(
    body: Body, partially_updated: bool
) -> None:
    """The controller's next answers may be from before it heard of the failure."""
    admitted: list[bool] = []

    class Watched(Member):
        def on_directive(self, directive: Directive) -> None:
            admitted.append(directive.admitted)

    member = Watched("fail")
    member.partially_updated = partially_updated
    script = Script([], [tell(1, body)], [], [])
    await follow(member, script)
    assert admitted == [True, True, False, False, False, False]
    said = [report.failed for report in script.reports]
    assert said[:2] == ["", ""] and all(body.name in words for words in said[2:]), "until a fence has come"


DEADLY = "its engine has died"


def controller_of(member: Member, reports: list[Report], *turns: list[Instruction]) -> Callable[..., Any]:
    """One that lets a poll wait for ever which brings no news, and fences a replica that has failed."""
    told = list(turns)

    async def poll(report: Report) -> Directive:
        reports.append(report)
        if report.failed:
            return Directive(admitted=True, fenced=report.failed)
        asyncio.get_running_loop().call_later(0.02, member.dead.set)
        if not told:
            await asyncio.Event().wait()
        return Directive(admitted=True, instructions=told.pop(0))

    return poll


@pytest.mark.parametrize("busy", [False, True])
async def test_engine_death_is_reported_at_once(busy: bool) -> None:
    """Whatever is waited for: the controller's answer, or an instruction that never ends."""
    member, reports = Member("engine hangs"), list[Report]()
    turns = [[tell(1, RECEIVE, 60.0)]] if busy else []
    await follow(member, controller_of(member, reports, *turns), heartbeat_s=60.0, retry_s=60.0)
    assert [(report.failed, report.fenced) for report in reports] == [
        ("", False),
        (DEADLY, False),
        (DEADLY, True),
    ]
    assert member.fenced == DEADLY and not member.admitted


async def test_unreported_engine_death_refuses_requests_and_is_reported_again() -> None:
    member, tries = Member(), 0

    async def poll(report: Report) -> Directive:
        nonlocal tries
        if not report.failed:
            member.dead.set()
            return Directive(admitted=True)
        assert not member.admitted
        tries += 1
        if tries < 4:
            raise ConnectionError("away")
        return Directive(admitted=False, fenced=report.failed)

    begin = asyncio.get_running_loop().time()
    await follow(member, poll, retry_s=0.05)
    assert asyncio.get_running_loop().time() - begin >= 0.15, "each time after a pause"
    assert member.fenced == DEADLY
