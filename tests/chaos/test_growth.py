"""The verdict of a soak: what grows is found, what only moves is not."""

import os
import random

from benchmarks.process_samples import MARK, MIB, Growth, Sample, Sampler, growth


def of(figure: str, values: list[float]) -> Growth:
    samples = [
        Sample(rounds=10 * index, pid=7, title="router", figures={figure: value})
        for index, value in enumerate(values)
    ]
    (found,) = growth(samples)
    return found


def test_a_file_that_stays_open_each_twenty_rounds_is_found() -> None:
    leak = of("files", [100 + index // 2 for index in range(60)])
    assert not leak.flat and 4.5 < leak.slope < 5.5


def test_a_leak_of_memory_is_found_under_noise() -> None:
    noise = random.Random(1)
    leak = of("pss_mib", [600 + 0.8 * index + noise.uniform(-5, 5) for index in range(60)])
    assert not leak.flat and 7 < leak.slope < 9


def test_a_warm_up_and_noise_are_flat() -> None:
    noise = random.Random(2)
    values = [200 + 30 * index for index in range(15)] + [650 + noise.uniform(-5, 5) for _ in range(45)]
    assert of("pss_mib", values).flat
    assert of("files", [80 + noise.randrange(6) for _ in range(60)]).flat


def test_one_more_segment_of_shared_memory_is_no_noise() -> None:
    assert not of("segments", [3.0 + index / 40 for index in range(60)]).flat
    assert of("segments", [3.0] * 60).flat


def test_a_process_that_ended_or_came_later_is_not_compared() -> None:
    samples = [Sample(rounds=index, pid=1, title="a", figures={"files": 1.0}) for index in range(40)]
    samples += [Sample(rounds=index, pid=2, title="b", figures={"files": 1.0}) for index in range(30, 40)]
    samples += [Sample(rounds=index, pid=3, title="c", figures={"files": 1.0}) for index in range(20)]
    assert {each.pid for each in growth(samples)} == {1}


def test_a_process_with_the_mark_is_sampled() -> None:
    import subprocess
    import sys

    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    environment = {**os.environ, MARK: "of-this-test"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sampler = Sampler("of-this-test")
        sampler.sample(0)
        process.kill()
    (found,) = [sample for sample in sampler.samples if sample.pid]
    assert found.pid == process.pid and found.figures["threads"] == 1 and found.figures["files"] >= 3
    assert 1 < found.figures["pss_mib"] <= found.figures["rss_mib"] < 1000 * MIB
