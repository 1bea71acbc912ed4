"""The command line: `slipstream serve`, and the fleet's control routes by name."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from app.command import launch

cli = typer.Typer(
    help="Serve a model from a fleet, and update its weights while it serves.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(envvar="SLIPSTREAM_URL", help="the fleet's address")]
LOCAL = "http://127.0.0.1:8000"


@cli.command()
def serve(
    config: Annotated[Path, typer.Option(help="a Serve config file")] = Path("serve_config.yaml"),
    dashboard_port: Annotated[int, typer.Option(help="where jobs are submitted")] = launch.DASHBOARD_PORT,
) -> None:
    """Start a fleet on this machine, in the foreground."""
    raise typer.Exit(launch.main(["--config", str(config), "--dashboard-port", str(dashboard_port)]))


@cli.command()
def status(url: Url = LOCAL) -> None:
    """Members, states, versions."""
    _show("GET", url, "/fleet")


@cli.command()
def rounds(url: Url = LOCAL) -> None:
    """Every update, with its timings."""
    _show("GET", url, "/fleet/rounds")


@cli.command()
def rollback(
    version: Annotated[int, typer.Argument(help="a version in the store")], url: Url = LOCAL
) -> None:
    """Serve a stored version again."""
    _show("POST", url, "/fleet/rollback", {"version": version})


@cli.command()
def pause(url: Url = LOCAL) -> None:
    """Stop generating on every replica."""
    _show("POST", url, "/pause")


@cli.command()
def resume(url: Url = LOCAL) -> None:
    """Go on generating on every replica."""
    _show("POST", url, "/resume")


def _show(method: str, url: str, path: str, body: Any = None) -> None:
    """Print the answer; exit with 1 and the fleet's own sentence if it refused."""
    token = os.environ.get("SLIPSTREAM_TOKEN")  # not an option: others can read a process's arguments
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        # No read limit: a rollback or a pause answers when every replica has done it.
        timeout = httpx.Timeout(10, read=None)
        answer = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=timeout)
    except httpx.HTTPError as error:
        print(f"slipstream: no fleet answers at {url} ({error})", file=sys.stderr)
        raise typer.Exit(1) from error
    try:
        content = answer.json()
    except ValueError:
        content = answer.text
    if answer.is_error:
        error_body = content.get("error") if isinstance(content, dict) else None
        message = error_body.get("message") if isinstance(error_body, dict) else content
        print(f"slipstream: {message} ({answer.status_code})", file=sys.stderr)
        raise typer.Exit(1)
    print(content if isinstance(content, str) else json.dumps(content, indent=2))


def main() -> None:
    cli()
