"""The limits that a live router takes."""

from deployments.router.limits import RouterLimits


def test_settings_of_a_live_fleet_replace_their_limits_only() -> None:
    limits = RouterLimits(
        max_in_flight=3,
        max_body_bytes=100,
        max_sequences=50,
        find_replica_timeout_s=5.0,
        weight_timeout_s=5.0,
        load_factor=1.25,
        prefix_affinity=True,
    )
    settings = {
        "max_ongoing_requests": 10,
        "request_timeout_s": 60.0,
        "load_factor": 1000.0,
        "prefix_affinity": False,
    }
    assert limits.with_settings(settings) == RouterLimits(
        max_in_flight=10,
        max_body_bytes=100,
        max_sequences=50,
        find_replica_timeout_s=60.0,
        weight_timeout_s=60.0,
        load_factor=1000.0,
        prefix_affinity=False,
    )
