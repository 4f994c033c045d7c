"""Which documents become negatives, against a plain computation on a few vectors."""

from pathlib import Path

import numpy as np
import pytest

from pixelrag.config.mine import MiningConfig
from pixelrag.data.schema import Document
from pixelrag.data.tiles import article_of
from pixelrag.retrieval.index import IndexSettings, build_index
from pixelrag.retrieval.mining import Miner

QUERY = np.array([1.0, 0.0], np.float32)
# Scores with the query: 0.9, 0.8, ... 0.1; document 2 (0.7) answers it.
VECTORS = np.array([[s, np.sqrt(1 - s * s)] for s in np.arange(0.9, 0.05, -0.1)], np.float32)


def _mined(documents, positive, *, vectors=VECTORS, others=(), index=None, **settings):
    settings = MiningConfig(**{"num_negatives": 3, "depth": 9} | settings)
    index = index or build_index(vectors, IndexSettings(factory="Flat"))
    answers = {"q": [positive, *others]}
    miner = Miner(documents, vectors, index, answers, settings)
    own = vectors[[documents.index(positive)]] if positive in documents else vectors[[2]]
    return miner(["q"], [positive], QUERY[None], own)[0]


@pytest.fixture
def texts():
    return [Document.of_text(f"text {i}") for i in range(9)]


@pytest.fixture
def tiles(tmp_path):
    """Nine tiles, three of each article; tile 5 repeats the bytes of tile 2."""
    documents = []
    for i in range(9):
        path = tmp_path / f"{'abc'[i % 3]}_chunk_{i}.png"
        path.write_bytes(b"2" if i == 5 else str(i).encode())
        documents.append(Document.of_image(path))
    return documents


def _numbers(mined, documents):
    return [documents.index(document) for document in mined.documents]


def test_the_best_that_do_not_answer(texts):
    mined = _mined(texts, texts[2])
    assert _numbers(mined, texts) == [0, 1, 3]
    assert mined.scores == pytest.approx([0.9, 0.8, 0.6])
    assert mined.ranks == [1, 2, 4]
    assert (mined.positive_score, mined.positive_rank) == (pytest.approx(0.7), 3)


def test_depth_bounds_what_is_looked_at(texts):
    mined = _mined(texts, texts[2], depth=2, num_negatives=2)
    assert _numbers(mined, texts) == [0, 1]
    assert mined.positive_rank is None
    assert _numbers(_mined(texts, texts[2], depth=3), texts) == [0, 1]


def test_skip_top1_leaves_out_the_first_that_is_no_answer(texts):
    assert _numbers(_mined(texts, texts[2], filter="skip_top1"), texts) == [1, 3, 4]
    assert _numbers(_mined(texts, texts[0], filter="skip_top1"), texts) == [2, 3, 4]


@pytest.mark.parametrize(("margin", "expected"), [(0.95, [3, 4, 5]), (0.8, [4, 5, 6])])
def test_margin_keeps_what_is_far_enough_below_the_answer(texts, margin, expected):
    mined = _mined(texts, texts[2], filter="margin", margin=margin)
    assert _numbers(mined, texts) == expected
    assert all(score < margin * 0.7 for score in mined.scores)


def test_margin_below_a_negative_score(texts):
    mined = _mined(texts, texts[2], vectors=-VECTORS, filter="margin", margin=0.8)
    assert _numbers(mined, texts) == [0]
    assert mined.scores[0] == pytest.approx(-0.9)


def test_article_leaves_out_the_positives_own(tiles):
    positive = tiles[1]
    mined = _mined(tiles, positive, filter="article", num_negatives=9)
    assert {article_of(d.image) for d in mined.documents} == {"a", "c"}
    assert _numbers(mined, tiles) == [0, 2, 3, 6, 8]  # 5 repeats 2
    assert article_of(Path("x/page.png")) == "page"


def test_content_decides_what_answers(tiles):
    """Tile 5 shows what the positive, tile 2, shows: it is never a negative."""
    mined = _mined(tiles, tiles[2], num_negatives=9)
    assert _numbers(mined, tiles) == [0, 1, 3, 4, 6, 7, 8]


def test_answers_of_the_same_query_in_other_rows_are_no_negatives(texts):
    mined = _mined(texts, texts[2], others=[texts[0], Document.of_text("text 3")])
    assert _numbers(mined, texts) == [1, 4, 5]


def test_negatives_are_of_the_positives_kind(texts, tiles):
    mixed = [*texts[:4], *tiles[4:]]
    assert _numbers(_mined(mixed, mixed[2], num_negatives=9), mixed) == [0, 1, 3]
    assert _numbers(_mined(mixed, mixed[4], num_negatives=9), mixed) == [5, 6, 7, 8]


def test_a_positive_outside_the_corpus_has_its_score(texts):
    mined = _mined(texts, Document.of_text("elsewhere"))
    assert mined.positive_rank is None
    assert mined.positive_score == pytest.approx(0.7)
    assert _numbers(mined, texts) == [0, 1, 2]


def test_nothing_left(texts):
    mined = _mined(texts, texts[8], filter="margin")
    assert (mined.documents, mined.scores, mined.ranks) == ([], [], [])


def test_an_approximate_index_changes_no_score():
    """A product quantiser's own scores are off; those in the rows are the vectors' own."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((400, 2)).astype(np.float32)
    documents = [Document.of_text(f"text {i}") for i in range(400)]
    index = build_index(vectors, IndexSettings(factory="IVF4,PQ2x4", nprobe=4))
    mined = _mined(documents, documents[2], vectors=vectors, index=index, depth=40)
    exact = vectors.astype(np.float64) @ QUERY
    assert mined.scores == pytest.approx([exact[i] for i in _numbers(mined, documents)], abs=1e-12)
    assert mined.scores == sorted(mined.scores, reverse=True)
    off = index.search(QUERY[None], 3)
    assert not np.allclose(off.scores_Qk[0], exact[off.rows_Qk[0]], atol=1e-3)
