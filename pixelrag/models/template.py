"""The conversation that Qwen3-VL-Embedding embeds, as token ids.

    <|im_start|>system\n{instruction}<|im_end|>\n
    <|im_start|>user\n{content}<|im_end|>\n
    <|im_start|>assistant\n

(without the line breaks shown, see `QwenLM/Qwen3-VL-Embedding`). The content is a text, or
`<|vision_start|><|image_pad|>..<|vision_end|>` with one pad per visual token. The embedding is
taken at the last token of the template, so truncation may shorten the user's text and nothing
else. A text that spells a special token is read as plain text: it can neither end the turn early
nor pass for an image.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from pixelrag.errors import DataError, ModelError

QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
DOCUMENT_INSTRUCTION = "Represent the user's input."

_START, _END = "<|im_start|>", "<|im_end|>"
_VISION_START, _IMAGE, _VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


def ended(instruction: str) -> str:
    """The instruction with a full stop where it ends without punctuation, as the official
    embedder sends it."""
    instruction = instruction.strip()
    if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
        instruction += "."
    return instruction


class ChatTemplate:
    """Builds token ids for one role (queries or documents). Picklable.

    Args:
        tokenizer: a fast Hugging Face tokenizer with Qwen's special tokens.
        instruction: the system message.
        max_length: tokens in all, template included.
        setting: configuration path of `max_length`, for messages.

    Raises:
        ModelError: the tokenizer lacks a special token, or `max_length` leaves the user no token.
    """

    def __init__(self, tokenizer: Any, instruction: str, max_length: int, setting: str) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.setting = setting
        special = {
            token: _special_id(tokenizer, token)
            for token in (_START, _END, _VISION_START, _IMAGE, _VISION_END)
        }
        newline = self._encode(["\n"])[0]
        system, user, assistant = self._encode(["system\n" + instruction, "user\n", "assistant\n"])
        start, end = special[_START], special[_END]
        self.image_id = special[_IMAGE]
        self._prefix = [start, *system, end, *newline, start]
        self._suffix = [end, *newline, start, *assistant]
        self._before_image = [*user, special[_VISION_START]]
        self._after_image = [special[_VISION_END]]
        self._room = max_length - len(self._prefix) - len(self._suffix)
        if self._room <= len(user):
            raise ModelError(
                f"model.{setting} {max_length} leaves no room for a text: the chat template with "
                f"its instruction takes {max_length - self._room + len(user)} tokens. Raise it"
            )

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text's conversation, the text cut to fit `max_length`."""
        # Special tokens bound the tokenizer's work, so "user\n" + text is encoded as in the whole.
        contents = self._encode(["user\n" + text for text in texts])
        return [self._prefix + ids[: self._room] + self._suffix for ids in contents]

    def image(self, num_tokens: int, name: str) -> list[int]:
        """Token ids of a conversation about one image of `num_tokens` visual tokens.

        Raises:
            DataError: it does not fit `max_length`; an image is never cut.
        """
        pads = [self.image_id] * num_tokens
        ids = self._prefix + self._before_image + pads + self._after_image + self._suffix
        if len(ids) > self.max_length:
            rest = len(ids) - num_tokens
            raise DataError(
                f"{name} becomes {num_tokens} visual tokens and {rest} of the template, "
                f"{len(ids)} in all, but model.{self.setting} is {self.max_length}. Raise it, or "
                f"set model.max_visual_tokens to at most {max(0, self.max_length - rest)}"
            )
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return encoded["input_ids"]


def _special_id(tokenizer: Any, token: str) -> int:
    index = tokenizer.get_vocab().get(token)
    if index is None:
        raise ModelError(
            f"the tokenizer has no token {token}, which the chat template of Qwen3-VL needs; "
            "does model.name_or_path hold the tokenizer of the model?"
        )
    return index
