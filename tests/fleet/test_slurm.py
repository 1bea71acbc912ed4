"""deploy/slurm/fleet.sbatch over two hosts (`benchmarks/hosts.py`), whose `srun` is a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.hosts import ROOT, Hosts, NotPossible
from tests.environment import users_environment
from tests.fleet.deployed import settings
from tests.tiny_models import save_tiny_llama

COUNT = 2
RUN_S = 500.0
pytestmark = [pytest.mark.serve, pytest.mark.fleet("slurm"), pytest.mark.long, pytest.mark.timeout(600)]


def test_a_job_has_a_fleet_over_its_hosts_and_the_status_of_its_command(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=1)
    changes = {"engine": {"num_replicas": COUNT}, "weights": {"transport": "gloo"}}
    application = {"name": "slipstream", "import_path": "app.main:build"}
    document = {
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [{**application, "args": settings(model, tmp_path / "state", changes)}],
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(document))
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\nslipstream status --json >{tmp_path}/seen\nexit 7\n")
    command.chmod(0o755)
    try:
        with Hosts.made(COUNT, [tmp_path]) as hosts:
            (tmp_path / "srun").write_text(srun(hosts))
            (tmp_path / "srun").chmod(0o755)
            variables = {
                "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "SLIPSTREAM_TOKEN": "a-token-of-these-hosts",
                "SLURM_NNODES": str(COUNT),
                "HEAD": hosts[0].address,
            }
            # Outside of the hosts, so that `srun` reaches all of them.
            done = subprocess.run(
                ["bash", "deploy/slurm/fleet.sbatch", str(tmp_path / "fleet.yaml"), str(command)],
                cwd=ROOT,
                env=users_environment(**variables),
                timeout=RUN_S,
            )
    except NotPossible as error:
        pytest.skip(str(error))
    assert done.returncode == 7
    seen = json.loads((tmp_path / "seen").read_text())
    assert any(member["admitted"] for member in seen["members"])


def srun(hosts: Hosts) -> str:
    """A script that runs its command, which begins with `ray`, on each host, and ends with the first."""
    first, *others = [" ".join(host.command()) for host in hosts]
    lines = [f'{each} "$@" &' for each in others]
    return "\n".join(["#!/bin/bash", 'while [ "$1" != ray ]; do shift; done', *lines, f'exec {first} "$@"\n'])
