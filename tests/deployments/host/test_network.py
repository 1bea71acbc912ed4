from deployments.host.network import interface_of


def test_an_address_has_the_interface_that_the_system_shows() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None, "no host has an address for documentation"
