"""An EAGLE-3 head (https://arxiv.org/abs/2503.01840) in vLLM's format, `LlamaForCausalLMEagle3`.

One decoder layer reads hidden states of some of the model's layers. Slot i has position i's hidden states and
token i + 1's embedding, and predicts token i + 2. The embeddings are the model's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from trainers.model_config import attribute, end_token_ids, needed, vocabulary_size

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # vLLM treats these the same
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Settings of variants, with the only values trained here.
_PLAIN = {
    "num_hidden_layers": 1,
    "norm_before_fc": False,
    "fc_norm": False,
    "logit_scale": 1.0,
    "quantization_config": None,
}
Mask: TypeAlias = torch.Tensor | BlockMask


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention also reads the embeddings."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, bias = getattr(self.self_attn, name).out_features, config.attention_bias
            setattr(self.self_attn, name, nn.Linear(2 * width, rows, bias=bias))
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self.mlp = LlamaMLP(config)
        self._normed_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        attended, _ = self.self_attn(
            torch.cat([self.input_layernorm(embeddings), normed], dim=-1),
            position_embeddings=rotations,
            attention_mask=mask,
        )
        hidden = attended + (normed if self._normed_residual else hidden)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """The head; its state has the names and shapes of the checkpoint.

    Attributes:
        layers: how many of the model's layers a hidden state has passed, for each that the head reads,
            ascending. Empty: vLLM's default for the model, three.
        d2t: int64 [draft vocabulary], what is added to a token of the draft vocabulary; None: nothing.
        t2d: bool [vocabulary], which tokens are in it; nothing reads it.
    """

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: LlamaConfig, *, has_d2t: bool = False, has_t2d: bool = False) -> None:
        super().__init__()
        self.config = config
        nested = (getattr(config, "eagle_config", None) or {}).get(_LAYERS)
        self.layers: list[int] = sorted(getattr(config, _LAYERS, None) or nested or ())
        width = config.hidden_size
        rows = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear((len(self.layers) or 3) * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64) if has_d2t else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if has_t2d else None)
        self._rotations = LlamaRotaryEmbedding(config)

    @property
    def decoder(self) -> nn.Module:
        return self.midlayer

    def fuse(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """What `forward` reads of the model's hidden states, each [R, L, H]."""
        made: torch.Tensor = self.fc(torch.cat([*hidden], dim=-1))
        return made

    def forward(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """What `lm_head` reads, [R, L, H]. `embeddings` and `fused` are [R, L, H], `positions` int64 [R, L];
        the mask is as for a model of transformers."""
        rotations = self._rotations(fused, position_ids=positions)
        return self.norm(self.midlayer(embeddings, fused, rotations, mask))

    def token_ids(self) -> torch.Tensor:
        """The model's tokens, int64 [draft vocabulary]."""
        ids = torch.arange(self.lm_head.out_features, device=self.lm_head.weight.device)
        return ids if self.d2t is None else ids + self.d2t


@torch.no_grad()
def load_in_place(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Copy a checkpoint's tensors to a head's. Raises ValueError, without changes, unless they are all of
    them."""
    for name in sorted(own.keys() | tensors.keys()):
        wanted, got = (
            f"shape {list(each[name].shape)}" if name in each else "none" for each in (own, tensors)
        )
        if wanted != got:
            raise ValueError(f"{source}: the drafter's {name!r}: expected {wanted}, got {got}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def read_head(directory: Path) -> Eagle3Head:
    """In float32. Raises ValueError: files or tensors are absent, or it is a variant that is not trained
    here."""
    lacks = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if lacks:
        raise ValueError(f"expected the directory of an EAGLE-3 head, got {directory}, without {lacks[0]}")
    config = LlamaConfig.from_pretrained(directory)
    try:
        tensors = load_file(directory / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    found = {name: getattr(config, name, plain) for name, plain in _PLAIN.items()}
    found |= (getattr(config, "eagle_config", None) or {}) | {"architectures": config.architectures}
    wanted = {**_PLAIN, "use_aux_hidden_state": True}
    if not set(config.architectures or ()) & set(_ARCHITECTURES):
        raise ValueError(f"{directory}: expected architecture {ARCHITECTURE}, got {config.architectures}")
    for name, plain in wanted.items():
        if (got := found.get(name, plain)) != plain:
            raise ValueError(f"{directory}: expected an EAGLE-3 head with {name} {plain}, got {got}")
    if "embed_tokens.weight" in tensors:
        raise ValueError(
            f"{directory}: expected a head without embeddings of its own, got 'embed_tokens.weight' (remove "
            "it from the checkpoint: the head reads the model's)"
        )
    head = Eagle3Head(config, has_d2t="d2t" in tensors, has_t2d="t2d" in tensors)
    load_in_place(head.state_dict(), tensors, directory)
    return head


def new_config(of_model: PreTrainedConfig, draft_vocabulary: int | None = None) -> LlamaConfig:
    """See `write_new_head`."""
    heads, depth = needed(of_model, "num_attention_heads"), needed(of_model, "num_hidden_layers")
    width, vocabulary = needed(of_model, "hidden_size"), vocabulary_size(of_model)
    inner = attribute(of_model, "intermediate_size")
    layers = sorted({min(max(1, each), depth) for each in default_layers(depth)})
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        max_position_embeddings=needed(of_model, "max_position_embeddings"),
        intermediate_size=inner if isinstance(inner, int) else 4 * width,  # a list where layers differ
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=attribute(of_model, "num_key_value_heads", heads),
        head_dim=attribute(of_model, "head_dim", width // heads),
        rms_norm_eps=attribute(of_model, "rms_norm_eps", 1e-5),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": attribute(of_model, "rope_parameters", {}).get("rope_theta", 1e4),
        },
        tie_word_embeddings=False,
        architectures=[ARCHITECTURE],
        dtype="float32",
        draft_vocab_size=vocabulary if draft_vocabulary is None else draft_vocabulary,
        **{_LAYERS: layers},
        num_aux_hidden_states=len(layers),  # vLLM expects three otherwise
    )


def write_new_head(
    model: Path, directory: Path, *, draft_vocabulary: int | None = None, seed: int = 0
) -> Eagle3Head:
    """Write a head with random weights, except `lm_head`, which is close to the model's.

    Args:
        draft_vocabulary: it drafts no other tokens than the lowest, which a BPE tokenizer found first, and
            those that end an answer. None: all of the model's.

    Raises ValueError: the directory exists, or the model is none of transformers' in safetensors files.
    """
    if directory.exists():
        raise ValueError(f"expected a directory that does not exist, got {directory}")
    of_model = AutoConfig.from_pretrained(model)
    ends, vocabulary = end_token_ids(of_model), vocabulary_size(of_model)
    config = new_config(of_model, draft_vocabulary)
    count = config.draft_vocab_size
    if not len(ends) < count <= vocabulary:
        raise ValueError(
            f"expected a draft vocabulary of {len(ends) + 1} to {vocabulary} tokens, got {count}"
        )
    lowest = [each for each in range(vocabulary) if each not in ends][: count - len(ends)]
    ids = torch.tensor(sorted([*lowest, *ends]))
    head = Eagle3Head(config, has_d2t=count < vocabulary)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=attribute(of_model, "initializer_range", 0.02), generator=generator)
        # Not equal to the model's: vLLM would share that one, and not use the trained one.
        head.lm_head.weight.mul_(1e-2).add_(_output_rows(model, ids))
        if head.d2t is not None:
            head.d2t.copy_(ids - torch.arange(count))
    directory.mkdir(parents=True)
    write_head(head, directory)
    return head


def write_head(head: Eagle3Head, directory: Path) -> None:
    """Into an existing directory. Raises OSError."""
    head.config.save_pretrained(directory)
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in head.state_dict().items()}
    try:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def default_layers(depth: int) -> list[int]:
    """vLLM's, for a head whose configuration does not say which it reads."""
    return [2, depth // 2, depth - 3]


def _output_rows(model: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of the output matrix, or of the embeddings it is tied to."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if name.endswith(("lm_head.weight", "embed_tokens.weight")):
                    found[name.split(".")[-2]] = tensors.get_tensor(name)
    if not found:
        raise ValueError(f"expected a checkpoint with 'lm_head.weight' or 'embed_tokens.weight', got {model}")
    return found.get("lm_head", found.get("embed_tokens"))[ids].float()  # type: ignore[index]
