import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import random_model, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.serve, pytest.mark.timeout(400)]

PROMPTS = [[7 + i, 11, 13 + i, 17] * (3 + i) for i in range(4)]
TOKENS = 32

SCENES = {
    "dense": ("0.6b", False, {}),
    "tied": ("0.6b", True, {}),
    "graphs": ("0.6b", False, {"enforce_eager": False}),
    "experts": ("moe", False, {}),
    "fp8": ("0.6b", False, {"quantization": "fp8"}),
    "fp8-experts": ("moe", False, {"quantization": "fp8"}),
}


def checkpoint(directory: Path, size: str, seed: int, tied: bool) -> Path:
    import torch

    target = directory / f"{size}-{seed}-{tied}"
    random_model(size, seed, "cuda", tied=tied).save_pretrained(target)
    write_config(size, target, tied=tied)
    torch.cuda.empty_cache()
    return target


async def greedy(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    answers = []
    for index, prompt in enumerate(PROMPTS):  # one at a time: the same batch shapes on both engines
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens: list[int] = []
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, params, request_id=f"g{index}"):
            tokens = list(output.outputs[0].token_ids)
        answers.append(tokens)
    return answers


def gpu_of_this_process() -> int:
    """Its index on the machine."""
    return int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0])


async def three_rounds(tmp_path: Path, size: str, tied: bool, arguments: dict[str, Any]) -> None:
    from benchmarks.trainer_process import TrainerProcess
    from benchmarks.weight_sync import Ours, start_engine

    chosen = {"enforce_eager": True, "gpu_memory_utilization": 0.15, **arguments}
    # A fixed size: other processes on this GPU would disturb vLLM's profile of free memory.
    chosen |= {"kv_cache_memory_bytes": 2 << 30}
    engine = await start_engine(
        str(checkpoint(tmp_path, size, 1, tied)), "slipstream_ipc", "device", **chosen
    )
    trainer = TrainerProcess(size, 1, gpu=gpu_of_this_process(), tied=tied)
    link = Ours(engine)
    await trainer.connect(link, "slipstream_ipc", 1, chunk_bytes=64 << 20)
    answers = [await greedy(engine)]
    for seed in (2, 4, 3):
        await trainer.send(link, seed)
        answers.append(await greedy(engine))
    assert engine.version == 3
    plans = await engine.workers("staging_plans")
    if "quantization" not in arguments and size != "moe":  # else loading ends with a computation
        assert all(chunks > 0 and not refused for chunks, refused in plans), plans
    published = await engine.llm.compute_weight_checksums()
    await engine.stop()
    trainer.stop()
    fresh = await start_engine(str(checkpoint(tmp_path, size, 3, tied)), "slipstream_ipc", "device", **chosen)
    expected = await greedy(fresh)
    (loaded,) = await fresh.llm.compute_weight_checksums()
    await fresh.stop()
    differing = [name for name, checksum in published[0].items() if loaded[name] != checksum]
    assert answers[-1] == expected, f"tensors with other checksums: {differing}"
    assert len({str(answer) for answer in answers}) == 4, "a round changed nothing"


@pytest.mark.parametrize("scene", SCENES)
def test_three_rounds_leave_what_a_fresh_engine_would_compute(
    scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, tied, arguments = SCENES[scene]
    if size != "moe" and "quantization" not in arguments:
        monkeypatch.setitem(os.environ, "VLLM_BATCH_INVARIANT", "1")
    asyncio.run(three_rounds(tmp_path, size, tied, dict(arguments)))


async def rounds_of_differences(tmp_path: Path, gpus: list[str]) -> None:
    from benchmarks.trainer_process import TrainerProcess
    from benchmarks.weight_sync import Ours, start_engine
    from deployments.weights.transports.registry import KeepPublished

    write_config("0.6b", tmp_path)
    engine = await start_engine(
        str(tmp_path),
        "slipstream_nccl",
        "device",
        load_format="dummy",
        enforce_eager=True,
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=2 << 30,
    )
    trainer = TrainerProcess("0.6b", 1, gpu=int(gpus[0]))
    link = Ours(engine)
    keep = {"keep_published": KeepPublished.DEVICE}
    await trainer.connect(link, "slipstream_nccl", 1, chunk_bytes=64 << 20, wire=keep)
    live, sizes = [], []
    for changed in (0.0, 0.03, 0.03, 0.03):
        await trainer.send(link, changed=changed)
        sizes.append(link.arrived_bytes / trainer.size_bytes)
        live.append(str(await engine.llm.compute_weight_checksums()))
    assert sizes[0] >= 1 and max(sizes[1:]) < 1 / 15
    assert len(set(live)) == 4
    await trainer.connect(link, "slipstream_nccl", 1)
    await trainer.send(link)
    assert link.arrived_bytes >= trainer.size_bytes
    assert live[-1] == str(await engine.llm.compute_weight_checksums())
    await engine.stop()
    trainer.stop()


def test_rounds_of_differences_leave_what_a_whole_round_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    if len(gpus) < 2 or torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs one GPU per rank")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])  # the engine's
    asyncio.run(rounds_of_differences(tmp_path, gpus))


def test_a_shadow_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    import torch

    from deployments.weights.staging.device import check_memory

    class Config:
        class cache_config:
            gpu_memory_utilization = 0.00001

    model = torch.nn.Linear(1024, 1024, device="cuda")
    with pytest.raises(ValueError, match=r"needs a second copy of the weights, .* GiB .* raise gpu_memory"):
        check_memory(Config(), torch.device("cuda", 0), model)  # type: ignore[arg-type]
