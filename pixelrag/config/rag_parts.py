"""Sections about an index, and about how the RAG job renews its knowledge base."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.problems import Conflict
from pixelrag.config.section import Section

_DEVICE_KINDS = ("cpu", "cuda")


class SearchIndexConfig(Section):
    factory: str = Field("HNSW32", min_length=1)
    """FAISS factory string, such as Flat, HNSW32 or IVF1024,PQ48x4fs; inner product."""
    start_from: str | None = Field(None, min_length=1)
    """What `pixelrag index` made with this configuration: the first generation, not made again."""
    train_rows: int | None = Field(None, ge=1)
    """Vectors that an index which must be trained is trained on; null = by its size."""
    ef_construction: int = Field(80, ge=1)
    """HNSW: breadth of the search while building."""
    ef_search: int = Field(64, ge=1)
    """HNSW: breadth of a search."""
    nprobe: int = Field(16, ge=1)
    """IVF: cells that a search looks into."""
    refine_factor: int = Field(4, ge=1)
    """RFlat: so many times the hits are looked at again with exact scores."""
    search_threads: int = Field(1, ge=1)
    """CPU threads of a search."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks search: cuda needs faiss-gpu; auto: there if small and faiss can, else cpu."""
    holders: Literal["ranks", "ray"] = "ranks"
    """Who searches: the ranks, or Ray actors on other hosts, one for each index file."""


class IndexConfig(SearchIndexConfig):
    num_shards: int = Field(1, ge=1)
    """More than 1: so many index files, dealt out to the ranks; 1: every rank maps the whole."""


class RefreshConfig(Section):
    every_steps: int | None = Field(None, ge=1)
    """Renew the knowledge base every so many steps; null = never."""
    trigger: Literal["steps", "drift"] = "steps"
    """drift: every so many steps only measure, and renew where probes have drifted."""
    drift_threshold: float = Field(0.05, gt=0, le=2)
    """Mean of 1 - cosine over the probes from which drift renews."""
    drift_probes: int = Field(64, ge=1)
    """Passages whose drift is measured."""
    deterministic_lag: int | None = Field(None, ge=0)
    """Use a generation exactly so many steps after its snapshot, waiting for it if need be."""
    max_staleness: int | None = Field(None, ge=1)
    """Steps that the generation in use may be old; null = any."""
    on_stale: Literal["stop", "warn"] = "warn"
    """What to do when it is older."""
    final_refresh: Literal["wait", "skip"] = "wait"
    """At the end: wait for the refresh in flight, or drop it."""
    keep: int = Field(2, ge=1)
    """Generations to keep, besides those that checkpoints need."""
    workers: Literal["local", "ray"] = "local"
    """local: processes on the host of rank 0; ray: actors on a Ray cluster (extra ray)."""
    devices: Literal["auto"] | list[str] = "auto"
    """Where to encode: auto (GPUs that no rank uses, else the CPU), or a list such as cuda:1."""
    num_workers: int = Field(1, ge=1)
    """Encoding processes on each device; with workers ray, actors for each entry of devices."""
    threads: int = Field(1, ge=1)
    """CPU threads of each process."""
    nice: int = Field(19, ge=0, le=19)
    """Their priority: 0 as the training's, 19 what the training leaves."""
    batch_size: int = Field(64, ge=1)
    """Passages encoded at once."""
    shard_rows: int = Field(8192, ge=1)
    """Passages encoded between two writes; finished ones survive a crash."""
    timeout_seconds: float = Field(1800, gt=0)
    """A process that shows no progress for so long is killed."""
    retries: int = Field(2, ge=0)
    """Further attempts after a failure that may pass."""
    retry_seconds: float = Field(5, ge=0)
    """Pause before the first of them; doubled for each further one."""
    min_recall: float = Field(0.9, ge=0, le=1)
    """An index that finds less of the true best recall_k is not used."""
    recall_k: int = Field(10, ge=1)
    """Hits over which its recall is measured."""
    parity_tolerance: float | None = Field(None, gt=0)
    """Relative difference of passages encoded twice; null = 0.001, with bf16 0.05."""

    @field_validator("devices", mode="before")
    @classmethod
    def _real_devices(cls, value: Any) -> Any:
        if value == "auto":
            return value
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(map(_is_device, names)):
            raise PydanticCustomError("paths", "auto, or a list such as cpu, cuda:1")
        return names


class RayConfig(Section):
    address: str = Field("auto", pattern=r"^(auto|[^:/]+:\d+)$")
    """Cluster to join: host:port of its head, or auto (RAY_ADDRESS, or what runs on this host)."""


def _is_device(name: Any) -> bool:
    kind, colon, number = str(name).partition(":")
    return kind in _DEVICE_KINDS and (number.isdecimal() and kind == "cuda" if colon else True)


def refresh_conflicts(refresh: RefreshConfig, prefix: str = "refresh") -> Iterator[Conflict]:
    """Yield every pair of settings that cannot stand together, with what mends it."""
    if refresh.every_steps is None:
        for name in ("trigger", "deterministic_lag", "max_staleness"):
            value = getattr(refresh, name)
            if value not in (None, "steps"):
                yield Conflict(
                    (f"{prefix}.{name}", f"{prefix}.every_steps"),
                    got=f"{prefix}.{name} {value} without {prefix}.every_steps",
                    remedy=f"say how often: --{prefix}.every_steps 100; or leave {name} out",
                )
        return
    # Not whether it was given: a run's own config.yaml gives everything.
    default = RefreshConfig.model_fields["drift_threshold"].default
    if refresh.drift_threshold != default and refresh.trigger != "drift":
        yield Conflict(
            (f"{prefix}.drift_threshold", f"{prefix}.trigger"),
            got=f"{prefix}.drift_threshold with {prefix}.trigger steps",
            remedy=f"set {prefix}.trigger drift, or leave the threshold out",
        )
    stale, lag = refresh.max_staleness, refresh.deterministic_lag
    if stale is not None and lag is not None and refresh.on_stale == "stop" and stale < lag:
        yield Conflict(
            (f"{prefix}.max_staleness", f"{prefix}.deterministic_lag"),
            got=f"{prefix}.max_staleness {stale} with {prefix}.deterministic_lag {lag}",
            remedy="a generation is at least as old as the lag before the next: raise the former",
        )


def ray_conflicts(ray: RayConfig, index: IndexConfig, refresh: RefreshConfig) -> Iterator[Conflict]:
    """Yield what cannot be done on a Ray cluster, and an address that nothing uses."""
    devices = [] if refresh.devices == "auto" else refresh.devices
    numbered = [name for name in devices if ":" in name]
    if refresh.workers == "ray" and numbered:
        yield Conflict(
            ("refresh.devices", "refresh.workers"),
            got=f"refresh.devices {numbered[0]} with refresh.workers ray",
            remedy="say cuda: Ray gives each actor a GPU of its own",
        )
    if index.holders == "ray" and index.device == "cuda":
        yield Conflict(
            ("index.device", "index.holders"),
            got="index.device cuda with index.holders ray",
            remedy="leave index.device out: actors search on the CPU",
        )
    if ray.address != "auto" and (refresh.workers, index.holders) == ("local", "ranks"):
        yield Conflict(
            ("ray.address", "refresh.workers"),
            got=f"ray.address {ray.address} with refresh.workers local and index.holders ranks",
            remedy="set refresh.workers ray or index.holders ray, or leave the address out",
        )
