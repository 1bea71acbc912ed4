"""Gives a running fleet another configuration: `slipstream deploy --config serve_config.yaml`."""

import os
import sys
from pathlib import Path
from typing import Any

import httpx

from app.command.serve_file import read_serve_file
from app.settings.errors import ConfigError
from app.settings.live import restarting

APPLICATIONS = "/api/serve/applications/"


def deploy(config: Path, dashboard_port: int) -> int:
    """Send it to Serve, and say which settings restart the fleet; the exit status.

    Args:
        config: a Serve config file.
        dashboard_port: the fleet's, see `slipstream serve`.
    """
    dashboard = f"http://127.0.0.1:{dashboard_port}"
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        file = read_serve_file(config)
        with httpx.Client(base_url=dashboard, headers=headers, timeout=60, trust_env=False) as client:
            running = client.get(APPLICATIONS).raise_for_status().json()["applications"].get(file.application)
            if running is None:
                raise ConfigError(f"no application {file.application!r} runs at {dashboard}")
            answer = client.put(APPLICATIONS, json=file.document)
            if answer.is_error:
                raise ConfigError(f"Serve refused the configuration: {answer.text[-2000:].strip()}")
    except httpx.HTTPError as error:
        print(f"slipstream: no fleet answers at {dashboard} ({error})", file=sys.stderr)
        return 1
    except (ConfigError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    print(_effect(running.get("deployed_app_config") or {}, file.document["applications"][0]))
    return 0


def _effect(deployed: dict[str, Any], wanted: dict[str, Any]) -> str:
    names = restarting(deployed.get("args") or {}, wanted["args"])
    if not names:
        return "Deployed; nothing restarts"
    return f"Deployed; the fleet restarts, replica after replica, because of: {', '.join(names)}"
