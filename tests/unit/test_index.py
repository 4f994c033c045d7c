"""Indexes: exactness, what is missing, memory, errors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pixelrag.errors import IndexError_
from pixelrag.retrieval import index as index_module
from pixelrag.retrieval.durable import put
from pixelrag.retrieval.hits import Hits, exact_search, merge_top_k, recall_at_k
from pixelrag.retrieval.index import IndexSettings, build_index, bytes_of_index, open_index

FACTORIES = ["Flat", "HNSW16", "IVF16,Flat", "IVF16,PQ8x4fs", "SQ8", "PQ8x4fs,RFlat"]


def unit_vectors(num_rows: int, dim: int = 32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, dim))
    vectors = centres[rng.integers(0, 40, num_rows)] + 0.7 * rng.standard_normal((num_rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return unit_vectors(3000)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return unit_vectors(50, seed=1)


def brute_force(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("factory", [*FACTORIES, "PCA16,SQ8", "HNSW32,SQ8"])
def test_an_index_takes_what_was_foreseen(factory: str, vectors, tmp_path: Path) -> None:
    settings = IndexSettings(factory=factory)
    build_index(vectors, settings).write(tmp_path / "index")
    size = (tmp_path / "index").stat().st_size
    assert bytes_of_index(settings, *vectors.shape) == pytest.approx(size, rel=0.1, abs=50_000)


def test_exact_search_is_exact_over_blocks(vectors, queries, monkeypatch):
    monkeypatch.setattr("pixelrag.retrieval.hits._BLOCK_ROWS", 700)
    scores, rows = brute_force(vectors, queries, 7)
    hits = exact_search(vectors, queries, 7)
    assert (hits.rows_Qk == rows).all()
    np.testing.assert_allclose(hits.scores_Qk, scores, atol=1e-6)
    assert hits.scores_Qk.dtype == np.float32
    assert hits.rows_Qk.dtype == np.int64


@pytest.mark.parametrize("factory", FACTORIES)
def test_written_and_mapped_finds_the_same(vectors, queries, factory, tmp_path):
    settings = IndexSettings(factory=factory, train_rows=2000)
    built = build_index(vectors, settings)
    put(tmp_path / "index.faiss", built.write)
    opened = open_index(tmp_path / "index.faiss", settings)
    assert (opened.num_rows, opened.dim) == vectors.shape
    first, second = built.search(queries, 10), opened.search(queries, 10)
    assert (first.rows_Qk == second.rows_Qk).all()
    recall = recall_at_k(vectors, queries, second, exact_search(vectors, queries, 10))
    assert recall == 1.0 if factory == "Flat" else recall > 0.15  # 4-bit codes are coarse


@pytest.mark.parametrize("factory", ["HNSW16", "IVF16,Flat"])
def test_one_thread_builds_the_same_bytes(vectors, factory, tmp_path):
    for name in ("a", "b"):
        put(tmp_path / name, build_index(vectors, IndexSettings(factory=factory)).write)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_index_that_makes_tables_of_its_file_opens(vectors, queries, tmp_path):
    settings = IndexSettings("IVF64,PQ16x4fs", nprobe=64)
    built = build_index(vectors[:300], settings)
    put(tmp_path / "index", built.write)
    assert (tmp_path / "index").stat().st_size < 64 * 16 * 16 * 4  # bytes of the table
    opened = open_index(tmp_path / "index", settings)
    assert (opened.search(queries, 5).rows_Qk == built.search(queries, 5).rows_Qk).mean() > 0.9


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "PQ8x4fs", "IVF4,Flat"])
def test_what_is_missing_is_no_row(factory):
    vectors = unit_vectors(40)
    index = build_index(vectors, IndexSettings(factory=factory, nprobe=1))
    hits = index.search(vectors[:3], 60)
    assert hits.rows_Qk.shape == (3, 60)
    assert hits.rows_Qk.min() >= 0
    found = hits.found_Qk
    # FAISS itself writes -3.4e38 there, which a softmax over nothing but such takes for a score.
    assert (hits.scores_Qk[~found] == -np.inf).all()
    assert (found.sum(axis=1) <= 40).all()
    assert not found[:, -1].any()
    for rows, ok in zip(hits.rows_Qk, found, strict=True):
        assert len(set(rows[ok])) == ok.sum()
        assert set(rows[~ok]) == {rows[0]}


def test_no_hit_at_all():
    hits = Hits.of(np.full((1, 2), -3e38, np.float32), np.full((1, 2), -1))
    assert not hits.found_Qk.any()
    assert (hits.rows_Qk == 0).all()


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_merging_parts_equals_the_whole(vectors, queries, parts):
    bounds = np.linspace(0, len(vectors), parts + 1).astype(int)
    merged = merge_top_k(
        [
            exact_search(vectors[lo:hi], queries, 10, first_row=lo)
            for lo, hi in itertools.pairwise(bounds)
        ],
        10,
    )
    whole = exact_search(vectors, queries, 10)
    assert (merged.rows_Qk == whole.rows_Qk).all()
    np.testing.assert_allclose(merged.scores_Qk, whole.scores_Qk, atol=1e-6)


def test_merging_orders_ties_by_row_and_keeps_gaps_last():
    left = Hits.of(np.float32([[2, 1, 0]]), np.array([[9, 4, -1]]))
    right = Hits.of(np.float32([[2, 0, 0]]), np.array([[3, -1, -1]]))
    merged = merge_top_k([left, right], 4)
    assert merged.rows_Qk.tolist() == [[3, 9, 4, 3]]
    assert merged.scores_Qk.tolist() == [[2, 2, 1, -np.inf]]
    assert merge_top_k([], 3, num_queries=2).found_Qk.sum() == 0


def test_recall_counts_what_is_among_the_best(vectors, queries):
    exact = exact_search(vectors, queries, 4)
    shifted = exact_search(vectors, queries, 8)
    half = Hits(shifted.scores_Qk[:, 2:6], shifted.rows_Qk[:, 2:6])
    assert recall_at_k(vectors, queries, half, exact) == pytest.approx(0.5)
    nothing = Hits(np.full_like(exact.scores_Qk, -np.inf), exact.rows_Qk)
    assert recall_at_k(vectors, queries, nothing, exact) == 0.0


def test_recall_forgives_equal_passages_and_small_collections(queries):
    vectors = np.concatenate([unit_vectors(6)] * 2)
    exact = exact_search(vectors, queries, 1)
    twin = Hits(exact.scores_Qk, (exact.rows_Qk + 6) % 12)
    assert recall_at_k(vectors, queries, twin, exact) == 1.0
    exact = exact_search(vectors, queries, 20)
    assert recall_at_k(vectors, queries, exact, exact) == 1.0


def test_lost_neighbours_show_in_the_recall():
    """HNSW on inner products of very unlike norms: the gate of a refresh must see it."""
    vectors = unit_vectors(3000)
    vectors *= np.random.default_rng(3).lognormal(0, 1.5, (3000, 1)).astype(np.float32)
    queries = unit_vectors(100, seed=4)
    exact = exact_search(vectors, queries, 10)
    recall = {}
    for ef_search in (10, 500):
        settings = IndexSettings("HNSW4", ef_construction=10, ef_search=ef_search)
        recall[ef_search] = recall_at_k(
            vectors, queries, build_index(vectors, settings).search(queries, 10), exact
        )
    assert recall[10] < 0.9
    assert recall[10] < recall[500]


def test_nprobe_acts(vectors, queries):
    exact = exact_search(vectors, queries, 10)
    recall = [
        recall_at_k(
            vectors,
            queries,
            build_index(vectors, IndexSettings("IVF32,Flat", nprobe=n)).search(queries, 10),
            exact,
        )
        for n in (1, 32)
    ]
    assert recall[0] < 0.9
    assert recall[1] == 1.0


def test_refine_factor_acts(vectors, queries):
    exact = exact_search(vectors, queries, 10)
    recall = [
        recall_at_k(
            vectors,
            queries,
            build_index(vectors, IndexSettings("PQ8x4fs,RFlat", refine_factor=n)).search(
                queries, 10
            ),
            exact,
        )
        for n in (1, 20)
    ]
    assert recall[0] < 0.6
    assert recall[1] > recall[0] + 0.2


def test_ef_construction_and_train_rows_act(vectors, tmp_path):
    contents = []
    for options in (
        {"factory": "HNSW8", "ef_construction": 10},
        {"factory": "HNSW8", "ef_construction": 200},
        {"factory": "IVF8,Flat", "train_rows": 500},
        {"factory": "IVF8,Flat", "train_rows": 1000},
    ):
        put(tmp_path / "index", build_index(vectors, IndexSettings(**options)).write)
        contents.append((tmp_path / "index").read_bytes())
    assert contents[0] != contents[1]
    assert contents[2] != contents[3]


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("Banana", "could not parse"),
        ("PQ7x4fs", "multiple of the number of subquantizers"),
        ("IVF4096,Flat", "should be at least as large as number of clusters"),
        ("IDMap,Flat", "leave out IDMap"),
    ],
)
def test_a_factory_that_does_not_fit(vectors, factory, says):
    with pytest.raises(IndexError_, match=says) as caught:
        build_index(vectors[:100], IndexSettings(factory=factory))
    assert f"index.factory {factory!r}" in str(caught.value)
    assert ".cpp" not in str(caught.value)


def test_bad_queries(vectors):
    index = build_index(vectors, IndexSettings("Flat"))
    for search in (index.search, lambda q, k: exact_search(vectors, q, k)):
        with pytest.raises(IndexError_, match=r"\[2, 5\], expected \[queries, 32\]"):
            search(np.zeros((2, 5), np.float32), 3)
        queries = vectors[:4].copy()
        queries[2, 0] = np.nan
        with pytest.raises(IndexError_, match="query 2 of 4 is not finite"):
            search(queries, 3)
        with pytest.raises(IndexError_, match="k is 0"):
            search(vectors[:1], 0)


def test_files_that_are_no_index(vectors, tmp_path):
    settings = IndexSettings("Flat")
    with pytest.raises(IndexError_, match="no such index"):
        open_index(tmp_path / "nowhere", settings)
    path = tmp_path / "index.faiss"
    put(path, build_index(vectors, settings).write)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(IndexError_, match=str(path)):
        open_index(path, settings)
    path.write_bytes(b"no index at all")
    with pytest.raises(IndexError_, match=str(path)):
        open_index(path, settings)


def test_a_disk_that_fills_leaves_nothing(vectors, tmp_path):
    script = (
        "import resource, sys; from pathlib import Path; import numpy as np\n"
        "from pixelrag.retrieval.durable import put\n"
        "from pixelrag.retrieval.index import IndexSettings, build_index\n"
        "index = build_index(np.ones((20000, 32), np.float32), IndexSettings('Flat'))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: put(Path(sys.argv[1]), index.write)\n"
        "except OSError as error: print('OSError', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "index")], capture_output=True, text=True
    )
    assert done.stdout.startswith("OSError"), done.stderr
    assert list(tmp_path.iterdir()) == []


def _anonymous_mib(script: str, *args: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF16,Flat"])
def test_opening_takes_no_memory_of_its_own(factory, tmp_path):
    vectors = unit_vectors(20_000, dim=128)
    settings = IndexSettings(factory, ef_construction=20)
    path = tmp_path / "index"
    put(path, build_index(vectors, settings).write)
    size = path.stat().st_size / 2**20
    script = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from pixelrag.retrieval.index import IndexSettings, build_index, open_index\n"
        "def used():\n"
        "    lines = open('/proc/self/smaps_rollup')\n"
        "    return next(int(l.split()[1]) for l in lines if l.startswith('Anonymous')) / 1024\n"
        "build_index(np.ones((9, 8), np.float32), IndexSettings('Flat'))\n"
        "before = used()\n"
        "kept = [open_index(Path(sys.argv[1]), IndexSettings()) for _ in range(2)]\n"
        "[i.search(np.ones((1, 128), np.float32), 5) for i in kept]\n"
        "print(used() - before)\n"
    )
    assert _anonymous_mib(script, str(path)) < 0.25 * size


def test_a_search_leaves_the_thread_limit_as_it_was(vectors):
    import faiss

    before = faiss.omp_get_max_threads()
    seen = []
    index = build_index(vectors, IndexSettings("Flat"), threads=1)
    real = index._index.search
    index._index.search = lambda *a: (seen.append(faiss.omp_get_max_threads()), real(*a))[1]
    faiss.omp_set_num_threads(3)
    try:
        index.search(vectors[:1], 2)
        assert seen == [1]
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


def test_without_a_gpu_the_cpu_does_it(vectors, tmp_path, monkeypatch):
    import faiss

    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    settings = IndexSettings("Flat")
    built = build_index(vectors, settings, device="cuda:1")
    put(tmp_path / "index", built.write)
    opened = open_index(tmp_path / "index", settings, device="cuda")
    assert built.num_rows == opened.num_rows == len(vectors)
    assert built.fallback == opened.fallback == "faiss sees 0 GPUs"
    assert build_index(vectors, settings).fallback == ""


@pytest.fixture
def gpus(monkeypatch) -> list[tuple[str, int]]:
    """A stand-in for the GPUs of faiss: copies that stay in memory; returns what was moved."""
    import faiss

    moves = []

    class Resources:
        def setTempMemory(self, size):
            moves.append(("scratch", size))

    def to_gpu(resources, number, index):
        if isinstance(index, faiss.IndexHNSW):
            raise RuntimeError("Error in virtual x at gpu/GpuCloner.cpp:1: no such index on a GPU")
        moves.append((f"to {number}", index.ntotal))
        return faiss.clone_index(index)

    def to_cpu(index):
        moves.append(("back", index.ntotal))
        return index

    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", to_cpu, raising=False)
    return moves


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat"])
def test_a_gpu_builds_and_searches(vectors, queries, factory, tmp_path, gpus, monkeypatch):
    settings = IndexSettings(factory, nprobe=3)
    expected = build_index(vectors, settings).search(queries, 5)
    assert gpus == []
    count = index_module._enough_rows
    monkeypatch.setattr(
        index_module, "_enough_rows", lambda i: (gpus.append(("counted", 0)), count(i))[1]
    )
    built = build_index(vectors, settings, device="cuda:1")
    # Cells are counted on the CPU, where an index knows them; trained and filled on the GPU.
    assert [gpus[0], *gpus[2:]] == [("counted", 0), ("to 1", 0), ("back", len(vectors))]
    put(tmp_path / "index", built.write)
    opened = open_index(tmp_path / "index", settings, device="cuda")
    assert gpus[-1] == ("to 0", len(vectors))
    assert built.fallback == opened.fallback == ""
    for index in (built, opened):
        assert (index.search(queries, 5).rows_Qk == expected.rows_Qk).all()


def test_what_no_gpu_has_stays_on_the_cpu(vectors, gpus):
    built = build_index(vectors, IndexSettings("HNSW8"), device="cuda:1")
    assert built.fallback == "no such index on a GPU"
    assert [move[0] for move in gpus] == ["scratch"]
    far = build_index(vectors, IndexSettings("Flat"), device="cuda:2")
    assert far.fallback == "faiss sees 2 GPUs"


def test_only_one_file_names_faiss():
    root = Path(__file__).parents[2] / "pixelrag"
    owners = [p.name for p in root.rglob("*.py") if "import faiss" in p.read_text()]
    assert owners == ["index.py"]
