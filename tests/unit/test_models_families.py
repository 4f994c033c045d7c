"""Architectures beyond the three tiny ones: what was written for BERT and Qwen3 holds for them."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, PretrainedConfig

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.export.hf import export_embedder
from pixelrag.models import load_embedder
from pixelrag.models.tiny_tokenizer import byte_tokenizer, wordpiece_tokenizer

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "initializer_range": 0.2,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
# Kind: configuration class, its sizes, limit of positions, pooling by default.
FAMILIES: dict[str, tuple[str, dict[str, object], int, str]] = {
    "roberta": ("RobertaConfig", SIZES | {"pad_token_id": 1}, 64, "mean"),
    "xlm-roberta": ("XLMRobertaConfig", SIZES | {"pad_token_id": 1}, 64, "mean"),
    "mpnet": ("MPNetConfig", SIZES | {"pad_token_id": 1}, 64, "mean"),
    "electra": ("ElectraConfig", SIZES | {"embedding_size": 16}, 66, "mean"),
    "deberta-v2": ("DebertaV2Config", SIZES, 66, "mean"),
    "distilbert": (
        "DistilBertConfig",
        {
            "dim": 32,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 66,
            "initializer_range": 0.2,
        },
        66,
        "mean",
    ),
    "modernbert": (
        "ModernBertConfig",
        SIZES | {"pad_token_id": 0, "local_attention": 8},
        66,
        "mean",
    ),
    "llama": ("LlamaConfig", DECODER, 66, "last"),
    "mistral": ("MistralConfig", DECODER | {"sliding_window": 8}, 66, "last"),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 66,
            "init_std": 0.2,
            "pad_token_id": 0,
        },
        66,
        "last",
    ),
    "qwen2": ("Qwen2Config", DECODER, 66, "last"),
    "gemma3_text": ("Gemma3TextConfig", DECODER, 66, "last"),
}
# Their attention is their own, with a bias by distance.
PADDED = {"mpnet", "deberta-v2"}
TEXTS = ["how do I read a file?", "sort", "count the words in a long list of lines of text"]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved model of the kind that the test asks for, with random weights."""
    class_name, sizes, _, pooling = FAMILIES[request.param]
    build = byte_tokenizer if pooling == "last" else wordpiece_tokenizer
    tokenizer = build(max_length=10**6)
    config: PretrainedConfig = getattr(transformers, class_name)(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("folder", "kind"), [(k, k) for k in FAMILIES], indirect=["folder"])
def test_family(folder: Path, kind: str, tmp_path: Path) -> None:
    _, _, limit, pooling = FAMILIES[kind]
    config = ModelConfig(name_or_path=str(folder))
    embedder, preprocessor = load_embedder(config, dtype=torch.float64)
    embedder.eval()
    assert embedder.pooling == pooling
    assert preprocessor.document_max_length == limit
    assert len(embedder.blocks()) == 3

    batch = preprocessor.documents([Document.of_text(text) for text in [*TEXTS, "word " * 99]])
    assert batch["input_ids"].shape[1] == limit
    together = embedder(**batch)
    alone = torch.cat([embedder(**preprocessor.documents([Document.of_text(t)])) for t in TEXTS])
    torch.testing.assert_close(together[:3], alone, rtol=0, atol=1e-9)
    weights = torch.arange(together.numel()).reshape(together.shape).cos()
    (together * weights).sum().backward()
    unused = [n for n, p in embedder.named_parameters() if p.grad is None]
    assert unused == []

    assert embedder.unpadded == (kind not in PADDED)
    padded, _ = load_embedder(
        ModelConfig(name_or_path=str(folder), unpadded=False), dtype=torch.float64
    )
    expected = padded.eval()(**batch)
    assert (together - expected).norm() / expected.norm() < 1e-10
    (expected * weights).sum().backward()
    mine, theirs = (
        torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (embedder, padded)
    )
    assert (mine - theirs).norm() / theirs.norm() < 1e-10

    lora, _ = load_embedder(config, LoraConfig(enabled=True))
    adapted = [n for n, m in lora.named_modules() if isinstance(m, nn.Linear) and "lora_A" in n]
    assert len(adapted) % 3 == 0
    assert adapted

    whole = export_embedder(
        embedder, preprocessor, embedder.state_dict(), tmp_path / "whole", temperature=0.07
    )
    reloaded = AutoModel.from_pretrained(whole, dtype=torch.float32).eval()
    exported, _ = load_embedder(ModelConfig(name_or_path=str(whole)))
    batch = preprocessor.queries(TEXTS)
    hidden = reloaded(**batch).last_hidden_state
    mine = exported.eval().backbone(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden[real], mine[real], rtol=0, atol=1e-5)
    expected = embedder(**batch)
    assert (exported(**batch) - expected).norm() / expected.norm() < 1e-5
