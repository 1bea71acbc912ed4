"""The command line: `slipstream serve`, `slipstream rl`, and the fleet's control routes by name."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from app.client import calls
from app.client.announcement import announced
from app.client.connection import LOCAL_URL, Call, FleetClient, FleetError, token_from
from app.client.program_options import Url
from app.command import deploy as deployment
from app.command import launch, submit
from deployments.protocol.responses import RoundStatus

ASK_S = 0.3
ANSWER_S = 10.0
MIB = 1 << 20


@contextmanager
def progress_shown(url: str) -> Iterator[None]:
    """Show the round's progress while the block runs; the block reports errors."""
    ended, done = threading.Event(), threading.Event()
    watching = threading.Thread(target=_watch, args=(url, ended, done), daemon=True)
    watching.start()
    try:
        yield
        done.set()
    finally:
        ended.set()
        watching.join(ANSWER_S)


def _watch(url: str, ended: threading.Event, done: threading.Event) -> None:
    try:
        with FleetClient.connect(url, token_from(), timeout_s=ANSWER_S) as fleet:
            current = fleet.send(calls.fleet()).round
            while (current is None or current.file_bytes is None) and not ended.wait(ASK_S):
                current = fleet.send(calls.fleet()).round
            if current is not None and current.file_bytes is not None:
                _follow(fleet, current, ended, done)
    except FleetError:
        return


def _follow(fleet: FleetClient, first: RoundStatus, ended: threading.Event, done: threading.Event) -> None:
    total = _mib(first.file_bytes)
    with typer.progressbar(length=total, label=_label(first), file=sys.stderr, show_pos=True) as bar:
        current: RoundStatus | None = first
        while current is not None and current.round_id == first.round_id:
            bar.label = _label(current)
            bar.update(_mib(current.sent_bytes) - bar.pos)
            if ended.wait(ASK_S):
                break
            current = fleet.send(calls.fleet()).round
        if done.is_set():
            bar.update(total - bar.pos)


def _label(current: RoundStatus) -> str:
    phase = "replicas read and stage (MiB)" if current.phase == "open" else current.phase
    return f"version {current.version}: {phase}"


def _mib(size_bytes: int | None) -> int:
    return 0 if size_bytes is None else -(-size_bytes // MIB)


cli = typer.Typer(
    help="Serve a model from a fleet, and update its weights while it serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they would print local variables, such as the token
)
# `app.jobs.options` parses the job's options; here they are passed on.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@cli.command()
def serve(
    config: Annotated[Path, typer.Option(help="a Serve config file")] = Path("serve_config.yaml"),
    dashboard_port: Annotated[int, typer.Option(help="where jobs are submitted")] = launch.DASHBOARD_PORT,
) -> None:
    """Start a fleet on this machine, in the foreground."""
    raise typer.Exit(launch.serve(config, dashboard_port))


@cli.command()
def deploy(
    config: Annotated[Path, typer.Option(help="a Serve config file")] = Path("serve_config.yaml"),
    dashboard_port: Annotated[int, typer.Option(help="of the running fleet")] = launch.DASHBOARD_PORT,
) -> None:
    """Give the running fleet another configuration."""
    raise typer.Exit(deployment.deploy(config, dashboard_port))


@cli.command("doctor")
def examine(
    config: Annotated[Path, typer.Option(help="a Serve config file")] = Path("serve_config.yaml"),
) -> None:
    """Say whether this machine can run a fleet, and what to change; starts nothing."""
    raise typer.Exit(launch.examine(config))


@cli.command(context_settings=PASS_ON)
def rl(context: typer.Context) -> None:
    """Submit the RL job to the running fleet; `slipstream rl --help` has the job's options."""
    raise typer.Exit(submit.submit(context.args))


@cli.command()
def status(url: Url = LOCAL_URL) -> None:
    """Members, states, versions."""
    show(url, calls.fleet(), asdict)


@cli.command()
def rounds(url: Url = LOCAL_URL) -> None:
    """Every update, with its timings."""
    show(url, calls.rounds(), lambda reports: {"rounds": [asdict(report) for report in reports]})


@cli.command()
def publish(
    path: Annotated[Path, typer.Argument(help="a checkpoint directory that every replica's host can read")],
    label: Annotated[str | None, typer.Option(help="your own name for the version")] = None,
    url: Url = LOCAL_URL,
) -> None:
    """Serve the weights of a checkpoint directory."""
    call = calls.publish_directory(os.path.abspath(path), label)  # the fleet follows links
    with progress_shown(url):
        show(url, call, asdict)


@cli.command()
def rollback(
    version: Annotated[int, typer.Argument(help="a version in the store")], url: Url = LOCAL_URL
) -> None:
    """Serve a stored version again."""
    with announced(f"version {version}: replicas read and stage", to=sys.stderr):
        show(url, calls.rollback(version), asdict)


@cli.command()
def scale(
    replicas: Annotated[str, typer.Argument(help="a number, or 'auto' for as many as the load needs")],
    url: Url = LOCAL_URL,
) -> None:
    """Set the number of replicas."""
    if replicas != "auto" and not replicas.isdecimal():
        raise typer.BadParameter(f"replicas: expected a number or 'auto', got {replicas!r}")
    show(url, calls.scale("auto" if replicas == "auto" else int(replicas)), asdict)


@cli.command()
def pause(url: Url = LOCAL_URL) -> None:
    """Stop generating on every replica."""
    show(url, calls.pause(), asdict)


@cli.command()
def resume(url: Url = LOCAL_URL) -> None:
    """Continue generating on every replica."""
    show(url, calls.resume(), asdict)


def show(url: str, call: Call[Any], to_json: Callable[[Any], object]) -> None:
    """Print the result as JSON; exits with 1 and the fleet's own message if the call fails."""
    try:
        # No timeout: a rollback or a pause returns when every replica has done it.
        with FleetClient.connect(url, token_from(), timeout_s=None) as fleet:
            answer = fleet.send(call)
    except FleetError as error:
        status = f" ({error.status})" if error.status else ": --url or SLIPSTREAM_URL gives its address"
        print(f"slipstream: {error.message}{status}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(to_json(answer), indent=2))


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
