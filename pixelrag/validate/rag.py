"""A RAG job: every passage and question, the models' small files, the cluster. No weights."""

from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.data.passages import PassageStore
from pixelrag.data.questions import QuestionDataset
from pixelrag.errors import DataError, PixelragError
from pixelrag.retrieval.refresh_spec import OnRay
from pixelrag.validate.duration import Hardware


def check(config: RagConfig, hardware: Hardware | None = None) -> int:
    """Print each fault and what the run would be; return 0, or the exit code of the first fault."""
    from pixelrag.models.generator_load import outline_generator, read_prompts
    from pixelrag.retrieval.ray_config import on_ray
    from pixelrag.train.rag_data import (
        RagData,
        check_generator,
        check_images,
        check_lengths,
        read_passages,
    )
    from pixelrag.validate.rag_figures import figures, read_encoders

    codes: list[int] = []
    passages: PassageStore | None = None
    try:
        _say_cluster(config, on_ray(config))
    except PixelragError as error:
        say(str(error))
        codes.append(error.exit_code)
    try:
        passages = read_passages(config)
        say(
            f"{config.knowledge_base.source}: {len(passages):,} passages of "
            f"{passages.num_documents:,} documents"
        )
    except PixelragError as error:
        say(str(error))
        codes.append(error.exit_code)
    sets: dict[str, QuestionDataset] = {}
    for name in ("train", "eval"):
        if paths := getattr(config.data, name):
            try:
                sets[name] = _questions(paths, passages)
            except PixelragError as error:
                say(str(error))
                codes.append(error.exit_code)
                continue
            if sets[name].report.bad and config.data.bad_rows == "error":
                codes.append(DataError.exit_code)
    try:
        encoders = read_encoders(config)
        observed = config.loss.retriever == "adist"
        prompts = read_prompts(config.generator, observed=observed)
        outline_generator(config.generator, config.generator_lora)
        check_generator(config, prompts)
        if passages is not None and "train" in sets:
            held_out = sets["eval"].rows if "eval" in sets else None
            data = RagData(passages, sets["train"], held_out)
            check_images(config, passages, encoders[1][1], prompts)
            check_lengths(config, data, prompts)
            for line in figures(config, data, encoders, prompts, hardware or Hardware()):
                say(line)
    except PixelragError as error:
        say(str(error))
        codes.append(error.exit_code)
    return codes[0] if codes else 0


def _say_cluster(config: RagConfig, encoders: OnRay | None) -> None:
    uses = [] if encoders is None else [f"encoding on {', '.join(encoders.devices)}"]
    if config.index.holders == "ray":
        uses.append(f"the index in {config.index.num_shards} parts")
    if uses:
        say(f"ray.address {config.ray.address}: there is room for {' and '.join(uses)}")


def _questions(paths: list[str], passages: PassageStore | None) -> QuestionDataset:
    found = QuestionDataset(paths, "skip", passages=passages, quiet=True)
    for bad in found.report.bad:
        say(f"{bad.file}:{bad.line}: {bad.reason}")
    say(
        f"{', '.join(paths)}: {found.report.num_rows} questions, {found.report.num_documents} "
        f"passages named by them, {found.report.num_bad_rows} bad rows"
    )
    return found
