"""The ledger of rollouts, rule by rule."""

import math
from typing import Any

import pytest

from deployments.protocol import errors
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
        ledger.reward(each, "", 1.0, 0)
    return ledger


def taken(ledger: RolloutLedger, step: str, count: int = 1, now: float = 0, **options: Any) -> list[str]:
    """The groups that a step gets."""
    given = {"run": "", "max_staleness": None, "current": {}} | options
    step_taken, _ = ledger.take(step, count=count, now=now, **given)
    return [] if step_taken is None else list(step_taken.groups)


def test_a_rollout_is_consumed_by_one_step_which_gets_it_again() -> None:
    ledger = played("a", "b")
    assert taken(ledger, "step 1") == ["~a"] and ledger.state("a") is State.CONSUMED
    assert taken(ledger, "step 2") == ["~b"]
    again, _ = ledger.take("step 1", "", 5, None, {}, 5)
    assert again is not None and again.groups == ("~a",)
    assert taken(ledger, "step 3") == []
    assert ledger.counts(5)[1] == {"consumed": 2}
    with pytest.raises(errors.Conflict, match="step 'step 1' is of the run '', got 'r'"):
        taken(ledger, "step 1", run="r")
    with pytest.raises(errors.Conflict, match="'a' is consumed, and cannot be discarded"):
        ledger.discard("a", "", 5)


def test_a_step_gets_as_many_groups_as_it_asks_for_or_none() -> None:
    ledger = played("a")
    assert taken(ledger, "step", 2) == [] and ledger.state("a") is State.REWARDED
    played("b", ledger=ledger)
    assert taken(ledger, "step", 2) == ["~a", "~b"]


def test_what_a_step_consumed_and_is_no_longer_kept_is_not_replaced_by_others() -> None:
    ledger = played("a")
    taken(ledger, "step")
    for number in range(LIMITS.max_rollouts):
        ledger.open(request(f"b{number}"), 0)
    with pytest.raises(errors.NotFound, match="'a' is unknown"):
        ledger.state("a")
    with pytest.raises(
        errors.Conflict, match="step 'step' has consumed its groups, and they are no longer kept"
    ):
        taken(ledger, "step")


def test_a_group_is_taken_whole_when_its_members_are_rewarded_or_discarded() -> None:
    ledger = played("a", "b", group="g", size=3)
    assert taken(ledger, "step") == []
    ledger.open(request("c", group="g"), 0)
    ledger.discard("c", "", 0)
    ledger.discard("c", "", 0)
    assert taken(ledger, "step") == ["g"] and [each.key for each in ledger.rewarded("g")] == ["a", "b"]
    ledger.discard("c", "", 0)
    with pytest.raises(errors.Conflict, match="closed: expected another group"):
        ledger.open(request("d", group="g"), 0)


def test_a_group_that_never_completes_closes_at_its_deadline() -> None:
    ledger, due = played("a", group="g", size=3), LIMITS.keep_s
    ledger.open(request("b", group="g"), 0)
    ledger.open(request("c"), 0)
    assert taken(ledger, "step", now=due - 1) == []
    assert taken(ledger, "step", now=due) == ["g"] and ledger.state("b") is State.DISCARDED
    with pytest.raises(errors.Conflict, match="'b' is discarded"):
        ledger.reward("b", "", 1.0, due)
    assert ledger.counts(due)[1] == {"consumed": 1, "unrewarded": 1}


