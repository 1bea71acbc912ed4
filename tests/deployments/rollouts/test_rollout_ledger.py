"""The ledger of rollouts, rule by rule."""

import math
from typing import Any

import pytest

from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound, PayloadTooLarge
from deployments.rollouts import rollout_ledger
from deployments.rollouts.rollout_ledger import NewTurn, RolloutLedger, State
from tests.deployments.rollouts.turns import LIMITS, request


def new_turn(
    key: str = "k",
    *,
    prompt: str = "p",
    sampled: str = "s",
    attempt: int = 0,
    policy: str = "",
    version: int = 3,
) -> NewTurn:
    """A letter is a token."""
    return NewTurn(
        request=key,
        attempt=attempt,
        prompt=len(prompt),
        sampled=len(sampled),
        policy=policy,
        version=version,
        digest=lambda length: (prompt + sampled)[:length],
    )


def played(*rollouts: str, ledger: RolloutLedger | None = None, **options: Any) -> RolloutLedger:
    """Each rollout has one turn, and a reward."""
    ledger = ledger or RolloutLedger(LIMITS)
    for each in rollouts:
        ledger.open(request(each, **options), 0)
        ledger.append(each, "", new_turn())
        ledger.reward(each, "", 1.0, None, 0)
    return ledger


def test_a_rollout_is_consumed_once() -> None:
    ledger = played("a")
    lease, _ = ledger.lease("l", 5, None, {}, 0)
    assert lease is not None and lease.groups == ("~a",) and ledger.state("a") is State.LEASED
    assert ledger.lease("m", 5, None, {}, 0) == (None, 0)
    assert ledger.consume("l", "step 1", 0) == ["a"] and ledger.state("a") is State.CONSUMED
    assert ledger.consume("l", "step 1", 5) == ["a"], "the answer was lost, and the call is repeated"
    assert ledger.counts(5)[1] == {"consumed": 1}
    with pytest.raises(Conflict, match="consumed by step 'step 1', got 'step 2'"):
        ledger.consume("l", "step 2", 5)
    assert ledger.lease("n", 5, None, {}, 5) == (None, 0)


def test_a_step_consumes_one_lease() -> None:
    ledger = played("a", "b")
    for name in ("l", "m"):
        ledger.lease(name, 1, None, {}, 0)
    ledger.consume("l", "step 1", 0)
    with pytest.raises(Conflict, match="step 'step 1' consumed lease 'l', and cannot consume 'm'"):
        ledger.consume("m", "step 1", 0)


def test_a_lease_that_expires_gives_its_groups_back() -> None:
    ledger = played("a")
    ledger.lease("l", 1, None, {}, 0)
    assert ledger.lease("m", 1, None, {}, LIMITS.lease_s - 1) == (None, 0)
    again, _ = ledger.lease("m", 1, None, {}, LIMITS.lease_s)
    assert again is not None and again.groups == ("~a",)
    with pytest.raises(NotFound, match="lease 'l' is unknown or expired"):
        ledger.consume("l", "late", LIMITS.lease_s)
    assert ledger.consume("m", "in time", LIMITS.lease_s) == ["a"]


def test_a_group_is_leased_whole_when_its_members_are_rewarded_or_discarded() -> None:
    ledger = played("a", "b", group="g", size=3)
    assert ledger.lease("l", 1, None, {}, 0) == (None, 0)
    ledger.open(request("c", group="g"), 0)
    ledger.discard("c", "", 0)
    ledger.discard("c", "", 0)
    lease, _ = ledger.lease("l", 1, None, {}, 0)
    assert lease is not None and [each.key for each in ledger.rewarded("g")] == ["a", "b"]
    with pytest.raises(Conflict, match="closed: expected another group"):
        ledger.open(request("d", group="g"), 0)


def test_a_group_that_never_completes_closes_at_its_deadline() -> None:
    ledger = played("a", group="g", size=3, timeout_s=20)
    ledger.open(request("b", group="g"), 0)
    assert ledger.lease("l", 1, None, {}, 19) == (None, 0)
    lease, _ = ledger.lease("l", 1, None, {}, 20)
    assert lease is not None and ledger.state("b") is State.CLOSED
    with pytest.raises(Conflict, match="'b' is closed"):
        ledger.reward("b", "", 1.0, None, 20)
    assert ledger.counts(20)[1] == {"unrewarded": 1}


def test_what_belongs_to_another_user_is_refused() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a", owner="ann", group="g", size=2), 0)
    ledger.append("a", "ann", new_turn())
    for call in (
        lambda: ledger.open(request("a", owner="bob", group="g"), 0),
        lambda: ledger.open(request("b", owner="bob", group="g"), 0),
        lambda: ledger.append("a", "bob", new_turn()),
        lambda: ledger.reward("a", "bob", 1.0, None, 0),
        lambda: ledger.discard("a", "bob", 0),
    ):
        with pytest.raises(Conflict, match="begun with another token"):
            call()
    ledger.reward("a", "", 1.0, None, 0)  # the operator


def test_a_rollout_keeps_its_group_and_a_group_its_size() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a", group="g", size=1), 0)
    with pytest.raises(Conflict, match="of the group 'g', not 'h'"):
        ledger.open(request("a", group="h"), 0)
    with pytest.raises(Conflict, match="begun with size 1, got 2"):
        ledger.open(request("b", group="g", size=2), 0)
    with pytest.raises(Conflict, match="has all of its 1 rollouts"):
        ledger.open(request("b", group="g"), 0)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (math.nan, "expected finite numbers, got nan"),
        ((1.0, -math.inf), "expected finite numbers, got -inf"),
        ((1.0,), "one for each of 2 turns, got 1"),
        ((1.0, (1.0, 2.0)), "one for each of the 3 tokens of turn 1, got 2"),
        ((1.0, (1.0, 2.0, math.nan)), "expected finite numbers, got nan"),
    ],
)
def test_a_wrong_reward_is_refused(reward: Any, says: str) -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a"), 0)
    ledger.append("a", "", new_turn("k"))
    ledger.append("a", "", new_turn("l", sampled="stu"))
    with pytest.raises(InvalidRequest, match=says):
        ledger.reward("a", "", reward, None, 0)
    ledger.reward("a", "", (1.0, (1.0, 2.0, 3.0)), None, 0)


