"""Hard negatives out of `retrieve_top20`, the hits that PixelRAG's miner leaves in a row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pixelrag.data.tiles import article_of

KEY = "retrieve_top20"


def retrieved_negatives(hits: Any, positives: Sequence[str], reasons: list[str]) -> list[str]:
    """Paths of the hits that are not of a positive's article, in their order.

    The article of a positive is that of the hit with its path (`article_id`), and what stands
    before `_chunk_` in its file's name: other tiles of the page that holds the answer may hold it
    as well.

    Args:
        hits: the value of `retrieve_top20`: `[{"rank", "path", "score", "article_id"}]`.
        positives: paths of the positives, as the row spells them.
        reasons: gets one more where the value has another form.
    """
    if not isinstance(hits, list) or not all(
        isinstance(hit, dict)
        and isinstance(hit.get("path"), str)
        and isinstance(hit.get("article_id"), str | int | float | None)
        for hit in hits
    ):
        reasons.append(f"{KEY} is a list of hits, each an object with path and article_id")
        return []
    ids = {hit.get("article_id") for hit in hits if hit["path"] in positives} - {None}
    pages = {article_of(Path(path)) for path in positives}
    return [
        hit["path"]
        for hit in hits
        if hit["path"] not in positives
        and hit.get("article_id") not in ids
        and article_of(Path(hit["path"])) not in pages
    ]
