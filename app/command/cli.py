"""The command line. Commands import what they need, so that `slipstream --help` is fast."""

import os
from pathlib import Path
from typing import Annotated

import typer

from app.client.program_options import LOCAL_URL, Url, print_any_text
from app.command.runs import DASHBOARD_PORT

Json = Annotated[bool, typer.Option("--json", help="the fleet's own answer, for programs")]
Watch = Annotated[bool, typer.Option("--watch", help="again every 2 seconds, until Ctrl-C")]


def default_config() -> Path:
    """serve_config.yaml of the working directory, else the packaged default."""
    here = Path("serve_config.yaml")
    return here if here.exists() else Path(__file__).parents[1] / here.name


Config = Annotated[
    Path,
    typer.Option(
        help="a Serve config file",
        default_factory=default_config,
        show_default="serve_config.yaml here, else the default fleet's",
    ),
]

Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="of the dashboard of a Ray cluster; none: one on this machine"),
]

cli = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # twice as fast
    pretty_exceptions_enable=False,  # would print local variables, such as tokens
)
settings = typer.Typer(help="Check or show a configuration file.", no_args_is_help=True)
cli.add_typer(settings, name="config")
drafter = typer.Typer(help="Write a drafter that the trainer can train.", no_args_is_help=True)
cli.add_typer(drafter, name="drafter")
ServeConfig = Annotated[Path, typer.Argument(metavar="FILE", help="a Serve config file")]
# `app.jobs.options` parses the job's options.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"slipstream {metadata.version('slipstream-rl')}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print it and exit")
    ] = False,
) -> None:
    """Serve a model from a fleet, and update its weights while it serves."""


@cli.command()
def serve(
    config: Config,
    dashboard_port: Annotated[int, typer.Option(help="of Ray's dashboard")] = DASHBOARD_PORT,
    address: Address = None,
) -> None:
    """Start a fleet in the foreground. With --address in a Ray cluster that runs."""
    from app.command import launch

    launch.serve(config, dashboard_port, address)


@cli.command()
def deploy(
    config: Config,
    dashboard_port: Annotated[int, typer.Option(help="of the running fleet")] = DASHBOARD_PORT,
    address: Address = None,
) -> None:
    """Give the running fleet another configuration."""
    from app.command import deploy as deployment

    deployment.deploy(config, f"http://127.0.0.1:{dashboard_port}" if address is None else address)


@cli.command("doctor")
def examine(
    config: Config,
) -> None:
    """What this machine lacks for a fleet, and what to do. Starts nothing."""
    from app.command import doctor

    doctor.examine(config)


@settings.command("check")
def check_settings(file: ServeConfig = Path("serve_config.yaml")) -> None:
    """Say what is wrong with a file. `slipstream doctor` looks at model and machine, too."""
    from app.command import deploy as deployment

    deployment.check(file)


@settings.command("show")
def show_settings(file: ServeConfig = Path("serve_config.yaml")) -> None:
    """All settings under `args`, with their defaults."""
    from app.command import deploy as deployment

    deployment.show(file)


@drafter.command("new")
def new_drafter(
    model: Annotated[str, typer.Argument(help="as in the configuration")],
    directory: Annotated[Path, typer.Argument(help="does not exist yet")],
    draft_vocabulary: Annotated[
        int | None, typer.Option(help="how many of the model's tokens it drafts", show_default="all")
    ] = None,
) -> None:
    """Write an untrained EAGLE-3 head for a model."""
    from app.command.shell import reported
    from app.settings.models import resolve_model
    from deployments.weights.store.hub import downloaded
    from trainers.eagle3 import write_new_head

    with reported(ValueError, OSError):
        write_new_head(downloaded(resolve_model(model)), directory, draft_vocabulary=draft_vocabulary)
    print(f"{directory.absolute()}: set it as trainer.drafter.model and as the model of speculative_config")