def test_a_job_settles_its_groups_and_each_of_its_numbers_has_one_end() -> None:
    ledger = RolloutLedger(LIMITS)
    for number, count in ((0, 2), (2, 2), (1, 2)):  # the last one was sent before
        ledger.begin("r", number, count, 0)
    for name in ("a", "b"):
        ledger.open(request(name, group="r.0"), 0)
        ledger.append(name, "", new_turn())
    ledger.saved()
    with pytest.raises(errors.NotFound, match=r"group 'r\.0' has no rollout 'c'"):
        ledger.settle("r.0", {"a": 1.0, "c": 1.0}, "", 0)
    ledger.undo()
    ledger.reward("a", "", 1.0, 0)  # by an agent, which the job does not ask
    for number, rewards in ((0, {"b": 0.5}), (2, {})):
        for _ in range(2):
            ledger.settle(f"r.{number}", rewards, "unanswered", 0)
    assert ledger.state("a") is State.DISCARDED and ledger.state("b") is State.REWARDED
    with pytest.raises(errors.Conflict, match=r"group 'r\.0' is rewarded, with other members"):
        ledger.settle("r.0", {"a": 1.0}, "", 0)
    run, opened, ready = ledger.position("r", 0)
    assert (run.next, opened, ready, run.ends) == (4, ["r.1", "r.3"], 1, {"unanswered": 1})
    assert taken(ledger, "step") == [] and taken(ledger, "step", run="r") == ["r.0"]
    assert ledger.position("r", 0)[0].ends == {"unanswered": 1, "consumed": 1}
    with pytest.raises(errors.NotFound, match=r"group 'r\.9' is unknown"):
        ledger.settle("r.9", {}, "", 0)
    ledger.open(request("d", group="r.4"), 0)
    with pytest.raises(errors.Conflict, match=r"'r\.4' was begun by a request"):
        ledger.begin("r", 4, 1, 0)


def test_a_job_that_is_away_finds_what_it_has_not_finished() -> None:
    """What was taken, and perhaps not learned from, is not finished before the next step."""
    ledger = RolloutLedger(LIMITS)
    for number in range(4):
        ledger.begin("r", number, 1, 0)
    for number in range(3):
        ledger.open(request(f"a{number}", group=f"r.{number}"), 0)
        ledger.append(f"a{number}", "", new_turn())
        ledger.settle(f"r.{number}", {f"a{number}": 1.0}, "", 0)
    assert taken(ledger, "r/1", run="r") == ["r.0"] and taken(ledger, "r/2", run="r") == ["r.1"]
    later = rollout_ledger.RUN_KEPT_S - 1
    assert taken(ledger, "r/2", run="r", now=later) == ["r.1"]
    with pytest.raises(errors.NotFound):
        ledger.state("a0")
    assert taken(ledger, "r/3", run="r", now=later) == ["r.2"]
    run, opened, ready = ledger.position("r", later + 2)
    assert (opened, ready, run.ends) == ([], 0, {"consumed": 3, "unrewarded": 1})


def test_what_belongs_to_another_user_is_refused() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a", owner="ann", group="g", size=2), 0)
    ledger.append("a", "ann", new_turn())
    for call in (
        lambda: ledger.open(request("a", owner="bob", group="g"), 0),
        lambda: ledger.open(request("b", owner="bob", group="g"), 0),
        lambda: ledger.append("a", "bob", new_turn()),
        lambda: ledger.reward("a", "bob", 1.0, 0),
        lambda: ledger.discard("a", "bob", 0),
    ):
        with pytest.raises(errors.Conflict, match="begun with another token"):
            call()
    ledger.reward("a", "", 1.0, 0)  # the operator


def test_a_rollout_keeps_its_group_and_a_group_its_size() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a", group="g", size=1), 0)
    with pytest.raises(errors.Conflict, match="of the group 'g', not 'h'"):
        ledger.open(request("a", group="h"), 0)
    with pytest.raises(errors.Conflict, match="begun with size 1, got 2"):
        ledger.open(request("b", group="g", size=2), 0)
    with pytest.raises(errors.Conflict, match="has all of its 1 rollouts"):
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
    with pytest.raises(errors.InvalidRequest, match=says):
        ledger.reward("a", "", reward, 0)
    ledger.reward("a", "", (1.0, (1.0, 2.0, 3.0)), 0)


