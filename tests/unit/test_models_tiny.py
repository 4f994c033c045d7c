"""The tiny models are the same on every call, and alive."""

from pathlib import Path

import pytest
import torch

from pixelrag.config.parts import ModelConfig
from pixelrag.models import load_embedder
from pixelrag.models.tiny import save_tiny_bert, save_tiny_qwen3, save_tiny_qwen3_vl

SAVERS = [save_tiny_bert, save_tiny_qwen3, save_tiny_qwen3_vl]


@pytest.mark.parametrize("save", SAVERS)
def test_two_folders_are_equal_byte_by_byte(save: object, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, second = save(tmp_path / "a", seed=3), save(tmp_path / "b", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    other = save(tmp_path / "c", seed=4)
    names = sorted(path.name for path in first.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, other)]
    assert weights[0] != weights[1]


@pytest.mark.parametrize("save", SAVERS)
def test_dropout_is_active_in_training_only(save: object, tmp_path: Path) -> None:
    save(tmp_path / "model", dropout=0.3)
    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=str(tmp_path / "model")))
    batch = preprocessor.queries(["how do I read a file?"])
    assert embedder.training
    assert not torch.equal(embedder(**batch), embedder(**batch))
    embedder.eval()
    assert torch.equal(embedder(**batch), embedder(**batch))


@pytest.mark.parametrize("save", SAVERS)
def test_any_text_has_tokens_of_its_own(save: object, tmp_path: Path) -> None:
    save(tmp_path / "model")
    _, preprocessor = load_embedder(ModelConfig(name_or_path=str(tmp_path / "model")))
    tokenizer = preprocessor.tokenizer
    text = "x_1 = {'key': [0.5, None]}  # ~`@$%^&|\\"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids
    assert len(tokenizer("return the function")["input_ids"]) < 8


def test_own_texts_shape_the_vocabulary(tmp_path: Path) -> None:
    texts = ["zyzzyva zyzzyva zyzzyva quokka quokka"] * 5
    for save in SAVERS:
        folder = save(tmp_path / save.__name__, texts=texts, vocab_size=400)
        _, preprocessor = load_embedder(ModelConfig(name_or_path=str(folder)))
        plain = preprocessor.tokenizer("zyzzyva", add_special_tokens=False)["input_ids"]
        assert len(plain) <= 2
