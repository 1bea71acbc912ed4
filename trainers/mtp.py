"""Qwen3.5's multi-token prediction, as vLLM's `Qwen3_5MTP`. transformers' models leave it out.

One decoder layer reads the model's last hidden states. Slot i has position i's state and token i + 1's
embedding, and predicts token i + 2. Embeddings and output layer are the model's.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from trainers.eagle3 import Mask, load_in_place
from trainers.sources import MTP

MODEL_TYPE = "qwen3_5_text"
_ATTENTION = "full_attention"


class MtpHead(nn.Module):
    """The head; its state has the names and shapes of the checkpoint, without the prefix.

    Args:
        config: of the model of text; copied.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.config.layer_types = [_ATTENTION]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(self.config, layer_idx=0)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self._rotations = Qwen3_5TextRotaryEmbedding(self.config)

    @property
    def decoder(self) -> nn.Module:
        return self.layers[0]

    def fuse(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `forward` reads of the model's last hidden states, [R, L, H]."""
        made: torch.Tensor = self.pre_fc_norm_hidden(hidden[0])
        return made

    def forward(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """What the output layer reads, [R, L, H]; see `Eagle3Head.forward`."""
        hidden = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), fused], dim=-1))
        rotations = self._rotations(hidden, position_ids=positions)
        made: torch.Tensor = self.norm(
            self.decoder(hidden, position_embeddings=rotations, attention_mask=mask)
        )
        return made


def read_head(config: PreTrainedConfig, directory: Path) -> MtpHead:
    """In float32. Raises ValueError: absent from the model or its checkpoint, or a kind not trained here."""
    layers = getattr(config, "mtp_num_hidden_layers", 1)
    if config.model_type != MODEL_TYPE or layers != 1:
        raise ValueError(
            f"{directory}: expected a dense Qwen3.5 with one layer of multi-token prediction, got "
            f"{config.model_type!r} with {layers}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                if name.startswith(MTP):
                    tensors[name.removeprefix(MTP)] = stored.get_tensor(name)
    head = MtpHead(config)
    load_in_place(head, tensors, directory)
    return head