@cli.command(context_settings=PASS_ON)
def rl(context: typer.Context) -> None:
    """Train the model that the fleet serves; see `rl --help`."""
    from app.jobs.__main__ import run

    raise typer.Exit(run(context.args, "slipstream rl"))


@cli.command()
def status(url: Url = LOCAL_URL, as_json: Json = False, watch: Watch = False) -> None:
    """Replicas with their state, version and load."""
    from app.command import asking

    asking.show_status(url, as_json=as_json, watch=watch)


@cli.command()
def rounds(
    url: Url = LOCAL_URL,
    last: Annotated[
        int | None, typer.Option(min=1, show_default="20, with --json all", help="only the newest")
    ] = None,
    as_json: Json = False,
    watch: Watch = False,
) -> None:
    """Every update, with its timings."""
    from app.command import asking

    asking.show_rounds(url, as_json=as_json, watch=watch, last=last)


@cli.command()
def adapters(url: Url = LOCAL_URL, as_json: Json = False, watch: Watch = False) -> None:
    """LoRA adapters and their versions."""
    from app.command import asking

    asking.show_adapters(url, as_json=as_json, watch=watch)


@cli.command()
def chat(
    url: Url = LOCAL_URL,
    model: Annotated[str | None, typer.Option(help="or an adapter", show_default="the fleet's")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="per answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token")] = 0.7,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
) -> None:
    """Talk with the fleet. The version of each answer is shown below it."""
    from app.command.chat import talk

    talk(url, model, system, {"max_tokens": max_tokens, "temperature": temperature})


@cli.command()
def publish(
    path: Annotated[
        str, typer.Argument(help="a checkpoint directory that every replica's host can read, or a URL")
    ],
    label: Annotated[str | None, typer.Option(help="your own name for the version")] = None,
    url: Url = LOCAL_URL,
) -> None:
    """Serve the weights of a checkpoint directory, or of a URL."""
    from app.client import calls
    from app.command import asking

    place = path if "://" in path else os.path.abspath(path)  # the fleet follows symbolic links
    call = calls.publish_directory(place, label)
    asking.run(url, call, f"publishing {path}")


@cli.command()
def upload(
    directory: Annotated[Path, typer.Argument(help="a checkpoint")],
    parent: Annotated[str, typer.Argument(help="a URL, below which it gets the directory's name")],
    base: Annotated[
        Path | None,
        typer.Option(help="a checkpoint that was uploaded there before: what differs from it is uploaded"),
    ] = None,
) -> None:
    """Copy a checkpoint to S3, GCS or another store. Prints its URL, for `slipstream publish`."""
    from app.command.shell import reported
    from deployments.weights.store.uploads import upload

    with reported(ValueError, OSError):
        print(upload(directory, parent, base))


@cli.command()
def rollback(
    version: Annotated[int, typer.Argument(help="a version in the store")], url: Url = LOCAL_URL
) -> None:
    """Serve a stored version again."""
    from app.client import calls
    from app.command import asking

    asking.run(url, calls.rollback(version), f"rolling back to version {version}")


@cli.command()
def scale(
    replicas: Annotated[str, typer.Argument(help="a number, or 'auto' for as many as the load needs")],
    url: Url = LOCAL_URL,
) -> None:
    """Set the number of replicas."""
    if replicas != "auto" and not replicas.isdecimal():
        raise typer.BadParameter(f"replicas: expected a number or 'auto', got {replicas!r}")
    from app.client import calls
    from app.command import asking

    asking.run(url, calls.scale("auto" if replicas == "auto" else int(replicas)))


@cli.command()
def pause(url: Url = LOCAL_URL) -> None:
    """Stop generating on every replica."""
    from app.client import calls
    from app.command import asking

    asking.run(url, calls.pause())


@cli.command()
def resume(url: Url = LOCAL_URL) -> None:
    """Continue generating on every replica."""
    from app.client import calls
    from app.command import asking

    asking.run(url, calls.resume())


def main() -> None:
    print_any_text()
    cli()


if __name__ == "__main__":
    main()
