"""The models of the RAG job: encoders and generator."""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.parts import ModelConfig
from pixelrag.config.section import Section


class EncoderConfig(ModelConfig):
    document_max_length: int = Field(512, ge=1)
    """Tokens of a passage, at most (the model's own limit caps it)."""
    normalize: bool | None = None
    """Unit vectors; null = what the folder says, else raw ones for DPR and unit ones elsewhere."""


class DocumentEncoderConfig(EncoderConfig):
    name_or_path: str | None = Field(None, min_length=1)  # type: ignore[assignment]  # may be null
    """As for the question encoder; null = that one reads passages too, with its own options."""


class GeneratorConfig(Section):
    name_or_path: str = Field(min_length=1)
    """Folder, GGUF file, Hugging Face name, or package:NAME/FOLDER of an installed package."""
    gguf_file: str | None = None
    """Name of a GGUF file within name_or_path; its weights are widened."""
    random_init: bool = False
    """Take the architecture of config.json alone, with fresh weights."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """auto: flash_attention_2 on CUDA where it is installed, else sdpa."""
    template: str | None = None
    """Prompt with {question}, {passage} and, if wished, {title}; null = the default of the kind."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Put the prompt into the tokenizer's chat template; auto: a decoder's that has one."""
    prompt_max_length: int = Field(512, ge=1)
    """Tokens of a prompt with one passage, at most; what is too long is cut in the passage."""
    target_max_length: int = Field(64, ge=1)
    """Tokens of an answer, at most, its end included."""
    max_visual_tokens: int = Field(1280, ge=4)
    """Tokens an image may become; larger images are scaled down."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""

    @field_validator("template")
    @classmethod
    def _has_its_places(cls, value: str | None) -> str | None:
        if value is None:
            return None
        missing = [name for name in ("{question}", "{passage}") if value.count(name) != 1]
        if missing:
            raise PydanticCustomError("paths", f"a text with {' and '.join(missing)} once")
        return value
