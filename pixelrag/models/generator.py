"""The reader of end-to-end RAG: log-probabilities of a target, given a question and a passage.

An encoder-decoder (BART, T5) reads question and passage and writes the target. A decoder-only
model (Qwen3, Llama, and Qwen3-VL with tiles in the prompt) continues a prompt that holds both:
prompts are padded on the left, so that the targets of all passages of a question stand in the same
columns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from pixelrag.losses.rag_objective import Vocabulary
from pixelrag.models.blocks import checkpoint_blocks, transformer_blocks
from pixelrag.models.passage_attention import PassageAttention, observed
from pixelrag.models.precision import keep_float64
from pixelrag.models.token_scores import token_scores
from pixelrag.models.vision_touch import VisionTouch, armed


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
        model = self.lm.get_base_model() if isinstance(self.lm, PeftModel) else self.lm
        return cast(PreTrainedModel, model)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.lm.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, as the head has them."""
        return self.base_model.config.get_text_config().vocab_size

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
        vocabulary: Vocabulary = "none",
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
            vocabulary: what to tell beside the targets, see `token_scores`.

        Returns:
            log_probs_NT: log p(target_t | input, target_<t), 0 at padding; float32 (float64 for a
            float64 model). With ``vocabulary`` more numbers a token.
        """
        images = None if pixel_values is None else (pixel_values, image_grid_thw)
        logits_NTV = self._logits(
            input_ids, attention_mask, target_ids, target_mask, images, touch_vision
        )
        return token_scores(logits_NTV, target_ids, target_mask, vocabulary)

    @torch.no_grad()
    def attend(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        target_ids: torch.Tensor,
        target_mask: torch.Tensor,
        passage_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: torch.Tensor | None = None,
        *,
        touch_vision: bool = False,
    ) -> torch.Tensor:
        """How much each passage is looked at while the target is read (Atlas, section 2.2).

        An encoder-decoder attends to all that its encoder made of each of K passages, which share
        one soft-max. A decoder reads one passage, and attends to its tokens beside the prompt's.

        Args:
            passage_mask: 1 for the passage's tokens, [N, P]; of decoders alone.
            input_ids, attention_mask, target_ids, target_mask, pixel_values, image_grid_thw,
                num_images, touch_vision: as for `forward`.

        Returns:
            [N, K], or [N, 1]: see `pixelrag.losses.reader.pool_attention`; the mean over layers.

        Raises:
            ModelError: the model's attention cannot be observed.
        """
        num_targets, num_documents = target_ids.shape[1], 1
        if self.is_seq2seq:
            seen, rows = attention_mask.bool(), slice(None)
            if seen.dim() == 3:
                num_documents = seen.shape[1]
            place = torch.arange(num_documents, device=seen.device).view(1, -1, 1)
            owner = torch.where(seen.view(len(seen), num_documents, -1), place, -1).flatten(1)
        else:
            # The states before the answer's tokens predict them.
            rows = slice(-num_targets - 1, -1)
            assert passage_mask is not None  # a decoder's prompts are marked
            owner = torch.cat([passage_mask.long() - 1, torch.full_like(target_ids, -1)], 1)
        observer = PassageAttention(
            owner, target_mask, num_documents, rows=rows, crossed=self.is_seq2seq
        )
        images = None if pixel_values is None else (pixel_values, image_grid_thw)
        self._logits(
            input_ids, attention_mask, target_ids, target_mask, images, touch_vision, observer
        )
        return observer.mean()

    def _logits(
        self, input_ids, attention_mask, target_ids, target_mask, images, touch, observer=None
    ) -> torch.Tensor:
        with keep_float64(self.dtype):
            if self.is_seq2seq:
                states, mask = self.encode(input_ids, attention_mask)
                with observed(self.base_model, observer):
                    return self._decode(states, mask, target_ids, target_mask)
            with armed(self._touch, touch and images is None), observed(self.base_model, observer):
                return self._continue(input_ids, attention_mask, target_ids, target_mask, images)

    def _decode(self, states, attention_mask, target_ids, target_mask) -> torch.Tensor:
        model: Any = self.base_model
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
        touch_vision: bool = False,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Greedy answers, int64 [N, up to max_new_tokens], padded with `pad_token_id`.

        Several ranks take as many turns as the longest answer among all of them needs, since a
        sharded model's forward is a collective: every rank must call this alike.

        Args:
            max_new_tokens: tokens of an answer, at most.
            end_token_id: ends an answer, beside what the model itself says.
            pad_token_id: behind ends.
            touch_vision: as for `forward`: other ranks have images, this one has none.
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
        fed: dict[str, Any] = dict(inputs)
        if inputs["input_ids"].dim() == 3:
            states, mask = self.encode(inputs["input_ids"], inputs["attention_mask"])
            fed = {
                "encoder_outputs": BaseModelOutput(last_hidden_state=states),
                "attention_mask": mask,
            }
        several = dist.is_initialized() and dist.get_world_size() > 1
        if self.has_vision:
            # Without them images would get the positions of text.
            is_image = inputs["input_ids"] == self.base_model.config.image_token_id
            fed["mm_token_type_ids"] = is_image.int()
        if touch_vision and self._touch is not None:
            # `generate` encodes images before all else.
            self._touch.run(inputs["input_ids"].device)
        model: Any = self.base_model
        tokens = model.generate(**fed, generation_config=config, synced_gpus=several)
        return tokens[:, prompt:]

    def blocks(self) -> list[nn.Module]:
        """The units to shard or checkpoint, in the order of the forward pass."""
        return transformer_blocks(self.base_model)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each block in the backward pass.

        Raises:
            ModelError: the architecture does not support it.
        """
        checkpoint_blocks(self.base_model, self.dtype, "generator.gradient_checkpointing")