def test_a_reward_comes_once_or_with_its_key() -> None:
    ledger = RolloutLedger(LIMITS)
    with pytest.raises(NotFound, match="rollout 'a' is unknown"):
        ledger.reward("a", "", 1.0, None, 0)
    ledger.open(request("a"), 0)
    with pytest.raises(Conflict, match="has no turn to reward"):
        ledger.reward("a", "", 1.0, None, 0)
    ledger.append("a", "", new_turn())
    ledger.reward("a", "", 1.0, "key", 0)
    ledger.reward("a", "", 1.0, "key", 0)
    with pytest.raises(Conflict, match="came with another reward before"):
        ledger.reward("a", "", 2.0, "key", 0)
    for key in (None, "other"):
        with pytest.raises(Conflict, match="'a' is rewarded: expected an open one"):
            ledger.reward("a", "", 1.0, key, 0)
    with pytest.raises(Conflict, match="'a' is rewarded"):
        ledger.append("a", "", new_turn("later"))
    with pytest.raises(Conflict, match="'a' is rewarded"):
        ledger.open(request("a"), 0)


def test_a_turn_continues_the_longest_prefix() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a"), 0)
    turns = [
        ("k", "ab", "c"),
        ("l", "abcd", "e"),
        ("m", "abcdef", "g"),
        ("n", "abX", "c"),
        ("o", "abcX", "y"),
    ]
    added = [ledger.append("a", "", new_turn(k, prompt=p, sampled=s)) for k, p, s in turns]
    assert [turn.parent for _, turn in filter(None, added)] == [-1, 0, 1, -1, 0]
    assert [turn.stored for _, turn in filter(None, added)] == [3, 2, 2, 4, 2]


def test_the_answer_of_the_last_attempt_is_kept() -> None:
    """A replica may be lost after it has stored its answer and before the client has got it."""
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a"), 0)
    ledger.append("a", "", new_turn(attempt=1, sampled="lost"))
    number, turn = ledger.append("a", "", new_turn(attempt=2, sampled="seen")) or (None, None)
    assert number == 0 and turn is not None and turn.digest == "pseen"
    assert ledger.append("a", "", new_turn(attempt=1, sampled="lost")) is None, "it arrives late"
    assert ledger.append("a", "", new_turn(attempt=2, sampled="seen")) is None, "it is sent again"
    ledger.append("a", "", new_turn("next", prompt="pseen.", sampled="s"))
    assert ledger.append("a", "", new_turn(attempt=3, sampled="?")) is None, "the client went on"


def test_staler_groups_are_left_and_counted() -> None:
    ledger = RolloutLedger(LIMITS)
    turns = (("a", "", 3), ("b", "", 5), ("c", "math", 1), ("d", "gone", 9), ("e", "math", 7))
    for name, policy, version in turns:
        ledger.open(request(name), 0)
        ledger.append(name, "", new_turn(policy=policy, version=version))
        ledger.reward(name, "", 1.0, None, 0)
    lease, stale = ledger.lease("l", 9, 1, {"": 6, "math": 2}, 0)
    assert lease is not None and lease.groups == ("~b", "~c") and stale == 3, "the other 'math' was unloaded"
    rest, stale = ledger.lease("m", 9, None, {"": 6}, 0)
    assert rest is not None and rest.groups == ("~a", "~d", "~e") and stale == 0


def test_a_lease_ends_where_it_has_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_ledger, "MAX_LEASED", 3)
    ledger = played("a", "b", "c")
    lease, _ = ledger.lease("l", 9, None, {}, 0)
    assert lease is not None and lease.groups == ("~a", "~b"), "each has two tokens"


def test_bounds() -> None:
    ledger = RolloutLedger(LIMITS)
    for number in range(LIMITS.max_rollouts):
        ledger.open(request(f"a{number}"), 0)
    with pytest.raises(FleetUnavailable, match="6 rollouts are kept"):
        ledger.open(request("b"), 0)
    with pytest.raises(PayloadTooLarge, match="at most 100 tokens"):
        ledger.append("a0", "", new_turn(prompt="p" * 100))


def test_what_ended_is_removed_after_a_while_and_so_is_what_nobody_takes() -> None:
    ledger = played("a", "b")
    ledger.open(request("c"), 0)
    ledger.lease("l", 1, None, {}, 0)
    ledger.consume("l", "step", 0)
    states, ends = ledger.counts(LIMITS.keep_s)
    assert states["discarded"] == 1 and ends == {"consumed": 1, "expired": 1}
    with pytest.raises(NotFound):
        ledger.state("a")
    states, _ = ledger.counts(LIMITS.group_timeout_s + LIMITS.keep_s)
    assert set(states.values()) == {0}


def test_a_call_can_be_undone() -> None:
    ledger = played("a")
    ledger.saved()
    ledger.lease("l", 1, None, {}, 0)
    ledger.undo()
    assert ledger.state("a") is State.REWARDED and ledger.changes() == {}
    with pytest.raises(NotFound):
        ledger.consume("l", "step", 0)
