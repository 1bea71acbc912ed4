from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from tests.fleet.keeping import KEEPER
from tests.free_ports import free_ports

REASON = "which other hosts can reach: expected a token in SLIPSTREAM_TOKEN"
# The group's fleet ends before these: no test of it comes after them.
pytestmark = [pytest.mark.serve, pytest.mark.fleet("gloo"), pytest.mark.timeout(600)]


@pytest.fixture
def opened() -> Iterator[None]:
    """Serve, listening on all addresses, in this process's cluster."""
    from app.http.auth import listening_address

    KEEPER.empty_cluster()
    assert listening_address() is None
    (port,) = free_ports(1)
    serve.start(http_options={"host": "0.0.0.0", "port": port})
    try:
        assert listening_address() == ("0.0.0.0", port)
        yield
    finally:
        serve.shutdown()


def test_a_serve_that_runs_already_is_asked_and_so_is_one_that_started_later(
    opened: None, tmp_path: Path
) -> None:
    from app.http.ingress import Ingress
    from app.main import build
    from app.settings.config import parse_config
    from app.settings.security import Tokens
    from deployments.router.forwarding import RouterLimits

    config = parse_config({"model": str(tmp_path), "state_dir": str(tmp_path / "state")})
    with pytest.raises(ValueError, match=REASON) as refused:
        build(config)
    assert "'http_options.host' is '0.0.0.0'" in str(refused.value)
    limits = RouterLimits(
        max_ongoing_requests=1,
        max_body_bytes=1,
        max_sequences=1,
        request_timeout_s=1,
    )
    # As if it had been built before Serve was started.
    router = serve.deployment(serve.ingress()(Ingress), name="router", max_constructor_retry_count=1)
    with pytest.raises(RuntimeError):
        serve.run(router.bind(None, None, None, limits, Tokens(), False), name="late")
    message = serve.status().applications["late"].deployments["router"].message
    assert f"Serve listens on '0.0.0.0', {REASON}" in message
