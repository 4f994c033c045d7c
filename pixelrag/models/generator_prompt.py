"""From questions, passages and answers to the tensors that a `Generator` takes.

Encoder-decoders read `question: ... title: ... context: ...` (Izacard and Grave 2021,
"Fusion-in-Decoder", section 3). Decoders continue a prompt, inside the tokenizer's chat template
where it has one; their prompts are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from pixelrag.errors import DataError
from pixelrag.models.images import fit_image
from pixelrag.models.preprocess import Batch
from pixelrag.models.prompt_text import IMAGE_PAD, PromptText


class Readable(Protocol):
    """What a generator reads of a passage: a title, and a text or the path of an image."""

    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    @property
    def image(self) -> Any: ...


class GeneratorPreprocessor:
    """Builds batches of prompts and answers. Picklable.

    Args:
        text: tokenizes; its tokenizer has a padding token.
        image_processor: transformers' `Qwen2VLImageProcessorPil` for vision models, else None.
    """

    def __init__(self, text: PromptText, image_processor: Any | None = None) -> None:
        self.text = text
        self.tokenizer = text.tokenizer
        self.image_processor = image_processor
        if image_processor is not None:
            self._factor = image_processor.patch_size * image_processor.merge_size

    @property
    def has_vision(self) -> bool:
        """Whether passages may be images."""
        return self.image_processor is not None

    def save_pretrained(self, folder: Path) -> None:
        """Write tokenizer and image processor into an existing folder."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)

    def pairs(
        self,
        questions: Sequence[str],
        passages: Sequence[Readable],
        targets: Sequence[str],
        names: Sequence[str],
    ) -> Batch:
        """Inputs of `Generator.forward`, one row a (question, passage, answer).

        Args:
            questions, passages, targets: of equal lengths N.
            names: of the samples, for messages.

        Returns:
            `input_ids`, `attention_mask` int64 [N, P], `target_ids`, `target_mask` int64 [N, T]; of
            vision models also `num_images` [N], and where there is an image `pixel_values` and
            `image_grid_thw`, images in the order of the rows.

        Raises:
            DataError: a question or an answer that does not fit, an image for a text model, or one
                that cannot be read; names the sample.
        """
        return self.prompts(questions, passages, names) | self.targets(targets, names)

    def prompts(
        self,
        questions: Sequence[str],
        passages: Sequence[Readable],
        names: Sequence[str],
        *,
        mark: bool = False,
    ) -> Batch:
        """The prompts of `pairs` alone, for writing answers.

        With ``mark`` also `passage_mask` [N, P], for `Generator.attend` of a decoder: 1 for tokens
        of the passage (its title and its text, or its image).
        """
        entries = list(zip(questions, passages, names, strict=True))
        if self.has_vision and any(passage.image is not None for _, passage, _ in entries):
            batch = self._with_images(entries)
        else:
            batch = self._pad([self._prompt(*entry) for entry in entries], left=True)
            if self.has_vision:
                batch["num_images"] = torch.zeros(len(entries), dtype=torch.int64)
        if mark:
            batch["passage_mask"] = self._marks(entries, batch["input_ids"])
        return batch

    def _marks(
        self, entries: Sequence[tuple[str, Readable, str]], ids_NP: torch.Tensor
    ) -> torch.Tensor:
        marks_NP = torch.zeros_like(ids_NP)
        for row, (question, passage, name) in enumerate(entries):
            if passage.image is not None:
                pad = self.tokenizer.convert_tokens_to_ids(IMAGE_PAD)
                marks_NP[row] = ids_NP[row] == pad
                continue
            assert passage.text is not None  # a passage is one of the two
            _, mask = self.text.marked_prompt(question, passage.title, passage.text, name)
            marks_NP[row, ids_NP.shape[1] - len(mask) :] = torch.tensor(mask)
        return marks_NP

    def joint(
        self,
        questions: Sequence[str],
        passages: Sequence[Sequence[Readable | None]],
        names: Sequence[str],
    ) -> Batch:
        """Prompts of fusion in the decoder: one row a question, `input_ids` int64 [B, K, P].

        Args:
            questions, names: of equal lengths B.
            passages: K of each question; None in the place of a missing one, which is padding.

        Raises:
            DataError: as `pairs`; images, which encoder-decoders do not read.
        """
        prompts = [
            [] if passage is None else self._prompt(question, passage, name)
            for question, found, name in zip(questions, passages, names, strict=True)
            for passage in found
        ]
        shape = len(questions), len(passages[0])
        return {k: v.unflatten(0, shape) for k, v in self._pad(prompts, left=True).items()}

    def targets(self, targets: Sequence[str], names: Sequence[str]) -> Batch:
        """Answers to `target_ids` and `target_mask`, int64 [N, T], padded on the right.

        Raises:
            DataError: an answer of more than `target_max_length` tokens; names the sample.
        """
        rows = [self.text.target(text, name) for text, name in zip(targets, names, strict=True)]
        batch = self._pad(rows, left=False)
        return {"target_ids": batch["input_ids"], "target_mask": batch["attention_mask"]}

    def check(self, question: str, target: str, name: str) -> None:
        """Refuse, before training, what could not be read whole whatever the passage.

        Raises:
            DataError: names the sample and what to raise.
        """
        self.text.target(target, name)
        self.text.prompt(question, "", "", name)

    def texts(self, tokens_NT: torch.Tensor) -> list[str]:
        """Written answers as text, without special tokens and surrounding white space."""
        return [t.strip() for t in self.tokenizer.batch_decode(tokens_NT, skip_special_tokens=True)]

    def _prompt(self, question: str, passage: Readable, name: str) -> list[int]:
        if passage.text is None:
            raise DataError(
                f"{name}: passage {passage.image} is an image, but the generator reads text only; "
                "name a vision model such as Qwen/Qwen3-VL-2B-Instruct in generator.name_or_path"
            )
        return self.text.prompt(question, passage.title, passage.text, name)

    def _with_images(self, entries: Sequence[tuple[str, Readable, str]]) -> Batch:
        assert self.image_processor is not None  # or `_prompt` had refused the image
        size = self.image_processor.size
        images, rows = [], []
        for question, passage, name in entries:
            if passage.image is None:
                rows.append(self._prompt(question, passage, name))
                continue
            image = fit_image(
                passage.image,
                factor=self._factor,
                min_tokens=size["shortest_edge"] // self._factor**2,
                max_tokens=size["longest_edge"] // self._factor**2,
            )
            images.append(image)
            tokens = (image.width // self._factor) * (image.height // self._factor)
            rows.append(
                self.text.image_prompt(question, passage.title, passage.image, tokens, name)
            )
        pixels = self.image_processor(images, do_resize=False, return_tensors="pt")
        batch = self._pad(rows, left=True)
        batch["num_images"] = torch.tensor([int(p.image is not None) for _, p, _ in entries])
        batch["pixel_values"] = pixels["pixel_values"]
        batch["image_grid_thw"] = pixels["image_grid_thw"]
        return batch

    def _pad(self, rows: Sequence[Sequence[int]], *, left: bool) -> Batch:
        length = max(1, max(map(len, rows)))
        ids_NL = torch.full((len(rows), length), self.tokenizer.pad_token_id, dtype=torch.int64)
        mask_NL = torch.zeros(len(rows), length, dtype=torch.int64)
        for index, row in enumerate(rows):
            start = length - len(row) if left and not self.text.is_seq2seq else 0
            ids_NL[index, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
            mask_NL[index, start : start + len(row)] = 1
        return {"input_ids": ids_NL, "attention_mask": mask_NL}
