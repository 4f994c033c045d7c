"""The encoder's numbers: padding, rope state, precision, checkpointing."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.errors import ModelError
from pixelrag.models import Embedder, Preprocessor, load_embedder
from pixelrag.models.precision import KeepFloat64

TEXTS = ["how do I read a file?", "sort", "count the words in a long list of lines of text"]


def _load(folder: Path, **options: object) -> tuple[Embedder, Preprocessor]:
    lora = options.pop("lora", None)
    dtype = options.pop("dtype", torch.float32)
    return load_embedder(ModelConfig(name_or_path=str(folder), **options), lora, dtype=dtype)


def _documents(tiles: list[Path]) -> list[Document]:
    return [
        Document.of_image(tiles[0]),
        Document.of_text("def add(a, b): return a + b"),
        Document.of_image(tiles[3]),
    ]


def _left_padded(batch: dict[str, torch.Tensor], pad_id: int) -> dict[str, torch.Tensor]:
    ids, mask = torch.full_like(batch["input_ids"], pad_id), torch.zeros_like(batch["input_ids"])
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids[row, -length:] = batch["input_ids"][row, :length]
        mask[row, -length:] = 1
    return batch | {"input_ids": ids, "attention_mask": mask}


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def _gradients(
    embedder: Embedder, batch: dict[str, torch.Tensor], *, seed: int = 0, **options: bool
) -> dict[str, torch.Tensor | None]:
    """Gradients of a fixed function of the embeddings, dropout drawn from `seed`."""
    embedder.zero_grad()
    torch.manual_seed(seed)
    emb = embedder(**batch, **options)
    weights = torch.arange(emb.numel(), dtype=emb.dtype).reshape(emb.shape).cos()
    (emb * weights).sum().backward()
    return {n: p.grad for n, p in embedder.named_parameters() if p.requires_grad}


def _check_equal_gradients(
    got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], bar: float
) -> None:
    assert {n for n, g in got.items() if g is None} == {n for n, g in expected.items() if g is None}
    used = [n for n, g in expected.items() if g is not None]
    mine = torch.cat([got[n].double().flatten() for n in used])
    theirs = torch.cat([expected[n].double().flatten() for n in used])
    assert theirs.norm() > 1e-3
    assert _relative(mine, theirs) <= bar
    assert abs((mine.norm() / theirs.norm()).item() - 1) <= bar


@pytest.mark.parametrize("kind", ["bert", "qwen3", "qwen3_vl"])
def test_unit_vectors_that_do_not_depend_on_the_batch(
    tiny_models: dict[str, Path], kind: str
) -> None:
    embedder, preprocessor = _load(tiny_models[kind])
    embedder.eval()
    together = embedder(**preprocessor.queries(TEXTS))
    alone = torch.cat([embedder(**preprocessor.queries([text])) for text in TEXTS])
    assert together.shape == (3, embedder.embedding_dim)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert (together[0] - together[1]).norm() > 0.05


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_either_padding_side(
    tiny_models: dict[str, Path], tiles: list[Path], kind: str, attention: str
) -> None:
    embedder, preprocessor = _load(tiny_models[kind], attention=attention, dtype=torch.float64)
    batches = [preprocessor.queries(TEXTS)]
    if kind == "qwen3_vl":
        batches.append(preprocessor.documents(_documents(tiles)))
    for right in batches:
        left = _left_padded(right, preprocessor.tokenizer.pad_token_id)
        assert (left["attention_mask"] != right["attention_mask"]).any()
        torch.testing.assert_close(embedder(**left), embedder(**right), rtol=0, atol=1e-12)
        on_the_left, on_the_right = _gradients(embedder, left), _gradients(embedder, right)
        _check_equal_gradients(on_the_left, on_the_right, 1e-10)


def test_padding_is_not_told_by_token_identity(tiny_models: dict[str, Path]) -> None:
    """Qwen pads with <|endoftext|>, which Qwen3-Embedding also pools at."""
    embedder, preprocessor = _load(tiny_models["qwen3"])
    batch = preprocessor.queries(TEXTS)
    pad = preprocessor.tokenizer.pad_token_id
    last = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][torch.arange(3), last] == pad).all()
    other = batch["input_ids"].where(batch["attention_mask"].bool(), 5)
    torch.testing.assert_close(embedder(**batch), embedder(**batch | {"input_ids": other}))


def test_images_do_not_leak_into_the_next_text_batch(
    tiny_models: dict[str, Path], tiles: list[Path]
) -> None:
    """huggingface/transformers#44873: rope deltas of an image batch moved the next texts."""
    used, preprocessor = _load(tiny_models["qwen3_vl"])
    fresh, _ = _load(tiny_models["qwen3_vl"])
    used(**preprocessor.documents([Document.of_image(tiles[0]), Document.of_image(tiles[3])]))
    queries = preprocessor.queries(TEXTS)
    assert torch.equal(used(**queries), fresh(**queries))


