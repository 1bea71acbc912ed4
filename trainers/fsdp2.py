"""FSDP2 units: decoder layers, untied embeddings and output layer, and the rest.

All ranks must make the same forwards, backwards and parameter reads, which gather. The model is sharded on
the meta device; transformers' loader reads this rank's rows: no process holds the whole model.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trainers.layers import decoder_layers


def mesh_of_all_ranks(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def model_class(
    config: PreTrainedConfig, *, sees: bool = False
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class that loads a checkpoint; for a vision-language model the language part, if transformers has
    one and the model need not see (`sees`). Raises ValueError."""
    causal, seeing = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    if sees and type(config) not in seeing:
        raise ValueError(f"'vision': expected a vision-language model, got {config.model_type!r}")
    if type(config) in seeing and (sees or type(config) not in causal):
        return AutoModelForImageTextToText
    if type(config) not in causal and not getattr(config, "auto_map", None):
        known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
        near = get_close_matches(config.model_type, known, n=1, cutoff=0)[0]
        raise ValueError(
            "expected a causal language model, or a model of images and text, got one of the family "
            f"{config.model_type!r} (the nearest family that can be trained is {near!r})"
        )
    return AutoModelForCausalLM


def empty_model(directory: Path, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """On the meta device."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(
            config, trust_remote_code=trust_remote_code, **options
        )
    return model


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None) -> None:
    """In place, on the meta device. Parameters are gathered in `compute_dtype`; gradients are reduced in
    float32. Raises ValueError without a list of layers, or if a rank would have no expert of a layer."""
    _check_experts(model, mesh.size())
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # fully_shard changes the class names by which transformers finds conversions.
    conversions = get_model_conversion_mapping(model)
    for unit in (*decoder_layers(model), *_untied_ends(model), model):
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    model._weight_conversions = conversions


def reshard(model: torch.nn.Module) -> None:
    """Free the root unit, which a forward pass without a backward pass left gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()


def read_shards(model: PreTrainedModel, directory: Path, mesh: DeviceMesh) -> set[str]:
    """Read this rank's shards and whole buffers; returns missing names. `distributed_config` of
    `from_pretrained` cannot reduce in float32, and needs a plan that some families lack."""
    files, _ = _get_resolved_checkpoint_files(
        str(directory),
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=model.is_remote_code(),
        transformers_explicit_filename=getattr(model.config, "transformers_weights", None),
    )
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(directory),
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        device_mesh=mesh,
        weight_mapping=model._weight_conversions,
    )
    info, _ = model._load_pretrained_model(model, None, files, config)
    info = model._finalize_model_loading(model, config, info)
    _own_memory(model)
    model.to(mesh.device_type)  # buffers
    return set(info.missing_keys)


def _own_memory(model: PreTrainedModel) -> None:
    """On CPU an uncast shard maps the file's memory, which checkpoints cannot copy."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        shard = parameter._local_tensor
        if shard.untyped_storage().nbytes() != shard.nbytes:
            parameter._local_tensor = shard.clone()


def _untied_ends(model: PreTrainedModel) -> list[torch.nn.Module]:
    """A fifth of an 8B model, which the root unit would keep gathered."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(end is None for end in ends) or ends[0].weight is ends[1].weight:
        return []
    return ends


def _check_experts(model: PreTrainedModel, ranks: int) -> None:
    """transformers cannot create a shard without rows of fused experts."""
    fused = {name: len(each) for name, each in model.named_parameters() if each.ndim > 2}
    for name, rows in fused.items():
        each = -(-rows // ranks)
        if each * (ranks - 1) >= rows:
            raise ValueError(
                f"{name!r} has {rows} rows, {each} for each rank of FSDP2: expected ranks that all have one, "
                f"got {ranks}, of which the last has none"
            )
