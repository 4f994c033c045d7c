"""What `pixelrag mine` can be told: a contrastive configuration and two sections more."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.problems import Conflict
from pixelrag.config.rag_parts import SearchIndexConfig
from pixelrag.config.section import Section


class MiningConfig(Section):
    num_negatives: int = Field(7, ge=1)
    """Negatives to give a row, at most."""
    depth: int = Field(20, ge=1)
    """Documents to retrieve for a query, its positive among them."""
    filter: Literal["none", "margin", "article", "skip_top1"] = "none"
    """Drop hits: too close to the positive (margin), of its article, or the first (skip_top1)."""
    margin: float = Field(0.95, gt=0, le=1)
    """filter margin: keep what scores below this share of the positive's score."""
    corpus: str | None = None
    """JSONL corpus to search; null = all documents of data.train."""
    batch_size: int = Field(32, ge=1)
    """Rows a rank encodes at once."""
    shard_rows: int = Field(8192, ge=1)
    """Rows encoded, or searched for, between two writes; finished ones survive a crash."""


class MiningIndexConfig(SearchIndexConfig):
    factory: str = Field("Flat", min_length=1)
    """FAISS factory string, such as Flat (exact), HNSW32 or IVF1024,PQ48x4fs; inner product."""


class MineConfig(ContrastiveConfig):
    """Everything `pixelrag mine` can be told; what concerns training is not used."""

    mining: MiningConfig = MiningConfig()
    index: MiningIndexConfig = MiningIndexConfig()

    def conflicts(self) -> Iterator[Conflict]:
        """Yield every pair of settings that cannot stand together, with what mends it."""
        yield from super().conflicts()
        mining = self.mining
        if mining.num_negatives > mining.depth:
            yield Conflict(
                ("mining.num_negatives", "mining.depth"),
                got=f"mining.num_negatives {mining.num_negatives} of mining.depth {mining.depth}",
                remedy="retrieve more documents than negatives are wanted",
            )
        if mining.filter != "margin" and mining.margin != MiningConfig().margin:
            yield Conflict(
                ("mining.margin", "mining.filter"),
                got=f"mining.margin {mining.margin} while mining.filter is {mining.filter}",
                remedy="set mining.filter margin, or leave mining.margin out",
            )
