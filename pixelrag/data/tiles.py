"""What the file name of a tile says: PixelRAG cuts an article's page into `<article>_chunk_<i>`."""

from pathlib import Path


def article_of(tile: Path) -> str:
    """The article that a tile shows a part of; without `_chunk_`, the file's name itself."""
    return tile.stem.partition("_chunk_")[0]
