"""Rollouts on disk: what a restart finds, and what a full disk refuses."""

import json
import math
import sqlite3
from array import array
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, JournalError, NotFound
from deployments.rollouts.rollout_ledger import TURN_BYTES
from deployments.rollouts.store import NAME, RolloutStore
from tests.clock import Clock
from tests.deployments.rollouts.turns import LIMITS, captured, request
from tests.full_disk import full_disk, longest_in
from trainers.trajectory import parse_trajectories

FLEET = "f" * 32


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[RolloutStore]:
    made = RolloutStore(tmp_path, LIMITS, FLEET, clock=clock)
    yield made
    made.close()


def again(store: RolloutStore, directory: Path, clock: Clock) -> RolloutStore:
    """The next process."""
    store.close()
    return RolloutStore(directory, LIMITS, FLEET, clock=clock)


def taken(store: RolloutStore, step: str = "step", count: int = 1, run: str = "", offset: int = 0) -> Any:
    return json.loads(store.take(step, run, count, None, offset, {}))


def played(store: RolloutStore, *rollouts: str) -> None:
    for each in rollouts:
        store.open(request(each))
        store.append("", [(each, captured("k/0", [1, 2], [3, 4]))])
        store.append("", [(each, captured("l/0", [1, 2, 3, 4, 5], [6], version=4))])
        store.reward(each, "", 0.5)


def test_a_trainer_gets_the_tokens_that_were_captured(store: RolloutStore) -> None:
    played(store, "a")
    found = taken(store)
    assert (found["step"], found["stale_groups"]) == ("step", 0)
    ((rollout,),) = ([*group["rollouts"]] for group in found["groups"])
    (sequence,) = rollout["sequences"]
    assert (rollout["id"], rollout["reward"]) == ("a", 0.5)
    assert sequence["prompt_token_ids"] == [1, 2] and sequence["token_ids"] == [3, 4, 5, 6]
    assert sequence["logprobs"] == [-3.0, -4.0, 0.0, -6.0]
    assert [span["version"] for span in sequence["weight_versions"]] == [3, 4]
    assert sequence["turns"][0]["sampling"] == {"temperature": 1.0}


def test_a_restart_finds_everything(store: RolloutStore, tmp_path: Path, clock: Clock) -> None:
    played(store, "b", "a", "c")
    store.open(request("open", owner="ann", group="g", size=2))
    store.begin("r", 0, 1)
    store.open(request("d", group="r.0"))
    store.append("", [("d", captured("k/0", [1], [2]))])
    store.settle([("r.0", {"d": (1.0, "said")}, "")])
    first = taken(store)
    assert first["groups"][0]["group"] == "~b", "the oldest one"
    store = again(store, tmp_path, clock)
    assert taken(store) == first, "the call is repeated"
    with pytest.raises(Conflict, match="begun with another token"):
        store.open(request("open", owner="bob"))
    store = again(store, tmp_path, clock)
    assert [each["group"] for each in taken(store, "next", 2)["groups"]] == ["~a", "~c"]
    assert store.counts()[1] == {"consumed": 3}
    assert store.position("r")[0].next == 1
    (group,) = taken(store, "of r", run="r")["groups"]
    assert [(each["id"], each["info"]) for each in group["rollouts"]] == [("d", "said")]
    store.close()


def test_tokens_are_removed_with_their_rollout(store: RolloutStore, tmp_path: Path, clock: Clock) -> None:
    played(store, "a")
    store.discard("a", "")
    clock.now += LIMITS.keep_s
    assert set(store.counts()[0].values()) == {0}
    store = again(store, tmp_path, clock)
    store.open(request("a"))
    store.append("", [("a", captured("k/0", [8], [9]))])
    store.reward("a", "", 1.0)
    (group,) = taken(store)["groups"]
    assert [each["token_ids"] for each in group["rollouts"][0]["sequences"]] == [[9]]
    store.close()


def test_a_turn_of_a_later_attempt_replaces_the_tokens(store: RolloutStore) -> None:
    store.open(request("a"))
    store.append("", [("a", captured("k/0", [1], [2, 2], attempt=1))])
    store.append("", [("a", captured("k/0", [1], [3], attempt=2))])
    with pytest.raises(Conflict):
        store.append("", [("a", captured("k/0", [1], [2, 2], attempt=1))])
    store.reward("a", "", 1.0)
    (group,) = taken(store)["groups"]
    assert [each["token_ids"] for each in group["rollouts"][0]["sequences"]] == [[3]]


