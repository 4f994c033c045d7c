"""Opens the passages of a run again, in the worker of a refresh."""

from __future__ import annotations

from typing import Any

from pixelrag.data.passages import PassageStore, load_passages


def passages(*, tokenizer: str | None = None, **options: Any) -> PassageStore:
    """Open passages that the run has checked; for `RefreshSpec`.

    Args:
        tokenizer: folder or name of the tokenizer by whose tokens documents are cut.
        options: of `load_passages`; images are not decoded a second time.

    Raises:
        DataError: the source can no longer be read.
    """
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    return load_passages(**options, tokenizer=loaded, open_images=False)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by whose tokens documents are cut.

    Raises:
        ModelError: it is not there.
    """
    # Here, because it takes seconds and words or whole documents need none of it.
    from transformers import AutoTokenizer

    from pixelrag.models.source import as_model_error, resolve_source

    source = resolve_source(name)
    with as_model_error(source):
        return AutoTokenizer.from_pretrained(source.location)
