"""From rows to a rank's model inputs: which documents stand where."""

from pathlib import Path

import pytest

from pixelrag.config.parts import ModelConfig
from pixelrag.data.schema import Document, PairRow
from pixelrag.models.preprocess import Preprocessor
from pixelrag.train.batches import PairCollator


@pytest.fixture(scope="module")
def preprocessor(tiny_models: dict[str, Path]) -> Preprocessor:
    from pixelrag.models import load_embedder

    return load_embedder(ModelConfig(name_or_path=str(tiny_models["bert"])))[1]


def row(query: str, positives: list[str], negatives: list[str] | None = None) -> PairRow:
    documents = [tuple(map(Document.of_text, texts)) for texts in (positives, negatives or [])]
    return PairRow(query, documents[0], documents[1], f"rows:{query}")


def tokens(inputs) -> list[list[int]]:
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask > 0].tolist() for ids, mask in pairs]


def test_every_positive_of_a_query_is_found_among_the_sorted_documents(preprocessor):
    rows = [
        row("how to open a file", ["open it with care and attention", "open"], ["close the file"]),
        row("sort", ["sort a long list"]),
        row("how to parse", ["b", "parse the number", "cc"], ["a", "dd"]),
    ]
    batch = PairCollator(rows, preprocessor)[[0, 1, 2]]
    assert batch.query_ids == ["rows:sort", "rows:how to parse", "rows:how to open a file"]
    assert batch.positive_BK.shape == (3, 3)
    for query, indices in zip(batch.query_ids, batch.positive_BK.tolist(), strict=True):
        expected = next(r for r in rows if r.sample_id == query).positives
        found = [index for index in indices if index >= 0]
        assert indices == found + [-1] * (3 - len(found))
        wanted = tokens(preprocessor.documents(expected))
        assert sorted(tokens(batch.documents)[i] for i in found) == sorted(wanted)
        assert [batch.document_ids[i] for i in found] == [query] * len(expected)


def test_an_empty_share_still_has_inputs_that_count_for_nothing(preprocessor):
    batch = PairCollator([row("q", ["p"])], preprocessor)[[]]
    assert batch.num_real_queries == 0
    assert len(batch.queries["input_ids"]) == 1
    assert batch.positive_BK.tolist() == [[0]]
