"""The reader of end-to-end RAG: log-probabilities of a target, given a question and a passage.

An encoder-decoder (BART, T5) reads question and passage and writes the target. A decoder-only
model (Qwen3, Llama, and Qwen3-VL with tiles in the prompt) continues a prompt that holds both:
prompts are padded on the left, so that the targets of all passages of a question stand in the same
columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from pixelrag.errors import ModelError
from pixelrag.models.blocks import checkpoint_blocks, transformer_blocks
from pixelrag.models.precision import keep_float64
from pixelrag.models.vision_touch import VisionTouch


class Generator(nn.Module):
    """A language model that scores and writes answers.

    Build it with `pixelrag.models.generator_load.load_generator`.

    Args:
        lm: transformers model with a language-model head, or a `PeftModel` around one.

    Attributes:
        lm: as given.
        is_seq2seq: whether it is an encoder-decoder.
        has_vision: whether prompts may hold images.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        model = self.base_model
        self.is_seq2seq = bool(model.config.is_encoder_decoder)
        self.has_vision = model.config.model_type == "qwen3_vl"
        self._touch: VisionTouch | None = None
        if self.has_vision:
            vision = model.config.vision_config
            patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            self._touch = VisionTouch(model.model.visual, patch_values, vision.spatial_merge_size)
            model.model.language_model.register_forward_pre_hook(self._touch, with_kwargs=True)

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model itself, without PEFT's wrapper."""
        return self.lm.get_base_model() if isinstance(self.lm, PeftModel) else self.lm

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.lm.parameters()).dtype

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        target_ids: torch.Tensor,
        target_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: torch.Tensor | None = None,
        *,
        touch_vision: bool = False,
    ) -> torch.Tensor:
        """Score targets.

        Args:
            input_ids: int64 [N, P]; question and passage, or a prompt padded on the left.
                [N, K, P] reads K passages and answers once (encoder-decoders): each passage is
                encoded by itself, the decoder attends to all of them (Izacard and Grave 2021,
                "Fusion-in-Decoder", section 3).
            attention_mask: 1 for real tokens, of the same shape.
            target_ids: int64 [N, T], padded on the right.
            target_mask: 1 for real tokens, [N, T].
            pixel_values: float [patches of all images, values of a patch], for vision models.
            image_grid_thw: int64 [images, 3].
            num_images: ignored; batches carry it so that they can be cut into chunks.
            touch_vision: run the vision tower on a blank block that counts for nothing where the
                batch has no image, see `vision_touch`.

        Returns:
            log_probs_NT: log p(target_t | input, target_<t), 0 at padding; float32 (float64 for a
            float64 model).
        """
        with keep_float64(self.dtype):
            if self.is_seq2seq:
                logits_NTV = self._decode(input_ids, attention_mask, target_ids, target_mask)
            else:
                images = None if pixel_values is None else (pixel_values, image_grid_thw)
                with self._armed(touch_vision and images is None):
                    logits_NTV = self._continue(
                        input_ids, attention_mask, target_ids, target_mask, images
                    )
            return token_log_probs(logits_NTV, target_ids, target_mask)

    def _decode(self, input_ids, attention_mask, target_ids, target_mask) -> torch.Tensor:
        model = self.base_model
        states, attention_mask = self.encode(input_ids, attention_mask)
        labels = target_ids.masked_fill(target_mask == 0, -100)
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=attention_mask,
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels=labels),
            use_cache=False,
            return_dict=True,
        )
        return output.logits

    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States of an encoder-decoder's encoder and their mask; K passages are joined.

        Args:
            input_ids, attention_mask: [N, P] or [N, K, P].

        Returns:
            States [N, P or K * P, H] and the mask over them.
        """
        encoder = self.base_model.get_encoder()
        flat_ids, flat_mask = input_ids.flatten(0, -2), attention_mask.flatten(0, -2)
        # A passage that is only padding still needs a token to attend to; the decoder masks it.
        seen = flat_mask.clone()
        seen[:, 0] = seen[:, 0] | (flat_mask.sum(1) == 0).to(seen.dtype)
        states = encoder(input_ids=flat_ids, attention_mask=seen, return_dict=True)
        states = states.last_hidden_state
        rows = len(input_ids)
        return states.reshape(rows, -1, states.shape[-1]), attention_mask.reshape(rows, -1)

    def _continue(self, input_ids, attention_mask, target_ids, target_mask, images) -> torch.Tensor:
        ids = torch.cat([input_ids, target_ids], 1)
        mask = torch.cat([attention_mask, target_mask.to(attention_mask.dtype)], 1)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if self.has_vision:
            inputs |= self._vision_inputs(ids, mask, images)
        else:
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)
        length = target_ids.shape[1]
        # The state before a token predicts it; nothing else needs the head.
        logits = self.base_model(**inputs, logits_to_keep=length + 1, return_dict=True).logits
        return logits[:, -length - 1 : -1]

    def _vision_inputs(self, ids, mask, images) -> dict[str, Any]:
        model = self.base_model
        grid = None if images is None else images[1]
        is_image = (ids == model.config.image_token_id).int()
        # Positions anew for every batch: the model's own bookkeeping outlives it.
        positions, _ = model.model.get_rope_index(
            ids.cpu(),
            mm_token_type_ids=is_image.cpu(),
            image_grid_thw=None if grid is None else grid.cpu(),
            attention_mask=mask.cpu(),
        )
        inputs: dict[str, Any] = {"position_ids": positions.to(ids.device)}
        if images is not None:
            inputs |= {"pixel_values": images[0], "image_grid_thw": grid}
        return inputs

    @torch.no_grad()
    def write(
        self,
        max_new_tokens: int,
        *,
        end_token_id: int,
        pad_token_id: int,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Greedy answers, int64 [N, up to max_new_tokens], padded with `pad_token_id`.

        Several ranks take as many turns as the longest answer among all of them needs, since a
        sharded model's forward is a collective: every rank must call this alike.

        Args:
            max_new_tokens: tokens of an answer, at most.
            end_token_id: ends an answer, beside what the model itself says.
            pad_token_id: behind ends.
            inputs: `input_ids` and `attention_mask` as in `forward`, images for vision models.
        """
        inputs.pop("num_images", None)
        given = self.base_model.generation_config
        ends = given.eos_token_id
        ends = {end_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # Of the model's own settings only the tokens: beams and penalties are no part of this.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted(ends),
            pad_token_id=pad_token_id,
            bos_token_id=given.bos_token_id,
            decoder_start_token_id=given.decoder_start_token_id,
            forced_bos_token_id=given.forced_bos_token_id,
        )
        prompt = 0 if self.is_seq2seq else inputs["input_ids"].shape[1]
        if inputs["input_ids"].dim() == 3:
            states, mask = self.encode(inputs["input_ids"], inputs["attention_mask"])
            inputs = {
                "encoder_outputs": BaseModelOutput(last_hidden_state=states),
                "attention_mask": mask,
            }
        several = dist.is_initialized() and dist.get_world_size() > 1
        tokens = self.base_model.generate(**inputs, generation_config=config, synced_gpus=several)
        return tokens[:, prompt:]

    @contextlib.contextmanager
    def _armed(self, touch: bool) -> Iterator[None]:
        if self._touch is None:
            yield
            return
        self._touch.armed = touch
        try:
            yield
        finally:
            self._touch.armed = False

    def blocks(self) -> list[nn.Module]:
        """The units to shard or checkpoint, in the order of the forward pass."""
        return transformer_blocks(self.base_model)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each block in the backward pass.

        Raises:
            ModelError: the architecture does not support it.
        """
        checkpoint_blocks(self.base_model, self.dtype, "generator.gradient_checkpointing")


def token_log_probs(
    logits_NTV: torch.Tensor, target_NT: torch.Tensor, mask_NT: torch.Tensor
) -> torch.Tensor:
    """log softmax(logits)[target], 0 at padding; at least float32, autocast or not.

    Args:
        logits_NTV: floating point.
        target_NT: int64; anything at padding.
        mask_NT: 1 for real tokens.

    Raises:
        ModelError: a target token is outside the vocabulary.
    """
    with torch.autocast(logits_NTV.device.type, enabled=False):
        wide = torch.promote_types(logits_NTV.dtype, torch.float32)
        real = mask_NT.bool()
        targets = target_NT.masked_fill(~real, 0)
        if targets.numel() and int(targets.max()) >= logits_NTV.shape[-1]:
            raise ModelError(
                f"target token {int(targets.max())} is outside the generator's vocabulary of "
                f"{logits_NTV.shape[-1]}"
            )
        chosen = logits_NTV.gather(-1, targets[..., None]).squeeze(-1).to(wide)
        log_probs = chosen - torch.logsumexp(logits_NTV.to(wide), -1)
        return log_probs.masked_fill(~real, 0.0)
