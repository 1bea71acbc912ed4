"""Images of trajectories, as Qwen's vision-language models read them.

The checkpoint's processor makes patches as in the engine, and must yield as many tokens as the engine's
prompt has. Positions in the prompt are transformers' own (M-RoPE).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from transformers import AutoImageProcessor, PreTrainedModel

from trainers.batching import ImageInputs, TokenBatch
from trainers.image_files import opened
from trainers.trajectory import MAX_NAMED, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """One image."""

    values: torch.Tensor  # float32 [patches, values of a patch]
    grid: torch.Tensor  # int64 [3]: frames, rows and columns of patches
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A trajectory of T tokens with its images."""

    images: tuple[bytes, ...]
    image_of: torch.Tensor  # int64 [T]: the number of the token's image, -1: none
    positions: torch.Tensor  # int64 [3, T]


class ImageReader:
    """Raises ValueError for a family with other inputs, or without its own image processor."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self._rope_index = getattr(model.base_model, "get_rope_index", None)
        self._token = getattr(model.config, "image_token_id", None)
        if self._rope_index is None or self._token is None:
            raise ValueError(
                "expected a vision-language model whose images have positions in three dimensions "
                f"(qwen2_5_vl, qwen3_vl, qwen3_5), got {model.config.model_type!r}"
            )
        try:
            self._processor = AutoImageProcessor.from_pretrained(directory)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{directory}: expected an image processor's configuration: {error}") from error
        size = model.config.vision_config.patch_size
        if self._processor.patch_size != size:
            raise ValueError(
                f"{directory}: expected a processor whose patches have {size} pixels, as the model's, got "
                f"{self._processor.patch_size}: it is of another model"
            )
        self._read: dict[bytes, Patches] = {}

    def read(self, content: bytes) -> Patches:
        """Raises ValueError: no image, or too large."""
        if content not in self._read:
            made = self._processor(images=[opened(content)], return_tensors="pt")
            grid = made["image_grid_thw"][0]
            tokens = int(grid.prod()) // self._processor.merge_size**2
            self._read[content] = Patches(values=made["pixel_values"], grid=grid, tokens=tokens)
        return self._read[content]

    def forget(self) -> None:
        self._read.clear()

    def place(self, trajectory: Trajectory) -> Placed:
        """Raises ValueError unless the tokens match the images."""
        tokens = torch.tensor([*trajectory.prompt_token_ids, *trajectory.token_ids])
        image_of = torch.full_like(tokens, -1)
        if not trajectory.images:  # placeholders in text stand for nothing, as in the engine
            return Placed(images=(), image_of=image_of, positions=torch.arange(len(tokens)).expand(3, -1))
        given = torch.ones_like(tokens, dtype=torch.bool)
        given[len(trajectory.prompt_token_ids) :] = ~torch.tensor(
            trajectory.loss_mask or (True,) * len(trajectory.token_ids)
        )
        held = ((tokens == self._token) & given).tolist()
        runs = [list(run) for is_image, run in groupby(range(len(held)), held.__getitem__) if is_image]
        images = [self.read(content) for content in trajectory.images]
        found, expected = [len(run) for run in runs], [image.tokens for image in images]
        if found != expected:
            raise ValueError(
                f"expected placeholders of {expected} tokens, which this checkpoint's processor makes of its "
                f"{len(images)} images, got {found}: they are other images, or the engine has another "
                "processor, or other settings of it"
            )
        for number, run in enumerate(runs):
            image_of[run] = number
        assert self._rope_index is not None
        positions, _ = self._rope_index(
            tokens[None],
            mm_token_type_ids=(image_of >= 0).int()[None],
            image_grid_thw=torch.stack([image.grid for image in images]),
        )
        return Placed(images=trajectory.images, image_of=image_of, positions=positions[:, 0])

    def add(self, batch: TokenBatch, trajectories: Sequence[Trajectory]) -> TokenBatch:
        members = batch.owners[batch.owners >= 0].unique()
        placed = [self.place(trajectories[index]) for index in members.tolist()]
        files = list(dict.fromkeys(file for each in placed for file in each.images))
        if not files:
            return batch
        longest, device = max(each.image_of.numel() for each in placed), batch.owners.device
        image_of = torch.full((len(placed), longest), -1)
        positions = torch.zeros(len(placed), 3, longest, dtype=torch.int64)
        for row, each in enumerate(placed):
            numbers = torch.tensor([*map(files.index, each.images), -1])
            image_of[row, : len(each.image_of)] = numbers[each.image_of]
            positions[row, :, : len(each.image_of)] = each.positions
        rows, columns = torch.searchsorted(members, batch.owners.clamp(min=0)), batch.position_ids
        image = image_of.to(device)[rows, columns].masked_fill(batch.owners < 0, -1)
        flat = image.flatten()
        begins = (flat >= 0) & (flat != flat.roll(1))  # other tokens are between two images, and at both ends
        shown = [self.read(files[number]) for number in flat[begins].tolist()]
        return replace(
            batch,
            position_ids=positions.to(device)[rows, :, columns].movedim(-1, 0),
            images=ImageInputs(
                pixel_values=torch.cat([each.values for each in shown]),
                image_grid_thw=torch.stack([each.grid for each in shown]),
                sampled_placeholders=(batch.input_ids == self._token) & (image < 0),
            ),
        )


def check_images(trajectories: Sequence[Trajectory], reader: ImageReader | None) -> None:
    """Raises one ValueError for all images."""
    found = []
    if reader is not None:
        reader.forget()  # what a refused batch has left
    for number, trajectory in enumerate(trajectories):
        if trajectory.images and reader is None:
            found.append(
                f"trajectory {number}: expected no images, got {len(trajectory.images)} (a trainer learns "
                "from them with the setting 'trainer.vision')"
            )
        elif reader is not None:
            try:
                reader.place(trajectory)
            except ValueError as error:
                found.append(f"trajectory {number}: {error}")
    if found:
        rest = len(found) - MAX_NAMED
        raise ValueError("; ".join(found[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else ""))
