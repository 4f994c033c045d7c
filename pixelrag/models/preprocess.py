"""From queries and documents to the tensors that an `Embedder` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelrag.data.schema import Document
from pixelrag.errors import DataError
from pixelrag.models.images import fit_image
from pixelrag.models.template import ChatTemplate

Batch = dict[str, torch.Tensor]


class Preprocessor:
    """Tokenizes and pads; for vision models also scales and cuts images. Picklable.

    Padding is on the right up to the longest of the batch, whatever the tokenizer's own habit is:
    every pooling mode goes by the attention mask.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.
        image_processor: transformers' `Qwen2VLImageProcessorPil` for vision models, else None.
            Its `size` holds the bounds of an image in pixels.
        query_instruction, document_instruction: for vision models the system message, for text
            models a prefix put to the text as it stands.
        query_max_length, document_max_length: tokens, template and instruction included.
        extra_files: further files of the model by name, not used here but kept for its export.

    Raises:
        ModelError: vision models: see `ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any | None = None,
        *,
        query_instruction: str = "",
        document_instruction: str = "",
        query_max_length: int,
        document_max_length: int,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.query_instruction = query_instruction
        self.document_instruction = document_instruction
        self.query_max_length = query_max_length
        self.document_max_length = document_max_length
        self.extra_files = dict(extra_files or {})
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        self._query_chat: ChatTemplate | None = None
        self._document_chat: ChatTemplate | None = None
        if image_processor is not None:
            self._query_chat = ChatTemplate(
                tokenizer, query_instruction, query_max_length, "query_max_length"
            )
            self._document_chat = ChatTemplate(
                tokenizer, document_instruction, document_max_length, "document_max_length"
            )
            self._factor = image_processor.patch_size * image_processor.merge_size

    @property
    def has_vision(self) -> bool:
        """Whether documents may be images."""
        return self.image_processor is not None

    def save(self, folder: Path) -> None:
        """Write tokenizer, image processor and the kept files into an existing folder."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)
        for name, content in self.extra_files.items():
            (folder / name).write_bytes(content)

    @property
    def max_visual_tokens(self) -> int | None:
        """Tokens an image may become; None for text models."""
        if self.image_processor is None:
            return None
        return self.image_processor.size["longest_edge"] // self._factor**2

    @property
    def visual_side(self) -> int | None:
        """Pixels on a side of what becomes one token of an image; None for text models."""
        return None if self.image_processor is None else self._factor

    def queries(self, texts: Sequence[str]) -> Batch:
        """Queries to `input_ids` and `attention_mask`, both int64 [B, T].

        Raises:
            DataError: a text that yields no token.
        """
        if self._query_chat is not None:
            return self._pad(self._query_chat.texts(texts))
        return self._encode(self.query_instruction, texts, self.query_max_length, "query")

    def documents(self, documents: Sequence[Document]) -> Batch:
        """Documents to `input_ids` and `attention_mask`, both int64 [B, T].

        Vision models also get `num_images` int64 [B] and, where the batch has an image,
        `pixel_values` float32 [patches of all images, values of a patch] with `image_grid_thw`
        int64 [images, 3] (frames, rows, columns of patches), images in the order of documents.

        Raises:
            DataError: an image for a text model; an image that cannot be read or does not fit
                `document_max_length`; a text that yields no token.
        """
        if self._document_chat is not None:
            return self._mixed(documents, self._document_chat)
        texts = []
        for document in documents:
            if document.text is None:
                raise DataError(
                    f"document {document.image} is an image, but the model reads text only; "
                    "name a vision model such as Qwen/Qwen3-VL-Embedding-2B in model.name_or_path"
                )
            texts.append(document.text)
        return self._encode(self.document_instruction, texts, self.document_max_length, "document")

    def _encode(self, prefix: str, texts: Sequence[str], max_length: int, kind: str) -> Batch:
        encoded = self.tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_token_type_ids=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        batch = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        empty = (batch["attention_mask"].sum(1) == 0).nonzero()
        if len(empty):
            text = texts[int(empty[0])]
            raise DataError(
                f"{kind} {text[:40]!r} (number {int(empty[0])} of its batch) yields no token; "
                "the data or the tokenizer is wrong"
            )
        return batch

    def _pad(self, rows: list[list[int]]) -> Batch:
        shape = len(rows), max(map(len, rows))
        ids_BT = np.full(shape, self.tokenizer.pad_token_id, dtype=np.int64)
        mask_BT = np.zeros(shape, dtype=np.int64)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row)] = row
            mask_BT[index, : len(row)] = 1
        return {
            "input_ids": torch.from_numpy(ids_BT),
            "attention_mask": torch.from_numpy(mask_BT),
        }

    def _mixed(self, documents: Sequence[Document], chat: ChatTemplate) -> Batch:
        texts = iter(chat.texts([d.text for d in documents if d.text is not None]))
        paths = [document.image for document in documents if document.image is not None]
        if not paths:
            batch = self._pad(list(texts))
            batch["num_images"] = torch.zeros(len(documents), dtype=torch.int64)
            return batch
        assert self.image_processor is not None  # it comes with the chat template
        size = self.image_processor.size
        images = [
            fit_image(
                path,
                factor=self._factor,
                min_tokens=size["shortest_edge"] // self._factor**2,
                max_tokens=size["longest_edge"] // self._factor**2,
            )
            for path in paths
        ]
        tokens = iter([(i.width // self._factor) * (i.height // self._factor) for i in images])
        # Scaled above already: the processor's own scaling lets very long images pass the bound.
        pixels = self.image_processor(images, do_resize=False, return_tensors="pt")
        rows = [
            next(texts) if d.image is None else chat.image(next(tokens), str(d.image))
            for d in documents
        ]
        batch = self._pad(rows)
        batch["num_images"] = torch.tensor([int(d.image is not None) for d in documents])
        batch["pixel_values"] = pixels["pixel_values"]
        batch["image_grid_thw"] = pixels["image_grid_thw"]
        return batch
