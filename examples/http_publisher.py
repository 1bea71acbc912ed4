"""An external trainer drives the fleet with vLLM's own HTTP client, as if the fleet were one `vllm serve`.

    python -m examples.http_publisher --model CHECKPOINT --transport nccl

Publishes a checkpoint, and prints the fleet's answers and versions before and after. The transport is the
fleet's:

    nccl, ipc                         vLLM's own trainer engines; `staging: none`, or `wire: vllm`
    slipstream_nccl, slipstream_ipc   ours; `staging: device` or `host`
    gloo, shm                         ours, for fleets on CPUs

`nccl` needs a GPU of its own, `ipc` the replicas' GPU (vLLM's own engine pickles its handles, and needs
`weights.allow_pickled_ipc_over_http`).
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from app.client import calls
from app.client.completions import complete
from app.client.connection import FleetClient, FleetError, token_from
from app.client.program_options import LOCAL_URL, Url, parse
from app.external_publisher import Publisher
from deployments.weights.transports.registry import BACKENDS, TRANSPORTS

ON_CPU = tuple(transport.backend for transport in TRANSPORTS.values() if transport.device == "cpu")
PROMPTS = ("The capital of France is", "Two and two make")
Backend = StrEnum("Backend", {name.upper(): name for name in BACKENDS})  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """An outside trainer drives the fleet with vLLM's own HTTP client, as if it were one `vllm serve`."""

    model: Annotated[str, typer.Option(help="a checkpoint directory or hub id, dense")]
    transport: Annotated[Backend, typer.Option(help="as the fleet is configured")]
    url: Url = LOCAL_URL
    address: Annotated[str, typer.Option(help="this host, as the replicas reach it")] = "127.0.0.1"
    dtype: Annotated[str, typer.Option(help="dtype that is sent; auto: as stored")] = "auto"
    rounds: Annotated[int, typer.Option(min=0)] = 1
    noise: Annotated[float, typer.Option(help="changes the weights before each round")] = 0.0
    tokens: Annotated[int, typer.Option(min=1, help="tokens per answer that is shown")] = 16
    timeout: Annotated[float, typer.Option(help="seconds per call")] = 300.0
    save: Annotated[
        Path | None, typer.Option(help="directory for a checkpoint of what was published last")
    ] = None


def load(model: str, transport: str, dtype: str) -> PreTrainedModel:
    """The model, on the device that the transport reads from."""
    if transport not in ON_CPU and not torch.cuda.is_available():
        raise ValueError(f"transport {transport!r} needs a GPU in this process, and there is none")
    device = "cpu" if transport in ON_CPU else "cuda:0"
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def show(fleet: FleetClient, when: str, tokens: int) -> None:
    """Print the fleet's answers to some prompts, and their versions."""
    model = fleet.send(calls.model())
    for prompt in PROMPTS:
        token_ids = fleet.send(calls.tokenize(model, prompt))
        answer = fleet.send(complete(model, token_ids, tokens)).answer
        print(f"{when}: version {answer.version}: {prompt!r} -> {answer.text!r}", flush=True)


def add_noise(model: torch.nn.Module, amount: float, generator: torch.Generator) -> None:
    """Change the weights, as a training step would."""
    if amount == 0:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            scale = amount * parameter.float().abs().mean()
            parameter.add_((noise.to(parameter.device) * scale).to(parameter.dtype))


def publish(publisher: Publisher) -> None:
    """One round, and its report."""
    begin = time.perf_counter()
    last = publisher.publish()
    seconds = time.perf_counter() - begin
    gaps = ", ".join(f"{name} {1000 * timings.gap_s:.0f} ms" for name, timings in last.replicas.items())
    print(f"round {last.round_id}: version {last.version} in {seconds:.2f} s, gaps: {gaps}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options, token = parse(PublisherOptions, arguments), token_from()
    with FleetClient.connect(options.url, token) as fleet:
        workers = fleet.send(calls.world_size())
        print(f"fleet: {workers} workers, version {fleet.send(calls.fleet()).committed_version}", flush=True)
        model = load(options.model, options.transport.value, options.dtype)
        show(fleet, "before", options.tokens)
        publisher = Publisher(
            options.url,
            model,
            transport=options.transport.value,
            token=token,
            address=options.address,
            timeout_s=options.timeout,
        )
        generator = torch.Generator().manual_seed(0)
        with publisher:
            for _ in range(options.rounds):
                add_noise(model, options.noise, generator)
                publish(publisher)
                show(fleet, "after", options.tokens)
        if options.save is not None:
            model.save_pretrained(options.save)
            AutoTokenizer.from_pretrained(options.model).save_pretrained(options.save)


if __name__ == "__main__":
    try:
        main()
    except (FleetError, RuntimeError, ValueError) as error:
        sys.exit(f"http_publisher: {error}")
