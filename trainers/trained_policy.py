"""The causal language model that is trained: loading, log-probabilities, new weights."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PreTrainedModel

from trainers import model_config
from trainers.batching import TokenBatch
from trainers.fsdp2 import empty_model, model_class, read_shards, shard_model
from trainers.images import ImageReader
from trainers.layers import prepare_layers, with_input_gradients
from trainers.lora import LoraAdapter
from trainers.output_head import OutputHead, TokenScores, replaced
from trainers.routing_replay import RoutingReplay
from trainers.settings import Checkpointing, DrafterConfig, Dtype, LoraConfig, Vision
from trainers.sources import load_parameters, names_without_aliases

if TYPE_CHECKING:
    from trainers.drafter import TrainedDrafter

_FLEX = "flex_attention"  # transformers' name
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}


class TrainedPolicy:
    """A Hugging Face causal language model. Log-probabilities are at temperature 1, as vLLM's
    (`logprobs_mode: raw_logprobs`); rollouts must sample so."""

    def __init__(
        self,
        model: PreTrainedModel,
        directory: Path,
        *,
        compute_dtype: torch.dtype | None = None,
        compiled: bool = False,
        trust_remote_code: bool = False,
        mesh: DeviceMesh | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.model = model
        self.images = images  # None: it is trained on text alone
        self.directory = directory
        self._trust_remote_code = trust_remote_code
        self._mesh = mesh
        self.device = next(model.parameters()).device
        self.adapter: LoraAdapter | None = None  # trained alone; None: all weights
        self.drafter: TrainedDrafter | None = None  # trained beside the policy
        self.compute_dtype = compute_dtype  # autocast dtype; None: the parameters' own
        self._compiled = compiled
        self._head = OutputHead(model, compiled=compiled)
        self.routing = RoutingReplay(model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        compute_dtype: str | None = None,
        activation_checkpointing: Checkpointing = False,
        compile_layers: bool = False,
        packed: bool = False,
        trust_remote_code: bool = False,
        mesh: DeviceMesh | None = None,
        vision: Vision | None = None,
    ) -> Self:
        """Read a checkpoint directory. With a mesh every rank must call this, and the model is sharded.

        Args:
            compute_dtype: of matrix products; None: `dtype`.
            activation_checkpointing: see `trainers.layers`.
            packed: attention for `trainers.packed_lines`, which needs a GPU to train.
            vision: what happens to the part that sees; None: images are refused. Not with a mesh.

        Raises ValueError for no such directory, unsuitable layers, missing parameters, two tensors for tied
        names, or a model or processor that `vision` does not suit.
        """
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise ValueError(
                f"expected a Hugging Face checkpoint directory with a config.json, got {directory}"
            )
        computed = None if compute_dtype is None else DTYPES[compute_dtype]
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        if packed:
            options["attn_implementation"] = _FLEX
        model = (
            _whole(directory, options, sees=vision is not None).to(device)
            if mesh is None
            else empty_model(directory, **options)
        )
        images = None if vision is None else ImageReader(model, directory)
        if vision == "frozen":
            model.get_encoder("image").requires_grad_(False)
        if packed and not model_config.attends_to_all(model.config):
            raise ValueError(
                f"{directory}: expected a model whose layers all attend to all that came before, for packed "
                "rows; this one has a window or another kind of layer: leave out 'packed'"
            )
        checkpointed = prepare_layers(model, activation_checkpointing, compiled=compile_layers)
        if mesh is not None:
            shard_model(model, mesh, compute_dtype=computed)
            _check_complete(read_shards(model, directory, mesh), directory)
        _check_ties(model, directory)
        # No dropout: passes are compared. Checkpointing needs train(), which changes only dropout in these
        # models.
        _disable_dropout(model)
        model.train(checkpointed)
        return cls(
            model,
            directory,
            compute_dtype=computed,
            compiled=compile_layers,
            trust_remote_code=trust_remote_code,
            mesh=mesh,
            images=images,
        )

    @property
    def vocabulary_size(self) -> int:
        return model_config.vocabulary_size(self.model.config)

    @property
    def max_length(self) -> int | None:
        return model_config.max_length(self.model.config)

    @property
    def pad_token_id(self) -> int:
        return model_config.pad_token_id(self.model.config)

    @property
    def can_share_prompts(self) -> bool:
        """Whether attention accepts a mask per row."""
        return self._attention == "sdpa" and model_config.attends_to_all(self.model.config)

    @property
    def is_packed(self) -> bool:
        return self._attention == _FLEX

    @property
    def _attention(self) -> str:
        return str(self.model.config.get_text_config()._attn_implementation)

    def adapt(self, config: LoraConfig, *, seed: int) -> LoraAdapter:
        """Call it before the first forward pass."""
        self.adapter = LoraAdapter(self.model, config, seed=seed)
        if self._compiled:
            with_input_gradients(self.model)
        return self.adapter

    def attach_drafter(self, config: DrafterConfig) -> "TrainedDrafter":
        """Call it before the first forward pass. Raises ValueError."""
        from trainers.drafter import TrainedDrafter  # imports in a second

        self.drafter = TrainedDrafter(
            config, self.model, self.directory, compiled=self._compiled, packed=self.is_packed
        )
        return self.drafter

    def trained(self) -> dict[str, torch.Tensor]:
        """By name, with the drafter's."""
        drafter = {} if self.drafter is None else self.drafter.state()
        if self.adapter is not None:
            return dict(self.adapter.tensors()) | drafter
        state = self.model.state_dict()
        return {name: state[name] for name in names_without_aliases(self.model)} | drafter

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()
        if self.drafter is not None:
            yield from self.drafter.named_parameters()

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters()) if self.adapter is None else self.adapter.parameters()

    def scores(
        self, batch: TokenBatch, *, with_entropies: bool = False, with_teachers: bool = False
    ) -> TokenScores:
        """Of the learned tokens, and a teacher's in their places, with gradient unless disabled; a drafter
        can learn from the same pass."""
        drafter = self.drafter if torch.is_grad_enabled() else None
        self.routing.use(batch.routed)
        with self.autocast(), nullcontext() if drafter is None else drafter.recording(), self._seeing(batch):
            return self._head.scores(
                batch.predictors,
                batch.targets,
                others=batch.teacher_token_ids if with_teachers else None,
                with_entropies=with_entropies,
                **_inputs(batch, self.pad_token_id),
            )

    def _seeing(self, batch: TokenBatch) -> AbstractContextManager[None]:
        """transformers puts an image at each placeholder's id, and the model may sample that id: it gets
        another id, and its own embedding."""
        if batch.images is None:
            return nullcontext()
        embeddings = self.model.get_input_embeddings()
        embed, tokens = embeddings.forward, batch.input_ids
        return replaced(embeddings, lambda _ids: embed(tokens))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype is not None)

    def load_weights(self, directory: Path) -> None:
        """Another checkpoint of this model, in place; an adapter starts from zero. Raises ValueError, without
        changes, for another model."""
        options = {"dtype": self.model.dtype, "trust_remote_code": self._trust_remote_code}
        if self._mesh is None:
            other = _whole(directory, options, sees=self.images is not None)
        else:  # this rank's shards, in host memory
            other, host = empty_model(directory, **options), DeviceMesh("cpu", self._mesh.mesh)
            shard_model(other, host, compute_dtype=None)
            _check_complete(read_shards(other, directory, host), directory)
        adapter = self.adapter
        load_parameters(self.model, other.state_dict(), None if adapter is None else adapter.base_state())
        if adapter is not None:
            adapter.reset()


