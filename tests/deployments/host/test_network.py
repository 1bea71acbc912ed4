import pytest

from deployments.host.network import address_towards, host_port, interface_of


def test_an_address_has_the_interface_that_the_system_shows() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.255") is None, "no host has a broadcast address"


@pytest.mark.parametrize(
    ("peer", "here"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.7", "127.0.0.1")]
)
def test_the_address_is_one_of_the_network_that_leads_to_the_peer(peer: str, here: str) -> None:
    assert address_towards(peer) == here


def test_an_ipv6_address_has_brackets_before_its_port() -> None:
    """Without them the router asked Ray's nodes for metrics at an address that is none."""
    assert host_port("fd77::1", 8000) == "[fd77::1]:8000"
    assert host_port("10.0.0.1", 80) == "10.0.0.1:80"
