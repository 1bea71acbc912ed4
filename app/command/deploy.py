"""A Serve config file: read, checked, shown, and deployed to a running fleet.

Serve restarts an application when its `args` change. So live settings move from `args` to their deployment's
`user_config`, which Serve passes to running processes (`reconfigure`). Other settings restart the fleet, one
replica at a time.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.command.cluster import APPLICATIONS, dashboard_client
from app.command.shell import reported
from app.settings.actor_options import ROLLOUT, completed
from app.settings.config import AppConfig, parse_config
from app.settings.section import ConfigError, did_you_mean
from deployments.host.network import host_port

LIVE: Mapping[str, tuple[str, ...]] = {
    "router": ("max_ongoing_requests", "request_timeout_s"),
    "weights": (
        *("commit", "in_flight", "min_replicas", "max_unavailable"),
        *("stage_timeout_s", "drain_timeout_s"),
    ),
}
DEPLOYMENTS: Mapping[str, str] = {"router": "router", "weights": "controller"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """`document` is for Serve."""

    document: dict[str, Any]
    application: str
    host: str
    port: int
    config: AppConfig

    @property
    def url(self) -> str:
        return self.url_on("::1" if self.host == "::" else "127.0.0.1")

    def url_on(self, this: str) -> str:
        """If proxies listen on all addresses, `this` is the host's."""
        host = this if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host_port(host, self.port)}"


def read_serve_file(path: Path) -> ServeFile:
    """Raises ConfigError."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected YAML, but {error}") from error
    application = _application(path, document)
    host, port = _address(document.get("http_options") or {})
    if unknown := list(_unknown(document, application)):
        raise ConfigError("\n".join(unknown))
    config = parse_config(application.get("args") or {})
    config.security.tokens(host=host)
    # Serve builds the application in another directory.
    application["args"] = {**application["args"], "state_dir": str(config.state_dir)}
    document["applications"] = [divide(application, config)]
    return ServeFile(
        document=document,
        application=str(application.get("name", "default")),
        host=host,
        port=port,
        config=config,
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, as after a section was pasted: YAML drops the first one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name!r} is there twice", problem_mark=key.start_mark)
            seen.add(name)
        return node


def _unknown(document: Mapping[str, Any], application: Mapping[str, Any]) -> Iterator[str]:
    """Serve ignores these, and would listen at its default address for `http_option`."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema  # takes 1 s

    for path, given, schema in (
        ("", document, ServeDeploySchema),
        ("http_options.", document.get("http_options") or {}, HTTPOptionsSchema),
        ("applications.", application, ServeApplicationSchema),
    ):
        for name in given:
            if name not in schema.model_fields:
                hint = did_you_mean(
                    str(name), schema.model_fields, f"expected one of {', '.join(schema.model_fields)}"
                )
                yield f"unknown setting '{path}{name}' ({hint})"


def _address(http: Any) -> tuple[str, int]:
    if not isinstance(http, dict):
        raise ConfigError(f"'http_options': expected a mapping, got {http!r:.60}")
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    if not isinstance(host, str):
        raise ConfigError(f"'http_options.host': expected an address, got {host!r:.60}")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ConfigError(f"'http_options.port': expected a number from 1 to 65535, got {port!r:.60}")
    return host, port


def _application(path: Path, document: Any) -> dict[str, Any]:
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        got = len(applications) if isinstance(applications, list) else "none"
        raise ConfigError(f"{path}: expected one entry under 'applications', got {got}")
    application: dict[str, Any] = applications[0]
    deployments = application.get("deployments") or []
    if not isinstance(deployments, list) or not all(
        isinstance(each, dict) and isinstance(each.get("name"), str) for each in deployments
    ):
        raise ConfigError(
            f"'deployments': expected a list of mappings with a 'name', got {deployments!r:.60}"
        )
    return application


def divide(application: Mapping[str, Any], config: AppConfig) -> dict[str, Any]:
    """Move live settings to `user_config`; `config` is the checked `args`."""
    args = {**application["args"]}
    own = {each["name"]: dict(each) for each in application.get("deployments") or ()}
    for section, names in LIVE.items():
        values = getattr(config, section).model_dump(mode="json", include=set(names))
        own.setdefault(DEPLOYMENTS[section], {"name": DEPLOYMENTS[section]})["user_config"] = values
        if section in args:
            args[section] = {name: value for name, value in args[section].items() if name not in names}
    if isinstance(options := own.get(ROLLOUT, {}).get("ray_actor_options"), dict):
        job = application.get("runtime_env") or {}
        own[ROLLOUT]["ray_actor_options"] = completed(options, config, job)
    own["router"]["num_replicas"] = config.router.num_replicas
    if "router" in args:
        args["router"].pop("num_replicas", None)
    return {
        **application,
        # Other empty sections matter: `trainer: {}` is a trainer with defaults.
        "args": {name: value for name, value in args.items() if name not in LIVE or value != {}},
        "deployments": list(own.values()),
    }


def restarting(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """From the divided `args` before and after."""
    names: list[str] = []
    for section in sorted({*deployed, *wanted}):
        old, new = deployed.get(section), wanted.get(section)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += [f"{section}.{name}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        elif old != new:
            names.append(section)
    return names


def deploy(config: Path, dashboard: str) -> None:
    """`dashboard`: its URL. Prints which settings restart the fleet."""
    with reported(ValueError):
        file = read_serve_file(config)
        try:
            with dashboard_client(dashboard, os.environ) as client:
                applications = client.get(APPLICATIONS).raise_for_status().json()["applications"]
                running = applications.get(file.application)
                if running is None:
                    raise ConfigError(f"no application {file.application!r} runs at {dashboard}")
                answer = client.put(APPLICATIONS, json=file.document)
        except httpx.HTTPError as error:
            raise ConfigError(f"no fleet answers at {dashboard} ({error})") from error
        if answer.is_error:
            raise ConfigError(f"Serve refused the configuration: {answer.text[-2000:].strip()}")
    deployed, wanted = running.get("deployed_app_config") or {}, file.document["applications"][0]
    what = "nothing restarts"
    if names := restarting(_actor_options(deployed), _actor_options(wanted)):
        what = f"processes restart, one after another, because of: {', '.join(names)}"
    if names := restarting(deployed.get("args") or {}, wanted["args"]):
        what = f"the fleet restarts, replica after replica, because of: {', '.join(names)}"
    print(f"Deployed; {what}")


def _actor_options(application: Mapping[str, Any]) -> dict[str, Any]:
    options = {each["name"]: each.get("ray_actor_options") for each in application.get("deployments") or ()}
    return {f"{name}.ray_actor_options": each for name, each in options.items() if each}


# -- `slipstream config` ---------------------------------------------------------------------------


def check(path: Path) -> None:
    with reported(ValueError):
        file = read_serve_file(path)
    config = file.config
    trains = "no trainer" if config.trainer is None else f"a trainer ({config.trainer.strategy})"
    print(
        f"{path} is valid: {config.engine.first_replicas} replicas of {config.model} on {config.device}, "
        f"{trains}, at {file.url}"
    )


def show(path: Path) -> None:
    with reported(ValueError):
        file = read_serve_file(path)
    print(yaml.safe_dump(file.config.model_dump(mode="json"), sort_keys=False), end="")
