"""The status of an application as Serve's REST API reports it, and the changes that a person wants to read.

Ray has a schema of that answer (`ray.serve.schema.ServeInstanceDetails`) and `serve.status()`; neither is
used. The schema imports Ray (1.1 s and 105 MB measured, in a launcher that runs without it), and forbids
fields that it does not know. `serve.status()` needs a driver connected to the cluster, and the launcher must
outlive the cluster to end its processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class Verdict(Enum):
    """What the launcher makes of an application's status."""

    STARTING = auto()
    RUNNING = auto()
    FAILED = auto()  # it will not come up by itself
    UNHEALTHY = auto()  # it was up; Serve keeps trying to repair it


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationStatus:
    """One application, and how many replicas of its deployments are ready."""

    status: str
    message: str
    deployments: Mapping[str, str] = field(default_factory=dict)  # name -> "1 of 2 ready"

    @property
    def verdict(self) -> Verdict:
        match self.status:
            case "RUNNING":
                return Verdict.RUNNING
            case "DEPLOY_FAILED":
                return Verdict.FAILED
            case "UNHEALTHY":
                return Verdict.UNHEALTHY
        return Verdict.STARTING


def read_status(details: Mapping[str, Any], application: str) -> ApplicationStatus:
    """Read the answer of Serve's REST API (GET /api/serve/applications/)."""
    found = details.get("applications", {}).get(application)
    if found is None:
        return ApplicationStatus(status="NOT_STARTED", message="")
    deployments = {
        name: _readiness(deployment) for name, deployment in sorted(found.get("deployments", {}).items())
    }
    messages = [found.get("message", "")]
    messages += [d.get("message", "") for d in found.get("deployments", {}).values()]
    return ApplicationStatus(
        status=found["status"],
        message="\n".join(dict.fromkeys(message.strip() for message in messages if message.strip())),
        deployments=deployments,
    )


def changes(before: ApplicationStatus | None, now: ApplicationStatus) -> list[str]:
    """The deployments whose readiness has changed, one line each."""
    known = before.deployments if before is not None else {}
    return [f"{name}: {text}" for name, text in now.deployments.items() if known.get(name) != text]


def _readiness(deployment: Mapping[str, Any]) -> str:
    replicas = deployment.get("replicas", [])
    ready = sum(replica.get("state") == "RUNNING" for replica in replicas)
    target = deployment.get("target_num_replicas", len(replicas))
    return f"{ready} of {target} ready"
