"""Addresses that a trainer rank offers to its peers."""

import socket

import ray


def own_address() -> str:
    """The IP address of this host, as other hosts of the cluster reach it."""
    return str(ray.util.get_node_ip_address())


def free_port() -> int:
    """A port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
