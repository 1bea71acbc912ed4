import os
import random
import socket
from pathlib import Path

import pytest
from ray.serve._private import constants

from app.command import cluster as module
from app.command.cluster import LocalCluster, PortBlock


def ports(block: PortBlock) -> set[int]:
    return {block.metrics, block.statistics, block.fallback, *block.ray, *block.routers}


def test_no_two_blocks_overlap_while_both_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END", module._FIRST + 5 * module._SIZE)
    blocks: list[PortBlock] = []
    try:
        while True:
            blocks.append(PortBlock())
    except OSError as error:
        assert "is free" in str(error)
    held = [port for block in blocks for port in ports(block)]
    assert len(blocks) <= 5 and len(held) == len(set(held))
    blocks.pop().close()
    PortBlock().close()
    for block in blocks:
        block.close()


def test_a_block_of_a_fleet_whose_launcher_is_gone_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    block = PortBlock()
    block.close()
    start = block.metrics - 1
    monkeypatch.setattr(random, "randrange", lambda *_: start)
    with socket.create_server(("127.0.0.1", block.statistics)), pytest.raises(OSError, match="is free"):
        PortBlock()


def test_nothing_of_haproxy_is_where_another_cluster_has_it() -> None:
    clusters = [LocalCluster(dashboard_port=1, environment=dict(os.environ)) for _ in range(2)]
    try:
        one, other = (
            {name: value for name, value in each._environment.items() if name.startswith("RAY_SERVE_")}
            for each in clusters
        )
        shared = {name for name in one if one[name] == other[name]}
        assert shared == {"RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"}
        # What Ray would otherwise take: a port or a path of every cluster that has no value of its own.
        fixed = {
            name
            for name, value in vars(constants).items()
            if name.startswith("RAY_SERVE_") and ("/tmp/" in str(value) or (_is_port(name) and value))
        }
        assert all("GRPC" in name for name in fixed - set(one)), "gRPC is not served"
    finally:
        for cluster in clusters:
            cluster.stop()


def _is_port(name: str) -> bool:
    return name.endswith("_PORT")


def test_no_port_of_a_block_is_one_that_the_system_assigns() -> None:
    """Serve listens a minute after its port was chosen. By then a Ray worker had the same one: both shared it
    (SO_REUSEPORT), and a client of the fleet was answered by the worker's gRPC.
    """
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert first > module._END
