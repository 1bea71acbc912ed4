"""The multi-token prediction in a model's checkpoint, as vLLM drafts with it. transformers' models leave it
out.

One decoder layer of the model's kind reads the model's last hidden states. Slot i has position i's state and
token i + 1's embedding, and predicts token i + 2. Embeddings and output layer are the model's.
"""

import copy
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trainers.eagle3 import Mask, load_in_place
from trainers.layers import decoder_layers
from trainers.sources import MTP

_QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # theirs is named as one more layer of the model
_NAMES_OF_DEEPSEEK = {
    "fc.": "eh_proj.",
    "layers.0.": "",
    "norm.": "shared_head.norm.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # vLLM reads the model's instead
_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class MtpHead(nn.Module):
    """The head, with Qwen's names.

    Args:
        model: of one of the families above; its rotations are shared.
        stored: names in the checkpoint.
    """

    def __init__(self, model: PreTrainedModel, stored: Collection[str]) -> None:
        super().__init__()
        base, config = model.base_model, copy.deepcopy(model.config.get_text_config())
        depth, width = config.num_hidden_layers, config.hidden_size
        config.layer_types = ["full_attention"] * depth
        self.config = config
        of_norms: Any = type(base.norm)
        norm = partial(of_norms, width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([type(decoder_layers(base)[-1])(config, depth - 1)])
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = norm(), norm(), norm()
        self._rotations = base.rotary_emb
        self._is_qwen = config.model_type in _QWEN
        self._has_fused_experts = any(name.endswith(".experts.down_proj") for name in stored)

    @property
    def decoder(self) -> nn.Module:
        return self.layers[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """With the names and shapes of the checkpoint, in the head's memory."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_dict().items():
            module, _, last = name.rpartition(".")
            if not module.endswith(".experts") or self._has_fused_experts:
                found[self._stored_name(name)] = tensor
                continue
            for number, expert in enumerate(tensor):
                for part, rows in zip(_EXPERTS[last], expert.chunk(len(_EXPERTS[last])), strict=True):
                    found[self._stored_name(f"{module}.{number}.{part}.weight")] = rows
        return found

    def fuse(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `forward` reads of the model's last hidden states, [R, L, H]."""
        made: torch.Tensor = self.pre_fc_norm_hidden(hidden[0])
        return made

    def forward(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """What the output layer reads, [R, L, H]; see `Eagle3Head.forward`."""
        if not self._is_qwen:
            embeddings = embeddings.masked_fill(positions[..., None] == 0, 0)
        hidden = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), fused], dim=-1))
        rotations = self._rotations(hidden, position_ids=positions)
        made: torch.Tensor = self.norm(
            self.decoder(hidden, position_embeddings=rotations, attention_mask=mask)
        )
        return made

    def _stored_name(self, name: str) -> str:
        if not self._is_qwen:
            own = next(own for own in _NAMES_OF_DEEPSEEK if name.startswith(own))
            name = _NAMES_OF_DEEPSEEK[own] + name.removeprefix(own)
        return _prefix(self.config) + name


def read_head(model: PreTrainedModel, directory: Path) -> MtpHead:
    """In float32. Raises ValueError: absent from the model or its checkpoint, or a kind not trained here."""
    config = model.config.get_text_config()
    kinds = (*_QWEN, *_DEEPSEEK)
    layers = next((getattr(config, name) for name in _LAYERS if hasattr(config, name)), 1)
    if config.model_type not in kinds or layers != 1:
        raise ValueError(
            f"{directory}: expected one layer of multi-token prediction, of {', '.join(kinds)}, got {layers} "
            f"of {config.model_type!r}"
        )
    tensors: dict[str, torch.Tensor] = {}
    prefix = _prefix(config)
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                if name.startswith(prefix) and name.removeprefix(prefix) not in _COPIES:
                    tensors[name] = stored.get_tensor(name)
    head = MtpHead(model, tensors)
    load_in_place(head.tensors(), tensors, directory)
    return head


def _prefix(config: PreTrainedConfig) -> str:
    """Of the checkpoint's names."""
    return MTP if config.model_type in _QWEN else f"model.layers.{config.num_hidden_layers}."
