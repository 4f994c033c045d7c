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
    loaded = None
    if tokenizer is not None:
        # Here, because it takes seconds and words or whole documents need none of it.
        from transformers import AutoTokenizer

        from pixelrag.models.source import resolve_source

        loaded = AutoTokenizer.from_pretrained(resolve_source(tokenizer).location)
    return load_passages(**options, tokenizer=loaded, open_images=False)
