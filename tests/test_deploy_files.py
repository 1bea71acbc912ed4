"""The files of deploy/ name what exists, and agree with each other and with the application."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from app.command.deploy import read_serve_file
from app.http.auth import Access
from app.http.fleet_routes import routes
from tests.documents import ROOT
from tests.test_documents import check

DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json")
SCRIPTS = [DEPLOY / "with_fleet.sh", DEPLOY / "slurm" / "fleet.sbatch"]
FLEET = DEPLOY / "fleet.yaml"
TOKEN = "a-token-of-this-test"
CLUSTER = "gcsFaultToleranceOptions headGroupSpec rayVersion workerGroupSpecs"
# Fields of KubeRay's CRDs, which have more: both files were held against those of 1.4.0, 1.6.2 and 1.7.0.
FIELDS = {
    "RayService": "rayClusterConfig serveConfigV2 upgradeStrategy",
    "RayJob": "backoffLimit entrypoint rayClusterSpec shutdownAfterJobFinishes submissionMode "
    "ttlSecondsAfterFinished",
    "rayClusterConfig": CLUSTER,
    "rayClusterSpec": CLUSTER,
    "headGroupSpec": "rayStartParams template",
    "workerGroupSpecs": "groupName maxReplicas minReplicas rayStartParams replicas template",
    "template": "spec",
    "containers": "env image name ports readinessProbe resources volumeMounts",
}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


@pytest.fixture
def service() -> dict[str, Any]:
    (found,) = manifests("rayservice.yaml")
    assert isinstance(found, dict)
    return found


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", TOKEN)


def containers(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        yield from group["template"]["spec"]["containers"]


def test_kuberay_deploys_the_fleet_of_the_other_recipes(service: dict[str, Any]) -> None:
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert document == yaml.safe_load(FLEET.read_text())
    ServeDeploySchema.model_validate(document)
    file = read_serve_file(FLEET)
    assert file.host == "0.0.0.0" and str(file.config.state_dir) == "/shared/slipstream"


def test_there_are_gpus_for_each_replica_and_the_trainer_and_no_second_cluster(
    service: dict[str, Any],
) -> None:
    config = read_serve_file(FLEET).config
    needed = config.engine.first_replicas + 1
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == needed
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > config.engine.drain_timeout_s
    values = manifests("values.yaml")[0]
    assert values["worker"]["replicas"] == needed
    sky = yaml.safe_load((DEPLOY / "skypilot" / "fleet.yaml").read_text())
    assert sky["num_nodes"] == needed and sky["envs"]["CONFIG"] == "deploy/fleet.yaml"
    assert f"--nodes={needed}\n" in SCRIPTS[1].read_text()


def test_a_pod_is_ready_when_an_open_route_says_so(service: dict[str, Any]) -> None:
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    probe = worker["readinessProbe"]["httpGet"]
    (route,) = [each for each in routes if each.path == probe["path"] and "GET" in each.methods]
    assert route.access is Access.OPEN, "the kubelet has no token"
    port = read_serve_file(FLEET).port
    assert [each["containerPort"] for each in worker["ports"]] == [port] == [probe["port"]]


@pytest.mark.parametrize("name", ["rayservice.yaml", "rayjob.yaml"])
def test_a_manifest_has_fields_of_its_crd(name: str) -> None:
    (found,) = manifests(name)
    spec = found["spec"]
    cluster = spec.get("rayClusterConfig") or spec["rayClusterSpec"]
    assert spec.keys() <= set(FIELDS[found["kind"]].split())
    assert cluster["rayVersion"] == ray.__version__
    unknown = [
        f"{field}.{name}"
        for field, value in walk(found)
        for name in value
        if field in FIELDS and name not in FIELDS[field].split()
    ]
    assert unknown == []
    defined = {each["metadata"]["name"]: each["kind"] for each in manifests("shared.yaml")}
    text = (DEPLOY / "kubernetes" / name).read_text()
    for claim in re.findall(r"claimName: (\S+?)}", text):
        assert defined[claim] == "PersistentVolumeClaim"
    for host in re.findall(r"redisAddress: (\S+):6379", text):
        assert host in defined


def walk(value: Any, field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each mapping with the name of the field that it, or a list with it, is in."""
    if isinstance(value, list):
        for each in value:
            yield from walk(each, field)
    elif isinstance(value, dict):
        yield field, value
        for name, inner in value.items():
            yield from walk(inner, name)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_file_names_files_and_commands_that_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"(?<![\w/.-])(?:app|deploy|docs)/[\w./-]+\.\w+", text):
        assert (ROOT / name).is_file(), name
    joined = text.replace("\\\n", " ")
    pattern = r"(?:slipstream (?:rl|serve|status|deploy)|make setup|python -m app\.jobs)(?: [-\w./:$=\"]+)*"
    for command in re.findall(pattern, joined):
        config = "app/layouts/nccl_two_replicas.yaml"
        command = command.replace("python -m app.jobs", "slipstream rl").replace("$CONFIG", config)
        check(re.sub(r' "\$\w+"', " value", command))


def test_the_image_has_what_the_recipes_run() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    packages = {each.split("/")[0] for each in ("app", "deploy", "deployments", "slipstream", "trainers")}
    assert {f"!{each}" for each in packages} <= set(lines)
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert "requirements-${BUILD}.txt" in dockerfile
    for build in re.findall(r"BUILD=(\w+)", dockerfile):
        assert (ROOT / f"requirements-{build}.txt").is_file()
    (home,) = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.M)
    (job,) = manifests("rayjob.yaml")
    mounts = [each["mountPath"] for each in next(containers(job["spec"]["rayClusterSpec"]))["volumeMounts"]]
    assert f"{home}/.slipstream" in mounts


@pytest.mark.parametrize(
    ("command", "fleet", "status"),
    [("true", "up", 0), ("exit 3", "up", 3), ("true", "ends", 1)],
)
def test_a_command_runs_beside_a_fleet(command: str, fleet: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "slipstream").write_text(
        f"""#!/bin/bash
cd {tmp_path}
if [ "$1" = status ]; then cat up 2>/dev/null; exit; fi
echo "$@" >asked
[ {fleet} = up ] || exit 1
trap 'echo TERM >ended; exit 0' TERM
echo '{json.dumps({"members": [{"admitted": True}]}, indent=2)}' >up
while true; do sleep 0.05; done
"""
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
    for name in ("slipstream", "sleep"):
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("RAY_API_SERVER_ADDRESS", None)
    ran = ["bash", str(SCRIPTS[0]), "some.yaml", "bash", "-c", command]
    assert subprocess.run(ran, env=environment, timeout=30, capture_output=True).returncode == status
    assert (tmp_path / "asked").read_text() == "serve --config some.yaml --address http://127.0.0.1:8265\n"
    assert (tmp_path / "ended").exists() is (fleet == "up")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_and_says_how_it_is_used(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    environment = {**os.environ, "SLURM_NNODES": "1"}
    ran = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 2 and "CONFIG COMMAND..." in ran.stderr