def test_a_full_disk_refuses_the_call_and_nothing_of_it_stays(store: RolloutStore, tmp_path: Path) -> None:
    store.open(request("a"))
    turns = 0
    with (
        full_disk(longest_in(tmp_path) + (1 << 16)),
        pytest.raises(FleetUnavailable, match="'x-rollout-id' are served"),
    ):
        while True:
            store.append("", [("a", captured(f"{turns}/0", [turns], [1]))])
            turns += 1
    store.reward("a", "", (1.0,) * turns)
    (group,) = taken(store)["groups"]
    assert len(group["rollouts"][0]["sequences"]) == turns


def test_a_full_file_is_emptied_by_its_trainer_and_with_time(tmp_path: Path, clock: Clock) -> None:
    limits = LIMITS.model_copy(update={"max_gib": 1 / 1024, "max_rollouts": 9999})
    with closing(RolloutStore(tmp_path, limits, FLEET, clock=clock)) as small:

        def fill() -> list[str]:
            names: list[str] = []
            with pytest.raises(FleetUnavailable, match="cannot be recorded"):
                while True:
                    name = f"{clock.now:g}-{len(names)}"
                    small.open(request(name))
                    small.append("", [(name, captured("k/0", range(3000), [1]))])
                    names.append(name)
            return names

        kept = fill()
        for each in kept:
            small.reward(each, "", 1.0)
        groups = taken(small, "step" * 30, len(kept))["groups"]
        assert [each["id"] for group in groups for each in group["rollouts"]] == kept
        clock.now += 2 * limits.keep_s
        assert len(fill()) >= len(kept)


def test_a_users_rollouts_take_no_more_of_the_disk_than_is_counted(store: RolloutStore) -> None:
    """With the longest names, of one token and of many, and a reward for each token."""

    def size() -> int:
        return int(
            math.prod(store._db.execute(f"PRAGMA page_{each}").fetchone()[0] for each in ("count", "size"))
        )

    for turns, tokens in ((60, 1), (1, 50_000)):
        store._ledger._limits = LIMITS.model_copy(update={"max_gib": 36})
        before, owner, name = size(), f"{turns:0>32}", f"{turns:->128}"
        store.open(request(name, owner=owner, group=name))
        for turn in range(turns):
            store.append(owner, [(name, captured(f"{turn:->128}/0", [turn], range(tokens), version=1 << 40))])
        store.reward(name, owner, ((-1.2345678901234567e-300,) * tokens,) * turns)
        assert size() - before <= store._ledger._bytes[owner]
    store.discard(name, owner)
    assert store._ledger._bytes[owner] == TURN_BYTES


def test_a_restart_writes_nothing_to_a_full_disk(tmp_path: Path, store: RolloutStore, clock: Clock) -> None:
    played(store, "a")
    with full_disk():
        store = again(store, tmp_path, clock)
    assert taken(store)["groups"]
    store.close()