def test_text_documents_mix_with_images(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], dtype=torch.float64)
    documents = _documents(tiles)
    together = embedder(**preprocessor.documents(documents))
    alone = torch.cat([embedder(**preprocessor.documents([d])) for d in documents])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_the_image_matters(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.documents([Document.of_image(tiles[0])])
    other = batch | {"pixel_values": -batch["pixel_values"]}
    assert (embedder(**batch) - embedder(**other)).norm() > 1e-3


def test_equals_transformers_own_forward(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    """Positions and pooling against the model called as its own documentation does."""
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.documents([Document.of_image(tiles[3])])
    model = embedder.base_model
    is_image = (batch["input_ids"] == model.config.image_token_id).int()
    assert is_image.sum() == 20
    inputs = {name: value for name, value in batch.items() if name != "num_images"}
    hidden = model(**inputs, mm_token_type_ids=is_image).last_hidden_state[0, -1]
    torch.testing.assert_close(embedder(**batch)[0], hidden / hidden.norm())


@pytest.mark.parametrize("kind", ["bert", "qwen3_vl"])
def test_float64_is_float64_all_the_way(
    tiny_models: dict[str, Path], tiles: list[Path], kind: str
) -> None:
    """A central difference at 1e-6 would drown in any float32 rounding on the way."""
    embedder, preprocessor = _load(tiny_models[kind], dtype=torch.float64)
    embedder.eval()
    batch = preprocessor.queries(TEXTS)
    if kind == "qwen3_vl":
        batch = preprocessor.documents(_documents(tiles))
    gradients = _gradients(embedder, batch)
    for name, parameter in embedder.named_parameters():
        if not name.endswith(("layers.1.mlp.up_proj.weight", "linear_fc1.weight", "dense.weight")):
            continue
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            parameter.data += sign * 1e-6 * direction
            emb = embedder(**batch)
            weights = torch.arange(emb.numel(), dtype=emb.dtype).reshape(emb.shape).cos()
            ends.append((emb * weights).sum().item())
            parameter.data -= sign * 1e-6 * direction
        slope = (ends[0] - ends[1]) / 2e-6
        exact = (gradients[name] * direction).sum().item()
        assert abs(slope - exact) <= 1e-6 * max(1.0, abs(exact)), name


def test_float64_model_holds_the_float32_numbers(tiny_models: dict[str, Path]) -> None:
    lora = LoraConfig(enabled=True)
    for kind in ("bert", "qwen3_vl"):
        low, preprocessor = _load(tiny_models[kind], lora=lora)
        high, _ = _load(tiny_models[kind], lora=lora, dtype=torch.float64)
        for (name, a), b in zip(low.named_parameters(), high.parameters(), strict=True):
            assert a.dtype == torch.float32
            assert b.dtype == torch.float64
            assert torch.equal(a.double(), b), name
        tables = dict(low.named_buffers())
        for name, table in high.named_buffers():
            assert table.dtype == tables[name].dtype
            assert torch.equal(table, tables[name]), name
        batch = preprocessor.queries(TEXTS)
        assert _relative(low.eval()(**batch), high.eval()(**batch)) < 1e-5


def test_keep_float64_changes_no_other_dtype() -> None:
    low, high = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    with KeepFloat64():
        assert low.float().dtype == low.to(torch.float32).dtype == torch.float32
        assert high.float().dtype == high.to(torch.float32).dtype == torch.float64
        assert high.to(dtype=torch.float32).dtype == torch.float64
        assert high.type(torch.float32).dtype == torch.float64
        assert nn.functional.softmax(high, 0, dtype=torch.float32).dtype == torch.float64
        assert high.to(torch.bfloat16).dtype == torch.bfloat16
    assert high.float().dtype == torch.float32


@pytest.mark.parametrize("kind", ["bert", "qwen3", "qwen3_vl"])
def test_autocast_still_gives_unit_float32(tiny_models: dict[str, Path], kind: str) -> None:
    embedder, preprocessor = _load(tiny_models[kind])
    embedder.eval()
    batch = preprocessor.queries(TEXTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        emb = embedder(**batch)
    assert emb.dtype == torch.float32
    torch.testing.assert_close(emb.norm(dim=1), torch.ones(3))
    exact = embedder(**batch)
    assert 1e-5 < _relative(emb, exact) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("kind", ["bert_dropout", "qwen3", "qwen3_vl"])
def test_gradient_checkpointing_changes_nothing(
    tiny_models: dict[str, Path],
    tiles: list[Path],
    kind: str,
    with_lora: bool,
    dtype: torch.dtype,
) -> None:
    lora = LoraConfig(enabled=with_lora, dropout=0.3, vision=with_lora and kind == "qwen3_vl")
    plain, preprocessor = _load(tiny_models[kind], lora=lora, dtype=dtype)
    saving, _ = _load(tiny_models[kind], lora=lora, dtype=dtype, gradient_checkpointing=True)
    if with_lora:  # B starts at zero, which would leave A without a gradient
        for embedder in (plain, saving):
            torch.manual_seed(1)
            for name, parameter in embedder.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
    batch = preprocessor.queries(TEXTS)
    if kind == "qwen3_vl":
        batch = preprocessor.documents(_documents(tiles))
    expected = _gradients(plain, batch)
    with torch.no_grad():
        saving(**preprocessor.queries(TEXTS))  # the first batch tries itself without padding
    calls = _count_forwards(saving)
    _check_equal_gradients(_gradients(saving, batch), expected, 1e-15)
    assert calls[0] == 2 * len(saving.blocks()), "blocks were not recomputed"
    if kind == "bert_dropout" or with_lora:
        other = _gradients(plain, batch, seed=1)
        assert any(g is not None and _relative(other[n], g) > 1e-3 for n, g in expected.items()), (
            "dropout was not active"
        )


def _count_forwards(embedder: Embedder) -> list[int]:
    """Counts forwards of a linear layer in every block, recomputed ones included."""
    calls = [0]

    def count(module: nn.Module, args: tuple) -> None:
        calls[0] += 1

    for block in embedder.blocks():
        linear = next(m for m in block.modules() if isinstance(m, nn.Linear))
        linear.register_forward_pre_hook(count)
    return calls


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bert", ["BertLayer"] * 2),
        ("qwen3", ["Qwen3DecoderLayer"] * 2),
        ("qwen3_vl", ["Qwen3VLVisionBlock"] * 2 + ["Qwen3VLTextDecoderLayer"] * 3),
    ],
)
@pytest.mark.parametrize("with_lora", [False, True])
def test_blocks(
    tiny_models: dict[str, Path], kind: str, expected: list[str], with_lora: bool
) -> None:
    embedder, _ = _load(tiny_models[kind], lora=LoraConfig(enabled=with_lora))
    assert [type(block).__name__ for block in embedder.blocks()] == expected
    inside = {id(module) for module in embedder.modules()}
    assert all(id(block) in inside for block in embedder.blocks())


def test_every_trainable_parameter_takes_part(
    tiny_models: dict[str, Path], tiles: list[Path]
) -> None:
    for kind in ("bert", "qwen3", "qwen3_vl"):
        embedder, preprocessor = _load(tiny_models[kind])
        documents = [Document.of_text("some text")]
        if kind == "qwen3_vl":
            documents = _documents(tiles)
        gradients = _gradients(embedder, preprocessor.documents(documents))
        assert [n for n, g in gradients.items() if g is None] == []


def test_text_model_refuses_images(tiny_models: dict[str, Path]) -> None:
    embedder, preprocessor = _load(tiny_models["bert"])
    batch = preprocessor.queries(TEXTS)
    with pytest.raises(ModelError, match="BertModel takes no images"):
        embedder(**batch, pixel_values=torch.zeros(4, 8), image_grid_thw=torch.ones(1, 3))


def test_no_rows_of_pixels_mean_no_image(tiny_models: dict[str, Path]) -> None:
    """What is left of an image batch when a chunk of it has only texts."""
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.documents([Document.of_text("some text")])
    none = {
        "pixel_values": torch.zeros(0, 1536),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64),
    }
    assert torch.equal(embedder(**batch), embedder(**batch, **none))


def test_a_copy_is_independent(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    twin = copy.deepcopy(embedder)
    batch = preprocessor.documents([Document.of_text("some text")])
    assert torch.equal(embedder(**batch), twin(**batch))
    gradients = _gradients(twin, batch, touch_vision=True)
    assert all(g is not None for g in gradients.values())
    assert all(p.grad is None for p in embedder.parameters())
