"""The RAG job's own sections, but for the models, the index and its refreshes."""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.parts import (
    CheckpointConfig,
    DataFiles,
    EvalEvery,
    GlobalBatches,
    OptimConfig,
)
from pixelrag.config.section import Section


class KnowledgeBaseConfig(Section):
    source: str = Field(min_length=1)
    """JSONL, folder of tiles, or Hugging Face data set (a folder or a name)."""
    split: Literal["none", "words", "tokens"] = "none"
    """Cut documents into passages of so many words, or tokens of the document encoder."""
    length: int | None = Field(None, ge=1)
    """Words or tokens of a passage, at most; the title is not counted."""
    overlap: int = Field(0, ge=0)
    """Words or tokens that a passage shares with the one before it, at most."""
    dataset_split: str = Field("train", min_length=1)
    """Split of a Hugging Face data set."""
    image_roots: list[str] = Field(default_factory=list)
    """Folders, beside that of the source, in which images that it names may lie; / = any."""
    template: str = "{title}\n{text}"
    """What the document encoder reads of a passage with a title."""

    @field_validator("template")
    @classmethod
    def _shows_the_text(cls, value: str) -> str:
        if "{text}" not in value:
            raise PydanticCustomError("paths", "a text with {text} in it")
        return value


class QuestionDataConfig(DataFiles):
    train: list[str] = Field(min_length=1)
    """JSONL files of questions with their answers."""
    eval: list[str] = Field(default_factory=list)
    """Held-out JSONL files of the same form."""
    answers: Literal["sample", "first"] = "sample"
    """Of several right answers: train on one of them, drawn anew each epoch, or on the first."""
    bad_rows: Literal["error", "skip"] = "error"
    """error: refuse to start on a bad row; skip: train without it and say how many there are."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it is smaller than the others."""


class RetrievalConfig(Section):
    k: int = Field(5, ge=1)
    """Passages that the generator reads for a question."""
    over_retrieve: int | None = Field(None, ge=1)
    """Take so many from the index and re-rank them with the encoder as it is now; null = k."""
    batch_size: int = Field(64, ge=1)
    """Questions or passages a rank encodes at once, without gradients."""


class RagLossConfig(Section):
    answer: Literal["rag_sequence", "rag_token", "fid"] = "rag_sequence"
    """The generator's: one passage behind an answer, one behind a token, or all at once."""
    retriever: Literal["marginal", "emdr2", "pdist", "loop", "adist"] = "marginal"
    """The encoders': the same likelihood, or what the generator tells of each passage."""
    retriever_weight: float = Field(1.0, gt=0)
    """Factor on the encoders' loss where it is not the marginal one."""
    reader_temperature: float = Field(1.0, gt=0)
    """Divides the generator's log-probabilities in pdist and loop, its attention in adist."""
    exclude_bos: bool = False
    """Leave an answer's first token out of the loss, where it is always the same."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each target token spread over the vocabulary, in the generator's loss."""
    contrastive_weight: float = Field(0.0, ge=0)
    """Factor on InfoNCE over the batch's passages, for questions that name theirs."""
    temperature: float = Field(0.05, gt=0)
    """Divides the scores of passages, to begin with; 1 for models of raw inner products."""
    learnable_temperature: bool = False
    """Train the temperature, held between 0.01 and 1."""


class RagOptimConfig(OptimConfig):
    question_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the question encoder, the shared one too; null = learning_rate."""
    document_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of a document encoder of its own; null = learning_rate."""
    generator_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the generator; null = learning_rate."""
    temperature_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the temperature; null = learning_rate."""


class RagBatchConfig(GlobalBatches):
    per_device_batch_size: int = Field(16, ge=1)
    """Questions a rank contributes to one global batch."""
    global_batch_size: int | None = Field(None, ge=1)
    """Questions of a global batch on any number of ranks, in place of per_device_batch_size."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Global batches to an optimizer step."""
    question_chunk_size: int = Field(16, ge=1)
    """Questions that go through their encoder at once; sets the memory, never the gradient."""
    document_chunk_size: int = Field(16, ge=1)
    """Passages that go through their encoder at once."""
    generator_chunk_size: int = Field(4, ge=1)
    """Prompts that go through the generator at once."""


class RagEvalConfig(EvalEvery):
    batch_size: int = Field(8, ge=1)
    """Prompts a rank answers at once."""
    answers: bool = True
    """Write answers and measure EM and F1, beside recall."""
    fresh_index: bool = False
    """Encode all passages anew and measure recall with them as well (eval/fresh_recall@k)."""
    max_questions: int | None = Field(None, ge=1)
    """Use the first so many held-out questions; null = all."""


class RagCheckpointConfig(CheckpointConfig):
    best_metric: str = "eval/em"
    """The held-out figure by which best/ is chosen."""
