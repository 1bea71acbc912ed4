from pathlib import Path

import pytest
from ray import serve

from app.http.ingress import Ingress
from app.main import build
from app.settings.config import parse_config
from app.settings.security import Tokens
from deployments.router.forwarding import RouterLimits

REASON = "which other hosts can reach: expected a token in SLIPSTREAM_TOKEN"
pytestmark = [pytest.mark.serve, pytest.mark.fleet("ray"), pytest.mark.timeout(600)]


def test_a_serve_that_runs_already_is_asked_and_so_is_one_that_started_later(
    serving: None, tmp_path: Path
) -> None:
    config = parse_config({"model": str(tmp_path), "state_dir": str(tmp_path / "state")})
    with pytest.raises(ValueError, match=REASON) as refused:
        build(config)
    assert "'http_options.host' is '0.0.0.0'" in str(refused.value)
    limits = RouterLimits(max_ongoing_requests=1, max_body_bytes=1, request_timeout_s=1)
    # As if it had been built before Serve was started.
    router = serve.deployment(serve.ingress()(Ingress), name="router", max_constructor_retry_count=1)
    with pytest.raises(RuntimeError):
        serve.run(router.bind(None, None, None, limits, Tokens(), False), name="late")
    message = serve.status().applications["late"].deployments["router"].message
    assert f"Serve listens on '0.0.0.0', {REASON}" in message