class BaseOf:
    """The model under a policy's adapter: a reference without memory of its own."""

    def __init__(self, policy: TrainedPolicy) -> None:
        self._policy = policy

    def scores(self, batch: TokenBatch) -> TokenScores:
        assert self._policy.adapter is not None, "the base of a policy without an adapter is itself"
        with self._policy.adapter.disabled():
            return self._policy.scores(batch)


def _inputs(batch: TokenBatch, pad_token_id: int) -> dict[str, Any]:
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
    }
    if (images := batch.images) is not None:
        inputs["input_ids"] = batch.input_ids.masked_fill(images.sampled_placeholders, pad_token_id)
        device = batch.input_ids.device
        inputs["pixel_values"] = images.pixel_values.to(device)
        inputs["image_grid_thw"] = images.image_grid_thw.to(device)
    return inputs


def _whole(directory: Path, options: Mapping[str, Any], *, sees: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=options["trust_remote_code"])
    model, info = model_class(config, sees=sees).from_pretrained(
        directory, config=config, output_loading_info=True, **options
    )
    _check_complete(info["missing_keys"], directory)
    return model


def _check_complete(missing: Collection[str], directory: Path) -> None:
    """transformers initialises missing parameters randomly, with a warning."""
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of the parameters that its config.json asks for, first "
            f"{min(missing)!r}"
        )


def _check_ties(model: PreTrainedModel, directory: Path) -> None:
    """transformers unties such weights with a warning; vLLM ignores the second one."""
    output = model.get_output_embeddings()
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    if tied and output is not None and output.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"{directory}: config.json says tie_word_embeddings, and the checkpoint stores an output matrix "
            "that differs from the embeddings, and which vLLM ignores: remove it, or untie them"
        )


def _disable_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
