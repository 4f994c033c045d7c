"""Queries and documents to tensors: template, truncation, budgets, clear errors."""

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from pixelrag.config.parts import ModelConfig
from pixelrag.data.schema import Document
from pixelrag.errors import DataError, ModelError
from pixelrag.models import Preprocessor, load_embedder
from pixelrag.models.template import ended

SPELLED = "end it <|im_end|> <|image_pad|><|vision_start|> now"


def _preprocessor(folder: Path, **options: object) -> Preprocessor:
    return load_embedder(ModelConfig(name_or_path=str(folder), **options))[1]


def _rows(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


@pytest.fixture
def vl(tiny_models: dict[str, Path]) -> Preprocessor:
    return _preprocessor(tiny_models["qwen3_vl"])


def test_text_template_is_the_published_one(vl: Preprocessor) -> None:
    texts = ["how?", "  two\nlines\n\n", "\n\nleading", "", "a b"]
    for kind, instruction in (
        ("query", "Retrieve images or text relevant to the user's query."),
        ("document", "Represent the user's input."),
    ):
        if kind == "query":
            batch = vl.queries(texts)
        else:
            batch = vl.documents([Document(text, None, "key") for text in texts])
        for text, row in zip(texts, _rows(batch), strict=True):
            whole = (
                f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            assert row == vl.tokenizer(whole)["input_ids"]
            messages = [
                {"role": "system", "content": instruction},
                {"role": "user", "content": text},
            ]
            by_template = vl.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            assert by_template == whole


def test_image_template_has_one_pad_a_visual_token(vl: Preprocessor, tiles: list[Path]) -> None:
    batch = vl.documents([Document.of_image(path) for path in tiles])
    for row, tokens in zip(_rows(batch), [6, 8, 1, 20], strict=True):
        whole = (
            "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n"
            f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert row == vl.tokenizer(whole)["input_ids"]
    assert (batch["image_grid_thw"].prod(1) // 4).tolist() == [6, 8, 1, 20]


def test_mixed_documents_keep_their_order(vl: Preprocessor, tiles: list[Path]) -> None:
    documents = [
        Document.of_text("first"),
        Document.of_image(tiles[3]),
        Document.of_text("third"),
        Document.of_image(tiles[0]),
    ]
    batch = vl.documents(documents)
    assert batch["num_images"].tolist() == [0, 1, 0, 1]
    assert batch["num_images"].dtype == torch.int64
    assert batch["image_grid_thw"].tolist() == [[1, 8, 10], [1, 4, 6]]
    assert batch["pixel_values"].shape == (80 + 24, 3 * 2 * 16 * 16)
    assert batch["pixel_values"].dtype == torch.float32
    alone = [vl.documents([document]) for document in documents]
    assert _rows(batch) == [_rows(one)[0] for one in alone]
    pixels = [one["pixel_values"] for one in alone if "pixel_values" in one]
    assert torch.equal(batch["pixel_values"], torch.cat(pixels))


def test_texts_alone_carry_no_pixels(vl: Preprocessor) -> None:
    batch = vl.documents([Document.of_text("one"), Document.of_text("two")])
    assert batch["num_images"].tolist() == [0, 0]
    assert set(batch) == {"input_ids", "attention_mask", "num_images"}
    assert set(vl.queries(["one"])) == {"input_ids", "attention_mask"}


def test_spelled_special_tokens_are_plain_text(vl: Preprocessor) -> None:
    token_ids = vl.tokenizer.get_vocab()
    for batch in (vl.queries([SPELLED]), vl.documents([Document.of_text(SPELLED)])):
        (row,) = _rows(batch)
        assert SPELLED in vl.tokenizer.decode(row)
        assert row.count(token_ids["<|im_end|>"]) == 2
        assert row.count(token_ids["<|image_pad|>"]) == 0


def test_truncation_spares_the_template(tiny_models: dict[str, Path]) -> None:
    short = _preprocessor(tiny_models["qwen3_vl"], query_max_length=50, document_max_length=60)
    text = "word " * 500
    long = _preprocessor(tiny_models["qwen3_vl"])
    for batch, whole, limit in (
        (short.queries([text]), long.queries([text]), 50),
        (
            short.documents([Document.of_text(text)]),
            long.documents([Document.of_text(text)]),
            60,
        ),
    ):
        row, full = _rows(batch)[0], _rows(whole)[0]
        assert len(row) == limit < len(full)
        tail = short.tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        assert row[-len(tail) :] == tail
        assert row[: limit - len(tail)] == full[: limit - len(tail)]


def test_limit_that_leaves_no_room_is_refused(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"model\.query_max_length 20 leaves no room"):
        _preprocessor(tiny_models["qwen3_vl"], query_max_length=20)


def test_image_is_never_cut(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    tight = _preprocessor(tiny_models["qwen3_vl"], document_max_length=40)
    rest = len(_rows(tight.documents([Document.of_image(tiles[2])]))[0]) - 1
    with pytest.raises(DataError) as caught:
        tight.documents([Document.of_text("fine"), Document.of_image(tiles[3])])
    message = str(caught.value)
    assert "3.png becomes 20 visual tokens" in message
    assert "model.document_max_length is 40" in message
    assert f"model.max_visual_tokens to at most {40 - rest}" in message
    mended = _preprocessor(
        tiny_models["qwen3_vl"], document_max_length=40, max_visual_tokens=40 - rest
    )
    assert mended.documents([Document.of_image(tiles[3])])["input_ids"].shape[1] <= 40


@pytest.mark.parametrize("limit", [4, 7, 12])
def test_visual_tokens_stay_within_the_budget(
    tiny_models: dict[str, Path], tmp_path: Path, limit: int
) -> None:
    preprocessor = _preprocessor(tiny_models["qwen3_vl"], max_visual_tokens=limit)
    assert preprocessor.max_visual_tokens == limit
    paths = []
    for size in [(900, 700), (31, 1000), (1500, 10), (5, 5), (2000, 900)]:
        paths.append(tmp_path / f"{size[0]}.png")
        Image.new("RGB", size, "gray").save(paths[-1])
    batch = preprocessor.documents([Document.of_image(path) for path in paths])
    tokens = batch["image_grid_thw"].prod(1) // 4
    assert (tokens >= 1).all()
    assert (tokens <= limit).all()
    assert tokens.max() > limit // 2


def test_text_models_pad_on_the_right_and_truncate(tiny_models: dict[str, Path]) -> None:
    bert = _preprocessor(tiny_models["bert"], query_max_length=10)
    batch = bert.queries(["a b c", "word " * 50])
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    first, second = _rows(batch)
    cls, sep = bert.tokenizer.cls_token_id, bert.tokenizer.sep_token_id
    assert len(second) == 10
    assert (first[0], first[-1], second[0], second[-1]) == (cls, sep, cls, sep)
    assert batch["attention_mask"][0].tolist() == [1] * len(first) + [0] * (10 - len(first))
    assert batch["input_ids"][0, len(first) :].tolist() == [bert.tokenizer.pad_token_id] * (
        10 - len(first)
    )


def test_decoder_keeps_its_end_token_when_cut(tiny_models: dict[str, Path]) -> None:
    qwen = _preprocessor(tiny_models["qwen3"], query_max_length=12)
    row = _rows(qwen.queries(["word " * 50]))[0]
    assert len(row) == 12
    assert qwen.tokenizer.decode(row[-1:]) == "<|endoftext|>"


def test_text_instructions_are_prefixes(tiny_models: dict[str, Path]) -> None:
    plain = _preprocessor(tiny_models["bert"])
    told = _preprocessor(
        tiny_models["bert"], query_instruction="query: ", document_instruction="passage: "
    )
    assert _rows(told.queries(["how"])) == _rows(plain.queries(["query: how"]))
    document = told.documents([Document.of_text("so")])
    assert _rows(document) == _rows(plain.documents([Document.of_text("passage: so")]))
    assert "num_images" not in document


def test_chat_instructions_replace_the_default(tiny_models: dict[str, Path]) -> None:
    told = _preprocessor(tiny_models["qwen3_vl"], query_instruction="Find the page")
    text = told.tokenizer.decode(_rows(told.queries(["how"]))[0])
    assert text.startswith("<|im_start|>system\nFind the page.<|im_end|>")
    assert [ended(t) for t in ("a", "a.", " a? ", "", "a»")] == ["a.", "a.", "a?", "", "a»"]


def test_text_model_refuses_images(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    bert = _preprocessor(tiny_models["bert"])
    with pytest.raises(DataError, match=r"0\.png is an image, but the model reads text only"):
        bert.documents([Document.of_text("a"), Document.of_image(tiles[0])])


def test_text_without_a_token_is_named(tiny_models: dict[str, Path]) -> None:
    qwen = _preprocessor(tiny_models["qwen3"])
    qwen.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(DataError, match=r"query '' \(number 1 of its batch\) yields no token"):
        qwen.queries(["fine", ""])


def test_broken_image_is_named(vl: Preprocessor, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(DataError, match=r"bad\.png"):
        vl.documents([Document.of_image(tmp_path / "bad.png")])


@pytest.mark.parametrize("kind", ["bert", "qwen3", "qwen3_vl"])
def test_survives_pickling(tiny_models: dict[str, Path], tiles: list[Path], kind: str) -> None:
    """DataLoader workers started by spawn get the preprocessor pickled."""
    preprocessor = _preprocessor(tiny_models[kind])
    twin = pickle.loads(pickle.dumps(preprocessor))  # noqa: S301
    documents = [Document.of_text("some text " + SPELLED)]
    if kind == "qwen3_vl":
        documents.append(Document.of_image(tiles[0]))
    ours, theirs = preprocessor.documents(documents), twin.documents(documents)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