def test_a_reward_comes_once_and_may_be_repeated() -> None:
    ledger = RolloutLedger(LIMITS)
    with pytest.raises(errors.NotFound, match="rollout 'a' is unknown"):
        ledger.reward("a", "", 1.0, 0)
    ledger.open(request("a"), 0)
    with pytest.raises(errors.Conflict, match="has no turn to reward"):
        ledger.reward("a", "", 1.0, 0)
    ledger.append("a", "", new_turn())
    for _ in range(2):
        ledger.reward("a", "", 1.0, 0)
    with pytest.raises(errors.Conflict, match="'a' is rewarded: expected an open one"):
        ledger.reward("a", "", 2.0, 0)
    with pytest.raises(errors.Conflict, match="'a' is rewarded"):
        ledger.append("a", "", new_turn("later"))
    with pytest.raises(errors.Conflict, match="'a' is rewarded"):
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
    assert ledger.append("a", "", new_turn(attempt=2, sampled="seen")) is None, "it is sent again"


def test_no_client_gets_another_answer_than_the_one_that_is_kept() -> None:
    """Of two routers one has a clock that is behind: the client would reward another answer."""
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a"), 0)
    ledger.append("a", "", new_turn(attempt=2, sampled="seen"))
    with pytest.raises(errors.Conflict, match="kept one began later"):
        ledger.append("a", "", new_turn(attempt=1, sampled="late"))
    ledger.append("a", "", new_turn("next", prompt="pseen.", sampled="s"))
    with pytest.raises(errors.Conflict, match="has a next turn"):
        ledger.append("a", "", new_turn(attempt=3, sampled="?"))
    assert ledger.append("a", "", new_turn(attempt=2, sampled="seen")) is None, "it is sent again"


def test_groups_that_are_too_stale_are_discarded_and_counted() -> None:
    ledger = RolloutLedger(LIMITS)
    turns = (("a", "", 3), ("b", "", 5), ("c", "math", 1), ("d", "gone", 9), ("e", "math", 7))
    for name, policy, version in turns:
        ledger.open(request(name), 0)
        ledger.append(name, "", new_turn(policy=policy, version=version))
        ledger.reward(name, "", 1.0, 0)
    assert taken(ledger, "step", 3, max_staleness=1, current={"": 6, "math": 2}) == []
    assert ledger.counts(0)[1] == {"stale": 3}, "the other 'math' was unloaded"
    assert taken(ledger, "step", 2, max_staleness=0, current={"": 5, "math": 1}) == ["~b", "~c"]


def test_a_settled_group_that_was_too_stale_since_is_settled_again() -> None:
    """The answer of the first call was lost."""
    ledger = RolloutLedger(LIMITS)
    ledger.begin("r", 0, 1, 0)
    ledger.open(request("a", group="r.0"), 0)
    ledger.append("a", "", new_turn(version=3))
    ledger.settle("r.0", {"a": 1.0}, "", 0)
    assert taken(ledger, "step", run="r", max_staleness=0, current={"": 9}) == []
    ledger.settle("r.0", {"a": 1.0}, "", 0)
    assert ledger.position("r", 0)[0].ends == {"stale": 1}


def test_bounds() -> None:
    ledger = RolloutLedger(LIMITS)
    for number in range(LIMITS.max_rollouts):
        ledger.open(request(f"a{number}"), 0)
    with pytest.raises(errors.FleetUnavailable, match="6 rollouts are kept"):
        ledger.open(request("b"), 0)
    with pytest.raises(errors.PayloadTooLarge, match="at most 1048576 tokens"):
        ledger.append("a0", "", new_turn(prompt="p" * (1 << 20)))


