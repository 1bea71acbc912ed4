"""Which settings change in a live fleet without a restart.

Serve restarts every process of an application when one of its `args` changes. What is named here is therefore
taken out of `args` and passed as the `user_config` of the deployment that uses it, which Serve hands to its
running processes (`reconfigure`). Every other setting restarts the fleet: replica after replica.
"""

from collections.abc import Mapping
from typing import Any

from app.settings.config import AppConfig

ROUTER = (
    "max_ongoing_requests",
    "request_timeout_s",
    "load_factor",
    "prefix_affinity",
)
WEIGHTS = (
    "min_replicas",
    "max_unavailable",
    "stage_timeout_s",
    "commit_timeout_s",
    "drain_timeout_s",
    "commit",
    "in_flight",
)
LIVE: Mapping[str, tuple[str, ...]] = {"router": ROUTER, "weights": WEIGHTS}
DEPLOYMENTS: Mapping[str, str] = {"router": "router", "weights": "controller"}


def divide(application: Mapping[str, Any], config: AppConfig) -> dict[str, Any]:
    """An application of a Serve config with its live settings in `user_config`.

    Args:
        config: its `args`, checked.
    """
    args = {**application["args"]}
    own = {each["name"]: dict(each) for each in application.get("deployments", ())}
    for section, names in LIVE.items():
        values = getattr(config, section).model_dump(mode="json", include=set(names))
        own.setdefault(DEPLOYMENTS[section], {"name": DEPLOYMENTS[section]})["user_config"] = values
        if section in args:
            args[section] = {name: value for name, value in args[section].items() if name not in names}
    own["router"]["num_replicas"] = config.router.num_replicas
    if "router" in args:
        args["router"].pop("num_replicas", None)
    return {
        **application,
        # Any other empty section says something: a trainer with nothing but defaults.
        "args": {name: value for name, value in args.items() if name not in LIVE or value != {}},
        "deployments": list(own.values()),
    }


def restarting(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The settings whose change restarts the fleet, from two `args` that were divided."""
    names: list[str] = []
    for section in sorted({*deployed, *wanted}):
        old, new = deployed.get(section), wanted.get(section)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += [f"{section}.{name}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        elif old != new:
            names.append(section)
    return names
