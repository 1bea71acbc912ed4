"""A replica as Serve starts it: with which weights, and when it is ready."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from deployments.protocol.instructions import JoinAnswer
from deployments.replica import replica
from deployments.replica.replica import Replica

AROUND = (
    "serve ray UnaryHandle own_engine warn_if_not_forked add_server_info watch_load Polls Follower Gate "
    "ReplicaFront ReplicaServer"
)


async def test_it_loads_what_the_fleet_serves_and_is_ready_when_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve ends the replicas that it replaces as soon as their successors are ready."""
    for name in AROUND.split():
        monkeypatch.setattr(replica, name, MagicMock())
    member = SimpleNamespace(admitted=False, fenced=None)
    start = AsyncMock(return_value=MagicMock(dead=False))
    monkeypatch.setattr(replica, "Engine", SimpleNamespace(start=start))
    monkeypatch.setattr(replica, "member_of", lambda engine, spec: member)
    stored = JoinAnswer(version=3, path="/store/v3")
    monkeypatch.setattr(replica, "find_first_weights", AsyncMock(return_value=stored))
    started: Any = SimpleNamespace(_join=None, _follow=asyncio.Event().wait)
    started.check_health = partial(Replica.check_health, started)
    started._until_admitted = partial(Replica._until_admitted, started)
    spec = MagicMock()
    starting = asyncio.create_task(cast(Any, Replica.__init__)(started, spec, MagicMock()))
    await asyncio.sleep(0.1)
    start.assert_awaited_once_with(spec.at("/store/v3"), version=3)
    assert not starting.done()
    member.admitted = True
    await asyncio.wait_for(starting, 10)
    started._following.cancel()
