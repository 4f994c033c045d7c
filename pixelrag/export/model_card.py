"""The README.md of an exported model: what it is, what it was trained on, and how well it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from pixelrag.errors import ModelError
from pixelrag.models.source import ModelSource

_USE = {
    "sentence-transformers": """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
queries = model.encode_query(["..."])
documents = model.encode_document(["..."])   # {kinds}
scores = model.similarity(queries, documents)
""",
    "adapter": """\
from peft import PeftModel
from transformers import AutoModel

model = PeftModel.from_pretrained(AutoModel.from_pretrained("{base}"), "{folder}")
# Pooling, instructions and lengths: pixelrag.json
""",
    "hf": """\
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{folder}")
# Pooling, instructions and lengths: pixelrag.json
""",
}
# Of a model that writes text, by what it is.
_WRITERS = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "reader": "AutoModelForImageTextToText",
}
_USE |= {
    form: f"""\
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("{{folder}}")
tokenizer = AutoTokenizer.from_pretrained("{{folder}}")
"""
    for form, loader in _WRITERS.items()
}
_LIBRARY = {"sentence-transformers": "sentence-transformers", "adapter": "peft"}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of the run that a model comes from; all but the first may be missing.

    Attributes:
        checkpoint: the checkpoint or export that is written anew, as it was named.
        base: name of the model that the training started from.
        step: optimizer steps done.
        data: files trained on.
        data_fingerprint: of their content.
        figures: held-out figures of the checkpoint, by name.
        config: the run's configuration, YAML.
        versions: of the libraries that trained it, and pixelrag's commit.
    """

    checkpoint: str
    base: str | None = None
    step: int | None = None
    data: tuple[str, ...] = ()
    data_fingerprint: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    config: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def model_card(
    name: str,
    form: str,
    base: ModelSource,
    run: RunFacts,
    *,
    has_vision: bool,
    ema_decay: float | None = None,
    document_encoder: str | None = None,
) -> str:
    """The card as Markdown, with the metadata that model hubs read in front.

    Args:
        name: the exported folder's.
        form: sentence-transformers, adapter, or hf for any other whole encoder; causal, seq2seq or
            reader (of images) for what writes text.
        base: the model that the training started from.
        run: what is known of the training.
        has_vision: whether documents may be images.
        ema_decay: where the weights are a moving average over the steps, its decay.
        document_encoder: the model that embeds documents, where this one embeds queries alone.
    """
    licence = licence_of(base)
    from_hub = base.location == base.name  # neither a folder nor a package
    metadata = ModelCardData(
        license=licence,
        base_model=base.name if from_hub else None,
        library_name=_LIBRARY.get(form, "transformers"),
        tags=["pixelrag"],
    )
    kinds = "texts, or paths of images" if has_vision else "texts"
    use = _USE[form].format(folder=name, base=base.name, kinds=kinds)
    of_licence = (
        f"The base model's licence is `{licence}`; it binds what is made of the model."
        if licence
        else "No licence of the base model could be read here: find it out before publishing this."
    )
    step = "" if run.step is None else f", step {run.step:,}"
    origin = f"Trained with pixelrag from `{base.name}`; exported from `{run.checkpoint}`{step}."
    if ema_decay is not None:
        origin += (
            f" The weights are an exponential moving average over the steps, decay {ema_decay:g}."
        )
    parts = [f"# {name}", f"{origin} {of_licence}", f"```python\n{use}```"]
    if document_encoder is not None:
        parts.insert(
            1,
            f"**This model embeds queries only.** Documents belong to `{document_encoder}`, which "
            "was not trained: an index that it built stays valid.",
        )
    if run.data:
        fingerprint = run.data_fingerprint or "not recorded"
        files = "\n".join(f"- `{file}`" for file in run.data)
        parts.append(f"## Training data\n\n{files}\n\nSHA-256 of the rows: `{fingerprint}`")
    if run.figures:
        rows = "\n".join(f"| {figure} | {value:.4f} |" for figure, value in run.figures.items())
        parts.append(f"## Held-out figures\n\n| figure | value |\n| --- | --- |\n{rows}")
    if run.versions:
        made = ", ".join(f"{library} {version}" for library, version in run.versions.items())
        parts.append(f"## Made with\n\n{made}")
    if run.config:
        parts.append(f"## Configuration\n\n```yaml\n{run.config.rstrip()}\n```")
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def licence_of(base: ModelSource) -> str | None:
    """The licence that the base model's own card names, or None."""
    try:
        card = base.file("README.md")
        metadata: dict[str, Any] = (card and metadata_load(card)) or {}
    except (ModelError, OSError, ValueError):
        return None  # out of reach, or no card: nothing that could be read here
    licence = metadata.get("license")
    return licence if isinstance(licence, str) else None