def test_one_users_rollouts_leave_room_for_those_of_others() -> None:
    ledger = RolloutLedger(LIMITS.model_copy(update={"max_rollouts": 12, "max_gib": 0.02}))

    def play(name: str, owner: str) -> None:
        ledger.open(request(name, owner=owner), 0)
        ledger.append(name, owner, new_turn())

    for name in ("a", "b", "c"):
        play(name, "ann")
    says = "expected at most 3 that are open or wait for a trainer, and 5368709 bytes, got 4 and 12528:"
    for _ in range(2):
        with pytest.raises(errors.OverQuota, match=says):
            play("d", "ann")
    play("b1", "bob")
    play("o", "")
    ledger.discard("a", "ann", 0)
    play("d", "ann")
    ledger.reward("b", "ann", 1.0, 0)
    with pytest.raises(errors.OverQuota):
        play("e", "ann")
    assert taken(ledger, "step") == ["~b"]
    play("e", "ann")
    ledger.append("e", "ann", new_turn("more"))


def test_a_user_whose_rollouts_are_too_large_gets_no_more_turns_until_some_are_discarded() -> None:
    ledger = RolloutLedger(LIMITS)
    for name in ("a", "b"):
        ledger.open(request(name, owner="ann"), 0)
    ledger.append("a", "ann", new_turn(prompt="p" * 90_000))
    for name in ("b", "c"):
        with pytest.raises(errors.OverQuota, match=r"and 2684354 bytes, got \d and 36"):
            ledger.open(request(name, owner="ann"), 0)
    ledger.open(request("d", owner="bob"), 0)
    ledger.discard("a", "ann", 0)
    for name in ("b", "c"):
        ledger.open(request(name, owner="ann"), 0)


def test_what_is_discarded_takes_nothing_from_a_step_that_may_ask_again() -> None:
    ledger = played("a")
    taken(ledger, "step")
    for number in range(2 * LIMITS.max_rollouts):
        ledger.open(request(f"b{number}"), 0)
        ledger.discard(f"b{number}", "", 0)
    assert taken(ledger, "step") == ["~a"] and [each.key for each in ledger.rewarded("~a")] == ["a"]


def test_runs_that_were_given_up_take_no_room_from_others() -> None:
    ledger = RolloutLedger(LIMITS)
    for number in range(LIMITS.max_rollouts):
        ledger.begin(f"r{number}", 0, 1, 0)
        ledger.open(request(f"a{number}", group=f"r{number}.0"), 0)
    ledger.append("a0", "", new_turn())
    ledger.settle("r0.0", {"a0": 1.0}, "", 0)
    with pytest.raises(errors.FleetUnavailable, match="6 rollouts are kept"):
        ledger.open(request("b"), LIMITS.keep_s)
    for name in ("b", "c"):
        ledger.open(request(name), LIMITS.keep_s + 1)
    assert [ledger.position(f"r{number}", LIMITS.keep_s + 1)[0].ends for number in range(3)] == [
        {"expired": 1},
        {"expired": 1},
        {},
    ]


def test_what_ended_is_removed_after_a_while_and_so_is_what_nobody_takes() -> None:
    ledger = played("a", "b")
    ledger.open(request("c"), 1)
    taken(ledger, "step")
    states, ends = ledger.counts(LIMITS.keep_s)
    assert states["discarded"] == 1 and ends == {"consumed": 1, "expired": 1}
    with pytest.raises(errors.NotFound):
        ledger.state("a")
    states, _ = ledger.counts(2 * LIMITS.keep_s + 1)
    assert set(states.values()) == {0}


def test_a_group_that_was_closed_shortly_before_its_deadline_waits_for_a_trainer() -> None:
    ledger = RolloutLedger(LIMITS)
    ledger.open(request("a"), 0)
    ledger.append("a", "", new_turn())
    ledger.reward("a", "", 1.0, LIMITS.keep_s - 1)
    ledger.tick(LIMITS.keep_s)
    assert taken(ledger, "step", now=LIMITS.keep_s) == ["~a"]


def test_a_call_can_be_undone() -> None:
    ledger = played("a")
    ledger.saved()
    taken(ledger, "step")
    ledger.undo()
    assert ledger.state("a") is State.REWARDED and ledger.changes() == {}
    assert taken(ledger, "other") == ["~a"] and taken(ledger, "step") == []
