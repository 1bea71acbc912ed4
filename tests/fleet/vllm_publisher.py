"""An outside trainer that knows nothing of Slipstream: vLLM's trainer engines, client and source as they are.

    python -m tests.fleet.vllm_publisher --url http://127.0.0.1:8000 --model CHECKPOINT --engine nccl --packed

Prints a JSON line for each round; with `--hold-at` it stops in the middle of the last one, says so, and goes
on when a line comes in.
"""

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

HOLDING = "in the middle of a round"
Tensors = Iterator[tuple[str, torch.Tensor]]


class Holding(ModuleSource):
    """vLLM's source; waits for a line before the tensor with the number `hold_at`, if there is one."""

    hold_at: int | None = None

    def __iter__(self) -> Tensors:  # vLLM 0.32 iterates over a source
        return self._held(super().__iter__())

    def iter_full(self) -> Tensors:  # 0.33 calls this
        return self._held(super().iter_full())

    def _held(self, tensors: Tensors) -> Tensors:
        for index, pair in enumerate(tensors):
            if index == self.hold_at:
                torch.cuda.synchronize()
                print(HOLDING, flush=True)
                sys.stdin.readline()
            yield pair


def init_info(arguments: argparse.Namespace, workers: int) -> TrainerInitInfo:
    # With the default of 1 GiB a tiny model would be one piece.
    sizes = {"packed_buffer_size_bytes": arguments.buffer_bytes} if arguments.packed else {}
    if arguments.engine == "ipc":
        return IPCTrainerInitInfo(rank=0, packed=arguments.packed, **sizes)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0,
        master_address="127.0.0.1",
        master_port=port,
        world_size=1 + workers,
        packed=arguments.packed,
        **sizes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--buffer-bytes", type=int, default=1 << 17)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hold-at", type=int, help="in the last round, before the tensor of this number")
    parser.add_argument("--save")
    arguments = parser.parse_args()
    workers = requests.get(f"{arguments.url}/get_world_size", timeout=30).json()["world_size"]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").to("cuda:0").eval()
    source = Holding(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info(arguments, workers),
        client=HTTPVLLMWeightSyncClient(arguments.url, timeout=240),
        source=source,
    )
    for index in range(arguments.rounds):
        if index:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0 + 0.05 * torch.randn_like(parameter))
        source.hold_at = arguments.hold_at if index == arguments.rounds - 1 else None
        torch.cuda.synchronize()  # vLLM's packed sender does not wait for what is queued
        begin = time.perf_counter()
        engine.send_weights()
        print(json.dumps({"round": index, "seconds": round(time.perf_counter() - begin, 4)}), flush=True)
    if arguments.save is not None:
        model.save_pretrained(arguments.save)
        AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.save)
    requests.post(f"{arguments.url}/shutdown_weight_transfer_engine", timeout=60).raise_for_status()
    engine.shutdown()


if __name__ == "__main__":
    main()
