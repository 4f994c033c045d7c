"""One encoder for queries and documents: a Hugging Face backbone, pooling, a unit vector.

Models trained with raw inner products, as DPR is, keep the length of their vectors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from pixelrag.errors import ModelError
from pixelrag.models.blocks import checkpoint_blocks, transformer_blocks
from pixelrag.models.pooling import PoolingMode, embeddings
from pixelrag.models.precision import keep_float64
from pixelrag.models.unpadded import Layout, first_position, prepare, try_out
from pixelrag.models.vision_touch import VisionTouch, armed


class Embedder(nn.Module):
    """Turns token ids, and for Qwen3-VL images, into unit vectors.

    Build it with `pixelrag.models.load_embedder`; a float64 reference needs `dtype=torch.float64`
    there rather than `.double()`, which would also widen the rotary tables.

    Args:
        backbone: transformers model without a head, or a `PeftModel` around one.
        pooling: "mean", "cls" or "last".
        normalize: divide each vector by its length.

    Attributes:
        backbone: as given.
        pooling: as given.
        normalize: as given.
        has_vision: whether it takes `pixel_values`.
        unpadded: whether padding is left out of the computation; None = the first forward will
            find out. See `leave_padding_out`.
    """

    def __init__(
        self, backbone: nn.Module, pooling: PoolingMode, *, normalize: bool = True
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.normalize = normalize
        model = self.base_model
        self.has_vision = model.config.model_type == "qwen3_vl"
        self.unpadded: bool | None = False
        self._required = False
        self._first_position = first_position(model)
        self._touch: VisionTouch | None = None
        self._takes_positions = False
        if self.has_vision:
            tower: Any = model  # Qwen3-VL's own attributes
            vision = model.config.vision_config
            patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            self._touch = VisionTouch(tower.visual, patch_values, vision.spatial_merge_size)
            tower.language_model.register_forward_pre_hook(self._touch, with_kwargs=True)
        else:
            # Only rotary models: learned tables differ in where they start to count.
            rotary = any(name.endswith("rotary_emb") for name, _ in model.named_modules())
            accepts = "position_ids" in inspect.signature(model.forward).parameters
            self._takes_positions = rotary and accepts

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model itself, without PEFT's wrapper."""
        if isinstance(self.backbone, PeftModel):
            return cast(PreTrainedModel, self.backbone.get_base_model())
        return cast(PreTrainedModel, self.backbone)

    @property
    def embedding_dim(self) -> int:
        """D of `emb_BD`."""
        return self.base_model.config.get_text_config().hidden_size

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: torch.Tensor | None = None,
        *,
        touch_vision: bool = False,
    ) -> torch.Tensor:
        """Embed a batch.

        Args:
            input_ids: int64 [B, T].
            attention_mask: 1 for real tokens, [B, T]; rotary models take either padding side.
            pixel_values: float [patches of all images, values of a patch]; no rows = no image.
            image_grid_thw: int64 [images, 3], frames, rows and columns of patches.
            num_images: ignored; batches carry it so that they can be cut into chunks.
            touch_vision: run the vision tower on a blank block that counts for nothing where the
                batch has no image, so that its parameters take part in forward and backward.

        Returns:
            emb_BD, of unit norm unless ``normalize`` is off; float32 (float64 for a float64
            model).

        Raises:
            ModelError: images for a text model.
        """
        has_images = pixel_values is not None and len(pixel_values) > 0
        if has_images and not self.has_vision:
            raise ModelError(f"{type(self.base_model).__name__} takes no images, got pixel_values")
        images: dict[str, Any] = {}
        if has_images:
            images = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        touch = touch_vision and self.has_vision and not has_images
        with keep_float64(self._dtype()):
            if self.unpadded is None:
                self.unpadded = try_out(self._text_model(), self._states, required=self._required)
            with armed(self._touch, touch):
                hidden_BTD = self._states(input_ids, attention_mask, self.unpadded, images)
            return embeddings(hidden_BTD, attention_mask, self.pooling, normalize=self.normalize)

    def _states(
        self,
        input_ids: torch.Tensor,
        mask_BT: torch.Tensor,
        unpadded: bool,
        images: Mapping[str, Any] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Final states [B, T, D]; without padding those of padding are zeros."""
        positions = None
        if self.has_vision:
            positions = self._rope_positions(input_ids, mask_BT, images.get("image_grid_thw"))
        elif self._takes_positions:
            positions = _text_positions(mask_BT)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask_BT}
        if unpadded:
            layout = Layout.of(mask_BT, keep_order=bool(images))
            inputs = layout.attention_arguments(self._text_model().config._attn_implementation)
            inputs["input_ids"] = layout.take(input_ids)
            if positions is None:
                positions = (layout.position_N + self._first_position)[None]
            else:
                positions = layout.take(positions)
        if positions is not None:
            inputs["position_ids"] = positions
        hidden = self.backbone(**inputs, **images, return_dict=True).last_hidden_state
        return layout.spread(hidden) if unpadded else hidden

    def leave_padding_out(self, *, required: bool = False) -> None:
        """Compute real tokens only, if the first forward shows that this changes nothing.

        Args:
            required: raise where it cannot be done, instead of going on with padding.

        Raises:
            ModelError: it is required, and the architecture or the attention stands against it.
        """
        self._required = required
        accepts = "position_ids" in inspect.signature(self.base_model.forward).parameters
        fits = prepare(self._text_model(), takes_positions=accepts, required=required)
        self.unpadded = None if fits else False

    def _text_model(self) -> PreTrainedModel:
        model: Any = self.base_model
        return model.language_model if self.has_vision else model

    def blocks(self) -> list[nn.Module]:
        """The units to shard or checkpoint, outermost, in the order of the forward pass:
        vision blocks, then transformer layers."""
        return transformer_blocks(self.base_model)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each block in the backward pass (non-reentrant, dropout replayed).

        Raises:
            ModelError: the architecture does not support it.
        """
        checkpoint_blocks(self.base_model, self._dtype(), "model.gradient_checkpointing")

    def _dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def _rope_positions(
        self, input_ids: torch.Tensor, mask_BT: torch.Tensor, grid: torch.Tensor | None
    ) -> torch.Tensor:
        """Positions [3, B, T] (time, row, column), computed anew for every batch.

        The model's own bookkeeping keeps `rope_deltas` of the last image batch and, in some
        releases, applies them to the next text batch (huggingface/transformers#44873).
        """
        if grid is None:
            return _text_positions(mask_BT).expand(3, -1, -1)
        # The model's loop reads single elements: on a GPU each would be a synchronisation.
        ids_cpu, mask_cpu, grid_cpu = input_ids.cpu(), mask_BT.cpu(), grid.cpu()
        model: Any = self.base_model
        is_image = (ids_cpu == model.config.image_token_id).int()
        positions, _ = model.get_rope_index(
            ids_cpu,
            mm_token_type_ids=is_image,
            image_grid_thw=grid_cpu,
            attention_mask=mask_cpu,
        )
        return positions.to(input_ids.device)


def _text_positions(mask_BT: torch.Tensor) -> torch.Tensor:
    """Position of each real token among the real ones, int64 [B, T]; 0 at padding."""
    mask_BT = mask_BT.long()
    return (mask_BT.cumsum(1) - 1) * mask_BT
