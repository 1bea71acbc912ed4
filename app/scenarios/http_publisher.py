"""An outside trainer drives the fleet with vLLM's own HTTP client, as if the fleet were one `vllm serve`.

    python -m app.scenarios.http_publisher --model CHECKPOINT --transport nccl

Loads a checkpoint with transformers, publishes it, and prints the fleet's answers and versions before and
after. The transport is the one that the fleet was configured with:

    nccl, ipc                         vLLM's own trainer engines; the fleet has `staging: none`
    slipstream_nccl, slipstream_ipc   ours; `staging: device` or `host`
    gloo, shm                         ours, for fleets on CPUs

`nccl` wants a GPU of its own, `ipc` the one that the replicas are on (and for vLLM's own engine, which
pickles its handles, a fleet with `weights.allow_pickled_ipc_over_http`).
"""

import argparse
import socket
import sys
import time
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from app.scenarios.service import Service, token_from
from deployments.vllm_plugin import register

ON_CPU = ("shm", "gloo")
TRANSPORTS = ("nccl", "ipc", "slipstream_nccl", "slipstream_ipc", *ON_CPU)
PROMPTS = ("The capital of France is", "Two and two make")


class TokenClient(HTTPVLLMWeightSyncClient):
    """vLLM's client knows no tokens: this one sends the fleet's along."""

    def __init__(self, service: Service, timeout_s: float) -> None:
        super().__init__(service.url, timeout=timeout_s)
        self._headers = service.headers

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        answer = requests.post(
            f"{self.base_url}/{path}", json=json, timeout=self.timeout, headers=self._headers
        )
        if not answer.ok:
            raise RuntimeError(f"/{path}: {answer.status_code}: {answer.text}")


def init_info(transport: str, workers: int, address: str) -> TrainerInitInfo:
    """
    Args:
        workers: of the whole fleet, as `/get_world_size` counts them.
        address: of this host, where the fleet's workers meet this process.
    """
    size, port = 1 + workers, free_port()
    match transport:
        case "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            # One buffer: vLLM 0.32's packed receiver does not order its streams.
            return NCCLTrainerInitInfo(address, port, size, rank=0, packed_num_buffers=1)
        case "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0)
        case "slipstream_nccl":
            from deployments.weights.transports.nccl import NcclTrainerInitInfo

            return NcclTrainerInitInfo(address, port, size, rank=0)
        case "slipstream_ipc":
            from deployments.weights.transports.ipc import IpcTrainerInitInfo

            return IpcTrainerInitInfo(size, rank=0)
        case "gloo":
            from deployments.weights.transports.gloo import GlooTrainerInitInfo

            return GlooTrainerInitInfo(address, port, size, rank=0)
        case "shm":
            from deployments.weights.transports.shm import ShmTrainerInitInfo

            return ShmTrainerInitInfo(rank=0)
    raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}")


def load(model: str, transport: str, dtype: str) -> torch.nn.Module:
    """Raises ValueError if the transport needs a GPU and this process has none."""
    if transport not in ON_CPU and not torch.cuda.is_available():
        raise ValueError(f"transport {transport!r} needs a GPU in this process, and there is none")
    device = "cpu" if transport in ON_CPU else "cuda:0"
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def show(service: Service, when: str, tokens: int) -> None:
    for prompt in PROMPTS:
        answer = service.answer(service.tokenize(prompt), tokens)
        print(f"{when}: version {answer.version}: {prompt!r} -> {answer.text!r}", flush=True)


def add_noise(model: torch.nn.Module, amount: float, generator: torch.Generator) -> None:
    """What a training step would do: other weights, of the same size."""
    if amount == 0:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            scale = amount * parameter.float().abs().mean()
            parameter.add_((noise.to(parameter.device) * scale).to(parameter.dtype))


def publish(engine: TrainerWeightTransferEngine[Any], service: Service) -> None:
    begin = time.perf_counter()
    engine.send_weights()
    seconds = time.perf_counter() - begin
    last = service.get("/fleet/rounds")["rounds"][-1]
    gaps = ", ".join(f"{name} {1000 * t['gap_s']:.0f} ms" for name, t in last["replicas"].items())
    print(f"round {last['round_id']}: version {last['version']} in {seconds:.2f} s, gaps: {gaps}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    register()
    service = Service(options.url, token_from())
    workers = int(service.get("/get_world_size")["world_size"])
    print(f"fleet: {workers} workers, version {service.version()}", flush=True)
    model = load(options.model, options.transport, options.dtype)
    show(service, "before", options.tokens)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info(options.transport, workers, options.address),
        client=TokenClient(service, options.timeout),
        source=ModuleSource(model),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.rounds):
        add_noise(model, options.noise, generator)
        publish(engine, service)
        show(service, "after", options.tokens)
    if options.save is not None:
        model.save_pretrained(options.save)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.save)
    # Ends the fleet's side too; a group whose peer is gone cannot be used again.
    service.post("/shutdown_weight_transfer_engine")
    engine.shutdown()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint directory or hub id, dense")
    parser.add_argument("--transport", required=True, choices=TRANSPORTS)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the fleet")
    parser.add_argument("--address", default="127.0.0.1", help="of this host, as the replicas reach it")
    parser.add_argument("--dtype", default="auto", help="of the weights that are sent; auto: as stored")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0, help="changes the weights before each round")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer that is shown")
    parser.add_argument("--timeout", type=float, default=300.0, help="of one call to the fleet, seconds")
    parser.add_argument("--save", help="directory for a checkpoint of what was published last")
    return parser.parse_args(arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"http_publisher: {error}")
