"""What a RAG run would be: its batches, steps, lengths and time."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from pixelrag.config.rag import RagConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.data.lengths import SAMPLE, token_lengths, visual_lengths
from pixelrag.models.embedder import Embedder
from pixelrag.models.generator_load import outline_generator
from pixelrag.models.generator_prompt import GeneratorPreprocessor
from pixelrag.models.load import outline_embedder, read_preprocessor
from pixelrag.models.preprocess import Preprocessor
from pixelrag.retrieval.document_encoder import passage_document
from pixelrag.train.job import num_steps
from pixelrag.train.rag_data import RagData, document_encoder_config
from pixelrag.validate.duration import Hardware, duration, parameters
from pixelrag.validate.histogram import histogram

Encoder = tuple[Embedder, Preprocessor]
_PROMPTS = 200


def read_encoders(config: RagConfig) -> tuple[Encoder, Encoder]:
    """Shapes of the encoders of questions and of passages, and what makes their inputs.

    Raises:
        ModelError: one is not there, or lacks what `encoder_lora` asks for.
    """
    question = _read(config, config.question_encoder, "question")
    if config.shares_encoder:
        return question, question
    return question, _read(config, document_encoder_config(config), "document")


def _read(config: RagConfig, encoder: EncoderConfig, part: str) -> Encoder:
    lora = config.encoder_lora if part in config.train else None
    embedder = outline_embedder(encoder, lora)
    return embedder, read_preprocessor(encoder, embedder)


def figures(
    config: RagConfig,
    data: RagData,
    encoders: tuple[Encoder, Encoder],
    prompts: GeneratorPreprocessor,
    hardware: Hardware,
) -> Iterator[str]:
    """The lines that end a validation.

    Args:
        config: the job's.
        data: what it reads.
        encoders: as `read_encoders` gave them.
        prompts: of the generator.
        hardware: that the run is to be on.
    """
    world_size = hardware.world_size
    batch, k, num_questions = config.batch, config.retrieval.k, len(data.questions)
    rows = batch.rows(world_size) * batch.gradient_accumulation_steps
    whole, rest = divmod(num_questions, batch.rows(world_size))
    batches = max(1, whole if config.data.drop_last else whole + (rest > 0))
    per_epoch = batches / batch.gradient_accumulation_steps
    steps = num_steps(config, per_epoch)
    yield (
        f"a step: {batch.arithmetic(world_size)} = {rows:,} questions, with {k} passages each "
        f"{rows * k:,} prompts; a question is told from {k - 1} other passages"
    )
    yield (
        f"{num_questions:,} questions, {per_epoch:,.1f} steps an epoch; {steps:,} steps, "
        f"{steps / per_epoch:,.2f} epochs"
    )
    (question, ask), (document, show) = encoders
    sample = data.questions.rows[:: max(1, -(-num_questions // SAMPLE))]
    asked = token_lengths([q.text for q in sample], ask.tokenizer).values
    yield from histogram(
        "questions", asked, ask.query_max_length, "question_encoder.query_max_length",
        num_questions,
    )  # fmt: skip
    step = max(1, -(-len(data.passages) // SAMPLE))
    passages = [data.passages[row] for row in range(0, len(data.passages), step)]
    num_all = None if step == 1 else len(data.passages)
    template = config.knowledge_base.template
    texts = [passage_document(p, template).text or "" for p in passages if p.text is not None]
    section = "question_encoder" if config.shares_encoder else "document_encoder"
    read = token_lengths(texts, show.tokenizer).values if texts else []
    if read:
        yield from histogram(
            "passages of text", read, show.document_max_length, f"{section}.document_max_length",
            num_all,
        )  # fmt: skip
    images = [(p.image, p.id) for p in passages if p.image is not None]
    if images and show.visual_side and show.max_visual_tokens:
        visual = visual_lengths(images, show.visual_side).values
        yield from histogram(
            "passages that are images", visual, show.max_visual_tokens,
            f"{section}.max_visual_tokens", num_all,
        )  # fmt: skip
        yield "time: unknown; it is not estimated for knowledge bases with images"
        return
    written = mean(
        len(prompts.text.prompt(q.text, p.title, p.text or "", q.sample_id))
        + len(prompts.text.target(q.answers[0], q.sample_id))
        for q, p in zip(sample[:_PROMPTS], passages * _PROMPTS, strict=False)
    )
    generator = parameters(outline_generator(config.generator, config.generator_lora).blocks())
    encoder_passes = (2 if config.encoder_lora.enabled else 3) + 1  # chunks run twice
    asked_mean = mean(min(n, ask.query_max_length) for n in asked)
    shown = mean(min(n, show.document_max_length) for n in read)
    flops = parameters(question.blocks()) * asked_mean
    flops *= encoder_passes if "question" in config.train else 1
    if "document" in config.train:
        flops += encoder_passes * k * parameters(document.blocks()) * shown
    writes = (2 if config.generator_lora.enabled else 3) if "generator" in config.train else 1
    flops += writes * k * generator * written
    lengths = {"query": asked_mean, "document": shown}
    yield duration(config, 2.0 * flops * rows, steps, hardware, **lengths)
