import re
from pathlib import Path
from typing import Any

import pytest

from app.command.deploy import read_serve_file
from app.command.machine import build_for
from app.main import slot_plan
from app.settings.config import AppConfig, parse_config
from app.settings.gpus import check_gpus, total_gpus
from app.settings.section import ConfigError


def colocated(replicas: int, workers: int) -> AppConfig:
    return parse_config(
        {
            "model": "m",
            "device": "cuda",
            "placement": "colocated",
            "state_dir": "/var/lib/slipstream",
            "engine": {"num_replicas": replicas, "data_parallel_size": workers, "gpus_per_rank": 0.6},
            "weights": {"transport": "ipc", "staging": "device"},
            "trainer": {"strategy": "fsdp2", "world_size": replicas * workers, "gpus_per_rank": 0.4},
        }
    )


def separate(trainer: dict[str, Any] | None, **engine: Any) -> AppConfig:
    return parse_config(
        {
            "model": "m",
            "device": "cuda",
            "engine": engine,
            "weights": {"transport": "nccl", "staging": "device"},
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (colocated(4, 1), 4),
        (colocated(1, 4), 4),
        (separate({}, num_replicas=1, tensor_parallel_size=2), 3),
        (separate(None, num_replicas=2), 2),
        (separate(None, num_replicas=2, gpus_per_rank=0.4), 1),
        (parse_config({"model": "m"}), 0),
    ],
)
def test_gpus_are_counted_once_though_two_share_them(config: AppConfig, count: int) -> None:
    hosts = [float(count)] if count else []
    check_gpus(config, hosts)
    if count:
        assert total_gpus(config) == count
        with pytest.raises(ConfigError, match=f"at least {count} GPUs .* got one with {count - 1}$"):
            check_gpus(config, [float(count - 1)])


def test_gpus_of_several_hosts_do_not_make_a_colocated_fleet() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^expected a Ray cluster with at least 4 GPUs on one host \(engine.num_replicas 2 of 2 ranks, "
        r"shared with the trainer\), got 3 of 6 on its largest host$",
    ):
        check_gpus(colocated(2, 2), [3.0, 3.0])
    check_gpus(separate({}, num_replicas=2, tensor_parallel_size=2), [3.0, 2.0])
    with pytest.raises(ConfigError, match=r"at least 2 GPUs on one host .* got 1 of 2 on"):
        check_gpus(separate(None, num_replicas=1, tensor_parallel_size=2), [1.0, 1.0])


def test_a_transport_of_one_host_is_refused_where_ray_may_place_replicas_on_another() -> None:
    config = separate({}, num_replicas=2).model_copy(update={"weights": colocated(1, 1).weights})
    check_gpus(config, [3.0, 0.0])
    expected = (
        r"^'weights\.transport': expected 'nccl' with placement 'separate' and GPUs on 2 hosts, "
        r"got 'ipc' \(it connects the GPUs of one host, and Ray places replicas on any\)$"
    )
    with pytest.raises(ConfigError, match=expected):
        check_gpus(config, [4.0, 4.0])
    check_gpus(colocated(2, 2), [4.0, 4.0])
    check_gpus(separate(None, num_replicas=2).model_copy(update={"weights": config.weights}), [1.0, 1.0])


def test_slots_are_what_replicas_and_ranks_share() -> None:
    plan = slot_plan(colocated(2, 2))
    assert plan is not None
    assert (plan.slots, plan.gpus_per_slot, plan.gpus) == (2, 2, 4)
    assert (plan.engine_share, plan.trainer_share) == (0.6, 0.4)
    again = slot_plan(colocated(4, 1))
    assert again is not None and again.name == plan.name, "one group for each fleet, whatever its size"
    assert slot_plan(separate({}, num_replicas=2)) is None


@pytest.mark.parametrize("file", sorted(Path("app/layouts").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_layout_needs_as_many_gpus_as_its_comment_and_the_page_say(file: Path) -> None:
    config = read_serve_file(file).config
    needed = total_gpus(config)
    check_gpus(config, [float(needed)])
    with pytest.raises(ConfigError, match=f"at least {needed} GPUs"):
        check_gpus(config, [needed - 1.0])
    text = file.read_text()
    assert build_for(text) == "gpu" and f"serve run app/layouts/{file.name}" in text, "its comment's command"
    said = re.search(r"^# Needs (\d) GPUs? of \d+ GB", text, re.MULTILINE)
    assert said is not None and int(said[1]) == needed
    page = Path("docs/guides/sizing.md").read_text()
    rows = (line.split("|")[1:3] for line in page.splitlines() if ".yaml` |" in line)
    counts = {
        name: int(count)
        for names, numbers in rows
        for name, count in zip(re.findall(r"`(\S+?)`", names), numbers.split(","), strict=True)
    }
    outside = file.stem == "http_nccl"  # its trainer has a GPU of its own, which is not the fleet's
    assert counts[file.name] == needed + outside
