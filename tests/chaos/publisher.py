"""An outside trainer, a process of its own: publishes what it is told, and can be held in the middle.

    python -m tests.chaos.publisher URL [ADDRESS]

Reads lines of JSON, `{"mark": 7, "hold": "tensors", "digits": 3}`, and publishes the weights of the mark,
labelled `mark-007`; over `gloo` if it gets an address of this machine. With `hold` it stops before the last
tensors or before the round is closed, says so, and continues at the next line. After each round it prints one
line: `{"mark": 7, "ended": true, "error": null}`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import requests
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from deployments.vllm_plugin import register
from deployments.vllm_versions import Source
from deployments.weights.transports.gloo import GlooTrainerInitInfo
from deployments.weights.transports.ipc import IpcTrainerInitInfo
from deployments.weights.transports.shm import ShmTrainerInitInfo
from tests.chaos.marked_weights import tensors
from tests.free_ports import free_ports

CHUNK_BYTES = 1 << 16  # several payloads a round
TIMEOUT_S = 150.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def held(mark: int, where: str) -> None:
    """Say where the round of the mark stands; return when it is told to go on."""
    say(mark=mark, held=where)
    sys.stdin.readline()


class MarkedSource(Source):
    """The tensors of a mark."""

    def __init__(self, mark: int, hold: str | None) -> None:
        self._tensors = {name: tensor.to(DEVICE) for name, tensor in tensors(mark).items()}
        self._mark = mark
        self._hold = hold

    def specs(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        last = len(self._tensors) - 2
        for index, pair in enumerate(self._tensors.items()):
            if index == last and self._hold == "tensors":
                held(self._mark, "tensors")
            yield pair


class Client(HTTPVLLMWeightSyncClient):
    """vLLM's client, which labels a version with its mark."""

    def __init__(self, url: str, mark: int, hold: str | None, digits: int) -> None:
        super().__init__(url, timeout=TIMEOUT_S)
        self._mark = mark
        self._digits = digits
        self._hold = hold

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self._hold == "finish":
            held(self._mark, "finish")
        super().finish_weight_update(f"mark-{self._mark:0{self._digits}d}")


def publish(url: str, addresses: Sequence[str], mark: int, hold: str | None, digits: int) -> None:
    info: TrainerInitInfo = ShmTrainerInitInfo(rank=0, chunk_bytes=CHUNK_BYTES)
    if addresses or DEVICE == "cuda":
        size = 1 + int(requests.get(f"{url}/get_world_size", timeout=TIMEOUT_S).json()["world_size"])
        info = IpcTrainerInitInfo(rank=0, world_size=size, chunk_bytes=CHUNK_BYTES)
    for address in addresses:
        info = GlooTrainerInitInfo(
            rank=0,
            master_address=address,
            master_port=free_ports(1)[0],
            world_size=size,
            chunk_bytes=CHUNK_BYTES,
        )
    client = Client(url, mark, hold, digits)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=MarkedSource(mark, hold))
    engine.send_weights()


def main() -> None:
    register()
    say(ready=True)
    while line := sys.stdin.readline():
        wanted = json.loads(line)
        try:
            publish(sys.argv[1], sys.argv[2:], wanted["mark"], wanted["hold"], wanted["digits"])
        except requests.RequestException as error:
            answer = getattr(error, "response", None)
            why = f"{error}" if answer is None else answer.text[:400]
            say(mark=wanted["mark"], ended=True, error=why)
        else:
            say(mark=wanted["mark"], ended=True, error=None)


if __name__ == "__main__":
    main()