def test_a_step_of_many_tokens_comes_in_parts(store: RolloutStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.rollouts.store.MAX_TAKEN", 10)
    played(store, "a", "b", "c")  # of six tokens each
    parts = [taken(store, count=3, offset=offset) for offset in (0, 2, 0)]
    found = [([group["group"] for group in part["groups"]], part["left_groups"]) for part in parts]
    assert found == [(["~a", "~b"], 1), (["~c"], 0), (["~a", "~b"], 1)]


def test_what_is_not_finite_is_not_recorded(store: RolloutStore) -> None:
    store.open(request("a"))
    broken = replace(captured("k/0", [1], [2, 3]), logprobs=array("f", [-1.0, float("nan")]).tobytes())
    with pytest.raises(InvalidRequest, match="expected finite log-probabilities"):
        store.append("", [("a", broken)])


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("no database, but long enough to be read as one" * 99)
    with pytest.raises(JournalError, match="expected a file of rollouts"):
        RolloutStore(tmp_path, LIMITS, FLEET)
    (tmp_path / NAME).unlink()
    RolloutStore(tmp_path, LIMITS, FLEET).close()
    with pytest.raises(JournalError, match=f"rollouts of fleet {FLEET}, and this is fleet other"):
        RolloutStore(tmp_path, LIMITS, "other")


def test_calls_share_a_sync_and_none_is_made_without_a_change(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("deployments.rollouts.store.sync", synced.append)
    played(store, "a", "b")
    assert not synced
    for _ in range(3):
        store.sync()
        store.counts()
    assert [each.name for each in synced] == [f"{NAME}-wal"]


def test_a_disk_that_failed_a_sync_is_not_believed_again(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops the pages that it could not write, and the next sync succeeds."""
    played(store, "a")
    with monkeypatch.context() as patch:
        patch.setattr("deployments.rollouts.store.sync", Mock(side_effect=OSError(5, "I/O error")))
        with pytest.raises(FleetUnavailable, match="I/O error"):
            store.sync()
    for call in (store.sync, lambda: store.open(request("b"))):
        with pytest.raises(FleetUnavailable, match=r"until the controller is started again: .*I/O error"):
            call()


def test_an_image_is_kept_once_and_as_long_as_a_rollout_has_it(
    store: RolloutStore, tmp_path: Path, clock: Clock
) -> None:
    cat, dog = sha256(b"cat").hexdigest(), sha256(b"dog").hexdigest()

    def begin(name: str) -> None:
        store.open(request(name))
        store.append("", [(name, captured("k/0", [1, 2], [3], images={0: b"cat"}))])

    begin("b")
    # The same tokens with another image continue nothing.
    store.append("", [("b", captured("l/0", [1, 2, 3, 4], [5], images={0: b"dog"}))])
    store.append("", [("b", captured("m/0", [1, 2, 3, 4], [5], images={0: b"cat", 3: b"dog"}))])
    store = again(store, tmp_path, clock)
    with closing(store):
        assert (store.image(cat), store.image(dog)) == (b"cat", b"dog")
        store.reward("b", "", 1.0)
        (group,) = taken(store)["groups"]
        (rollout,) = group["rollouts"]
        found = [(each["prompt_token_ids"], each["images"]) for each in rollout["sequences"]]
        assert found == [([1, 2, 3, 4], [dog]), ([1, 2], [cat, dog])]
        clock.now += LIMITS.keep_s / 2
        begin("a")
        clock.now += 0.7 * LIMITS.keep_s
        store.open(request("c"))
        store.discard("c", "")
        with pytest.raises(NotFound, match="no rollout that is kept has the image"):
            store.image(dog)
        assert store.image(cat) == b"cat", "of the rollout that is open"
        store.discard("a", "")
        with pytest.raises(NotFound):
            store.image(cat)


def test_a_conversations_experts_are_those_of_the_turn_that_sampled_after_them(store: RolloutStore) -> None:
    """The second turn computes all again; of a history that was rewritten nothing is shared."""
    store.open(request("a"))
    store.append("", [("a", captured("1", [1, 2], [3, 4], routed=8))])
    store.append("", [("a", captured("2", [1, 2, 3, 4, 5], [6], routed=9))])
    store.append("", [("a", captured("3", [1, 7], [6], routed=10))])
    store.open(request("b"))
    store.append("", [("b", captured("1", [1, 2], [3], routed=8))])
    store.append("", [("b", captured("2", [1, 2, 3], [4]))])
    for each in ("a", "b"):
        store.reward(each, "", 1.0)
    taken = json.loads(store.take("s", "", 2, None, 0, {"": 3}))
    (first, rewritten), (without,) = (each["rollouts"][0]["sequences"] for each in taken["groups"])
    del first["turns"]
    (read,) = parse_trajectories([{**first, "advantage": 1.0}], vocabulary_size=9, max_length=9)
    expected = bytes([1, 8, 2, 8, 3, 8, 4, 9, 5, 9])
    assert read.routed_experts is not None and read.routed_experts.ids == expected
    assert b64decode(rewritten["routed_experts"]["ids"]) == bytes([1, 10, 7, 10])
    assert "routed_experts" not in without


@pytest.mark.parametrize("schema", [4, 99])
def test_a_file_of_another_version_is_refused_by_name(
    store: RolloutStore, tmp_path: Path, schema: int
) -> None:
    store.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as file:
        file.execute(f"PRAGMA user_version={schema}")
    with pytest.raises(JournalError, match=f"expected schema 6, found {schema}.*another version"):
        RolloutStore(tmp_path, LIMITS, FLEET)
