"""How tests load adapters and ask for them, over HTTP as vLLM's clients do."""

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.fleet.deployed import MODEL
from tests.fleet.talk import PROMPT, Reference, body, from_every_replica, succeeded
from tests.tiny_adapters import tiny_adapter_tensors

COUNT = 24  # tokens of an answer


def load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def everywhere(client: httpx.Client, model: str, count: int = COUNT, **options: Any) -> list[dict[str, Any]]:
    """One answer of each of the two replicas."""
    asked = {**body(PROMPT, count, **options), "model": model}

    def ask(session: str) -> tuple[str, dict[str, Any]]:
        answer = succeeded(client.post("/v1/completions", json=asked, headers={"x-session-id": session}))
        return answer.headers["x-slipstream-replica"], answer.json()

    return list(from_every_replica(ask).values())


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def models(client: httpx.Client) -> list[set[str]]:
    """What each of the two replicas lists, without the base model."""

    def ask(session: str) -> tuple[str, set[str]]:
        answer = succeeded(client.get("/v1/models", headers={"x-session-id": session}))
        names = {each["id"] for each in answer.json()["data"]} - {MODEL}
        return answer.headers["x-slipstream-replica"], names

    return list(from_every_replica(ask).values())


def entries(client: httpx.Client) -> list[dict[str, Any]]:
    """Of `/fleet/adapters`."""
    return list(client.get("/fleet/adapters").json()["adapters"])


def newest(client: httpx.Client, name: str) -> int:
    return max(each["version"] for each in entries(client) if each["name"] == name)


class Merged(Reference):
    """transformers with the adapter added to the weights."""

    def __init__(self, checkpoint: Path, adapter: int | Path) -> None:
        """`adapter`: the seed of a tiny one, or the directory of any."""
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        parameters = dict(self._model.named_parameters())
        lora, scale = read_adapter(adapter)
        for name in {each.rsplit(".lora_", 1)[0] for each in lora}:
            weight = parameters[name.removeprefix("base_model.model.") + ".weight"]
            with torch.no_grad():
                weight += scale * lora[f"{name}.lora_B.weight"] @ lora[f"{name}.lora_A.weight"]


def read_adapter(adapter: int | Path) -> tuple[dict[str, torch.Tensor], float]:
    """Its tensors, and what their product is multiplied by."""
    if isinstance(adapter, int):
        return tiny_adapter_tensors(adapter), 1.0
    config = json.loads((adapter / "adapter_config.json").read_text())
    return load_file(adapter / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
