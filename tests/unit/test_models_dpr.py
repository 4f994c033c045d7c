"""DPR's encoders: their numbers are transformers' own, and what is exported is a plain BERT."""

from pathlib import Path

import pytest
import torch
from transformers import DPRConfig, DPRContextEncoder, DPRQuestionEncoder

from pixelrag.config.parts import ModelConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.data.schema import Document
from pixelrag.errors import ModelError
from pixelrag.export.hf import export_embedder
from pixelrag.models import load_embedder
from pixelrag.models.tiny_tokenizer import wordpiece_tokenizer

KINDS = {"question": DPRQuestionEncoder, "context": DPRContextEncoder}


def save(folder: Path, kind: str, projection_dim: int = 0) -> torch.nn.Module:
    tokenizer = wordpiece_tokenizer()
    config = DPRConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, projection_dim=projection_dim,
    )  # fmt: skip
    torch.manual_seed(len(kind))
    model = KINDS[kind](config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str):
    reference = save(tmp_path, kind)
    embedder, preprocessor = load_embedder(EncoderConfig(name_or_path=str(tmp_path)))
    batch = preprocessor.documents([Document("the quick brown fox", None, "a")] * 2)
    got = embedder(**batch)
    expected = reference(**batch).pooler_output
    torch.testing.assert_close(got, expected)
    assert embedder.pooling == "cls"
    assert not torch.allclose(got.norm(dim=1), torch.ones(2), atol=0.1)


def test_the_contrastive_job_keeps_unit_vectors(tmp_path: Path):
    save(tmp_path, "question")
    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=str(tmp_path)))
    norms = embedder(**preprocessor.queries(["a fox"])).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(1))


def test_an_export_gives_the_same_vectors(tmp_path: Path):
    save(tmp_path / "dpr", "context")
    embedder, preprocessor = load_embedder(EncoderConfig(name_or_path=str(tmp_path / "dpr")))
    export_embedder(
        embedder, preprocessor, embedder.state_dict(), tmp_path / "out", temperature=1.0
    )
    again, _ = load_embedder(EncoderConfig(name_or_path=str(tmp_path / "out")))
    batch = preprocessor.queries(["a fox and a dog"])
    torch.testing.assert_close(again(**batch), embedder(**batch))


def test_a_projection_is_refused(tmp_path: Path):
    save(tmp_path, "question", projection_dim=8)
    with pytest.raises(ModelError, match="projection_dim 0"):
        load_embedder(EncoderConfig(name_or_path=str(tmp_path)))


@pytest.mark.parametrize(("asked", "unit"), [(True, True), (False, False), (None, False)])
def test_the_configuration_decides_about_lengths(tmp_path: Path, asked: bool | None, unit: bool):
    save(tmp_path, "question")
    embedder, _ = load_embedder(EncoderConfig(name_or_path=str(tmp_path), normalize=asked))
    assert embedder.normalize is unit
