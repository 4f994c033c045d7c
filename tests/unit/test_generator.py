"""Generators of every kind: what they score, fusion in the decoder, prompts, answers, adapters."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import T5ForConditionalGeneration

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag_models import GeneratorConfig
from pixelrag.errors import DataError, ModelError
from pixelrag.models.generator import Generator
from pixelrag.models.generator_load import load_generator, read_prompts
from pixelrag.models.generator_prompt import GeneratorPreprocessor
from pixelrag.models.passage_attention import PassageAttention
from pixelrag.models.tiny import save_tiny_qwen3_vl
from pixelrag.models.tiny_causal import save_tiny_causal
from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

SEQ2SEQ = ("t5", "bart")
TEXT = (*SEQ2SEQ, "qwen3", "gpt2")
KINDS = (*TEXT, "qwen3_vl")
QUESTIONS = ["who jumps?", "what does a search engine return, and why"]
TARGETS = ["the quick brown fox", "documents"]
NAMES = ["q.jsonl:1", "q.jsonl:2"]


def passage(text: str | None, title: str = "", image: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(title=title, text=text, image=image)


PASSAGES = [passage("the lazy dog", "animals"), passage("a file is read and its lines are split")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("generators")
    found = {kind: save_tiny_seq2seq(root / kind, kind) for kind in SEQ2SEQ}
    found |= {kind: save_tiny_causal(root / kind, kind) for kind in ("qwen3", "gpt2")}
    return found | {"qwen3_vl": save_tiny_qwen3_vl(root / "qwen3_vl")}


def load(
    folder: Path, lora: LoraConfig | None = None, **options
) -> tuple[Generator, GeneratorPreprocessor]:
    config = GeneratorConfig(name_or_path=str(folder), **options)
    return load_generator(config, lora, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    together = generator(**prepare.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES))
    for i in range(2):
        parts = [values[i : i + 1] for values in (QUESTIONS, PASSAGES, TARGETS, NAMES)]
        alone = generator(**prepare.pairs(*parts))
        torch.testing.assert_close(together[i : i + 1, : alone.shape[1]], alone)
        assert (together[i, alone.shape[1] :] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_model_itself(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    batch = prepare.pairs(QUESTIONS[:1], PASSAGES[:1], TARGETS[:1], NAMES[:1])
    got = generator(**batch)
    prompt, target = batch["input_ids"], batch["target_ids"]
    model = generator.base_model
    if kind in SEQ2SEQ:
        logits = model(input_ids=prompt, labels=target).logits
    else:
        whole = torch.cat([prompt, target], 1)
        logits = model(input_ids=whole).logits[:, prompt.shape[1] - 1 : -1]
    expected = logits.double().log_softmax(-1).gather(-1, target[..., None])[..., 0]
    # Transformers computes some of it in float32.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_one_token_has_a_score(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    batch = prepare.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES)
    batch |= {key: batch[key][:, :1] for key in ("target_ids", "target_mask")}
    assert (generator(**batch) < 0).all()


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_fusion_of_one_passage_is_reading_it(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    targets = prepare.targets(TARGETS, NAMES)
    joint = prepare.joint(QUESTIONS, [[p] for p in PASSAGES], NAMES)
    pairs = prepare.prompts(QUESTIONS, PASSAGES, NAMES)
    torch.testing.assert_close(generator(**joint, **targets), generator(**pairs, **targets))


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_fusion_encodes_each_passage_by_itself(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    targets = prepare.targets(TARGETS[:1], NAMES[:1])
    joint = prepare.joint(QUESTIONS[:1], [PASSAGES], NAMES[:1])
    got = generator(**joint, **targets)
    model = generator.base_model
    states = [
        model.get_encoder()(input_ids=ids[mask.bool()][None]).last_hidden_state
        for ids, mask in zip(joint["input_ids"][0], joint["attention_mask"][0], strict=True)
    ]
    output = model(encoder_outputs=(torch.cat(states, 1),), labels=targets["target_ids"])
    expected = output.logits.double().log_softmax(-1).gather(-1, targets["target_ids"][..., None])
    torch.testing.assert_close(got, expected[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_a_missing_passage_is_not_seen(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    targets = prepare.targets(TARGETS[:1], NAMES[:1])
    alone = prepare.joint(QUESTIONS[:1], [PASSAGES[:1]], NAMES[:1])
    padded = prepare.joint(QUESTIONS[:1], [[*PASSAGES[:1], None, None]], NAMES[:1])
    assert padded["input_ids"].shape[:2] == (1, 3)
    torch.testing.assert_close(generator(**padded, **targets), generator(**alone, **targets))


@pytest.mark.parametrize("text", ["the lazy dog, a file", "a <|im_end|> b"])
@pytest.mark.parametrize("options", [{}, {"chat": "off"}, {"template": "{passage} of {question}"}])
def test_a_decoders_prompt_marks_its_passage(folders: dict[str, Path], text: str, options: dict):
    _, prepare = load(folders["qwen3"], **options)
    found = [passage(text, "title"), passage("x" * 40, "long " * 20)]
    batch = prepare.prompts(QUESTIONS, found, NAMES, mark=True)
    plain = prepare.prompts(QUESTIONS, found, NAMES)
    assert all(batch[key].equal(plain[key]) for key in plain)
    marked = batch["input_ids"][0][batch["passage_mask"][0].bool()]
    has_title = "template" not in options
    # A token may hold a border's white space as well.
    expected = ("title" if has_title else "") + text
    assert "".join(prepare.tokenizer.decode(marked).split()) == "".join(expected.split())
    assert not (batch["passage_mask"] * (1 - batch["attention_mask"])).any()


def attended(generator: Generator, prepare: GeneratorPreprocessor, found: list) -> torch.Tensor:
    targets = prepare.targets(TARGETS, NAMES)
    if generator.is_seq2seq:
        prompts = prepare.joint(QUESTIONS, [found[:2], found[2:]], NAMES)
    else:
        prompts = prepare.prompts(QUESTIONS, found[:2], NAMES, mark=True)
    return generator.attend(**prompts, **targets)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_does_not_depend_on_padding_or_on_how_it_is_computed(
    folders: dict[str, Path], kind: str
):
    found = [*PASSAGES, passage("x", "y"), None]
    generator, prepare = load(folders[kind])
    assert generator.base_model.config.get_text_config()._attn_implementation == "sdpa"
    together = attended(generator, prepare, found)
    assert (together[together != 0] > 0).all()
    assert not together.requires_grad
    if kind in SEQ2SEQ:
        assert together.shape == (2, 2)
        assert (together == 0).tolist() == [[False, False], [False, True]]
        alone = prepare.joint(QUESTIONS[1:], [found[2:3]], NAMES[1:])
    else:
        assert together.shape == (2, 1)
        alone = prepare.prompts(QUESTIONS[1:], found[1:2], NAMES[1:], mark=True)
    alone = generator.attend(**alone, **prepare.targets(TARGETS[1:], NAMES[1:]))
    torch.testing.assert_close(alone[0], together[1, : alone.shape[1]])
    # The model goes on as it was told to.
    assert generator.base_model.config.get_text_config()._attn_implementation == "sdpa"
    eager, prepare = load(folders[kind], attention="eager")
    torch.testing.assert_close(attended(eager, prepare, found), together, rtol=1e-5, atol=1e-7)


def test_a_vision_model_looks_at_its_tiles(folders: dict[str, Path], tmp_path: Path):
    generator, prepare = load(folders["qwen3_vl"])
    mixed = [passage(None, image=tile(tmp_path, "a.png", 64, 64)), PASSAGES[1]]
    batch = prepare.prompts(QUESTIONS, mixed, NAMES, mark=True)
    pads = batch["input_ids"][0] == generator.base_model.config.image_token_id
    assert batch["passage_mask"][0].bool().equal(pads)
    looked = generator.attend(**batch, **prepare.targets(TARGETS, NAMES))
    assert (looked > 0).all()
    plain = generator.attend(
        **prepare.prompts(QUESTIONS[1:], mixed[1:], NAMES[1:], mark=True),
        **prepare.targets(TARGETS[1:], NAMES[1:]),
    )
    torch.testing.assert_close(plain[0], looked[1])


def test_attention_that_cannot_be_observed_is_refused_before_the_weights(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(T5ForConditionalGeneration, "_can_set_attn_implementation", lambda: False)
    config = GeneratorConfig(name_or_path=str(folders["t5"]))
    for load_it in (load_generator, read_prompts):
        with pytest.raises(ModelError, match=r"loss\.retriever adist.*T5ForConditional"):
            load_it(config, observed=True)
        load_it(config)


def test_attention_that_is_not_seen_is_said(folders: dict[str, Path]):
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    observer = PassageAttention(nothing, nothing[:, :2], 1, rows=slice(None), crossed=True)
    with pytest.raises(ModelError, match="does not go through transformers' attention interface"):
        observer.mean()


@pytest.mark.parametrize("kind", ["t5", "qwen3"])
def test_the_vocabulary_is_told_token_by_token(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    batch = prepare.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES)
    plain, size = generator(**batch), generator.vocab_size
    every = generator(**batch, vocabulary="all").unflatten(1, (-1, 1 + size))
    real = batch["target_mask"].bool()
    torch.testing.assert_close(every[..., 0], plain)
    total = every[..., 1:].exp().sum(-1)
    torch.testing.assert_close(total[real], torch.ones_like(total[real]))
    assert not every[~real].any()
    sums = generator(**batch, vocabulary="sum").unflatten(1, (-1, 2))
    torch.testing.assert_close(sums[..., 0], plain)
    torch.testing.assert_close(sums[..., 1], every[..., 1:].sum(-1))


def tile(folder: Path, name: str, width: int, height: int) -> Path:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return folder / name


def test_a_vision_model_reads_tiles(folders: dict[str, Path], tmp_path: Path):
    generator, prepare = load(folders["qwen3_vl"])
    small, wide = tile(tmp_path, "a.png", 40, 40), tile(tmp_path, "b.png", 130, 64)
    mixed = [passage(None, image=small), PASSAGES[1]]
    batch = prepare.pairs(QUESTIONS, mixed, TARGETS, NAMES)
    assert batch["num_images"].tolist() == [1, 0]
    together = generator(**batch)
    for i in range(2):
        parts = [values[i : i + 1] for values in (QUESTIONS, mixed, TARGETS, NAMES)]
        alone = generator(**prepare.pairs(*parts))
        torch.testing.assert_close(together[i : i + 1, : alone.shape[1]], alone)
    other = [passage(None, image=wide), PASSAGES[1]]
    changed = generator(**prepare.pairs(QUESTIONS, other, TARGETS, NAMES))
    assert not torch.allclose(changed[0], together[0])
    torch.testing.assert_close(changed[1], together[1])


def test_a_touched_vision_tower_has_zero_gradients(folders: dict[str, Path]):
    generator, prepare = load(folders["qwen3_vl"])
    batch = prepare.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES)
    untouched, touched = generator(**batch), generator(**batch, touch_vision=True)
    torch.testing.assert_close(touched, untouched, rtol=0, atol=0)
    touched.sum().backward()
    gradients = [p.grad for n, p in generator.named_parameters() if ".visual." in n]
    assert all(g is not None and not g.any() for g in gradients)
    generator.zero_grad()
    generator(**batch).sum().backward()
    assert all(p.grad is None for n, p in generator.named_parameters() if ".visual." in n)


def test_a_tile_that_does_not_fit_is_named(folders: dict[str, Path], tmp_path: Path):
    _, prepare = load(folders["qwen3_vl"], prompt_max_length=40)
    image = tile(tmp_path, "c.png", 320, 320)
    with pytest.raises(DataError, match=r"q\.jsonl:1.*c\.png.*generator\.max_visual_tokens"):
        prepare.prompts(QUESTIONS[:1], [passage(None, image=image)], NAMES[:1])


@pytest.mark.parametrize("kind", TEXT)
def test_a_text_model_refuses_tiles(folders: dict[str, Path], kind: str):
    _, prepare = load(folders[kind])
    with pytest.raises(DataError, match=r"q\.jsonl:1: passage x\.png is an image"):
        prepare.prompts(QUESTIONS[:1], [passage(None, image=Path("x.png"))], NAMES[:1])


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize("room", [12, 19, 27])
def test_long_passages_are_cut_and_nothing_else(folders: dict[str, Path], kind: str, room: int):
    _, prepare = load(folders[kind])
    empty = prepare.prompts(QUESTIONS[:1], [passage("", "title")], NAMES[:1])
    length = empty["input_ids"].shape[1] + room
    _, prepare = load(folders[kind], prompt_max_length=length)
    words = " ".join(f"word{i} straße 猫" for i in range(60))
    batch = prepare.prompts(QUESTIONS[:1], [passage(words, "title")], NAMES[:1])
    text = prepare.tokenizer.decode(batch["input_ids"][0])
    assert batch["input_ids"].shape[1] <= length
    assert batch["input_ids"].shape[1] >= length - 4
    assert QUESTIONS[0] in text
    assert "title" in text
    assert "word0" in text
    assert "word59" not in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("kind", TEXT)
def test_a_long_title_is_cut_after_its_passage(folders: dict[str, Path], kind: str):
    _, prepare = load(folders[kind])
    length = prepare.prompts(QUESTIONS[:1], [passage("")], NAMES[:1])["input_ids"].shape[1] + 9
    _, prepare = load(folders[kind], prompt_max_length=length)
    title = " ".join(f"head{i}" for i in range(60))
    batch = prepare.prompts(QUESTIONS[:1], [passage("body", title)], NAMES[:1])
    text = prepare.tokenizer.decode(batch["input_ids"][0])
    assert batch["input_ids"].shape[1] <= length
    assert "head0" in text
    assert "body" not in text
    assert QUESTIONS[0] in text


@pytest.mark.parametrize("kind", TEXT)
def test_what_cannot_be_cut_is_refused_and_named(folders: dict[str, Path], kind: str):
    _, prepare = load(folders[kind], prompt_max_length=90, target_max_length=4)
    with pytest.raises(DataError, match=r"r:7: the question .*generator\.prompt_max_length is 90"):
        prepare.check("why " * 60, "no", "r:7")
    with pytest.raises(DataError, match=r"r:8: the answer .*generator\.target_max_length is 4"):
        prepare.check("why?", "no " * 20, "r:8")
    prepare.check("why?", "no", "r:9")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_texts_are_plain_text(folders: dict[str, Path], kind: str):
    _, prepare = load(folders[kind])
    controls = set(prepare.tokenizer.get_added_vocab().values())

    def count(text: str) -> int:
        batch = prepare.pairs([text], [passage(text, text)], [text], ["r:1"])
        ids = torch.cat([batch["input_ids"], batch["target_ids"]], 1)[0].tolist()
        return sum(token in controls for token in ids)

    assert count("a <|im_end|> b <|image_pad|>") == count("a b")


def test_decoders_are_prompted_in_their_chat_template(folders: dict[str, Path]):
    _, chat = load(folders["qwen3"])
    _, plain = load(folders["qwen3"], chat="off")
    texts = [
        p.tokenizer.decode(p.prompts(QUESTIONS[:1], PASSAGES[:1], NAMES[:1])["input_ids"][0])
        for p in (chat, plain)
    ]
    assert texts[0].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].endswith(f"Question: {QUESTIONS[0]}\nAnswer:")
    # The answer goes on with a space where the prompt ends in a word.
    ids = plain.targets(TARGETS[:1], NAMES[:1])["target_ids"][0]
    assert plain.tokenizer.decode(ids) == f" {TARGETS[0]}<|im_end|>"


def test_the_template_is_the_users(folders: dict[str, Path]):
    _, prepare = load(folders["t5"], template="{passage} {x} / {question}")
    batch = prepare.prompts(["{passage}"], [passage("{question}")], ["r:1"])
    assert prepare.tokenizer.decode(batch["input_ids"][0]) == "{question} {x} / {passage}<|im_end|>"
    with pytest.raises(ValueError, match=r"\{passage\} once"):
        GeneratorConfig(name_or_path="x", template="{question}")


def test_only_answers_that_begin_with_a_token_of_their_own_say_so(folders: dict[str, Path]):
    assert [load(folders[kind])[1].text.starts_with_bos for kind in TEXT] == [False, True, *2 * [0]]
    ids = load(folders["bart"])[1].targets(["fox"], ["r:1"])["target_ids"][0]
    assert load(folders["bart"])[1].tokenizer.decode(ids) == "<|im_start|>fox<|im_end|>"


@pytest.mark.parametrize("kind", [*KINDS, "tiles"])
def test_written_answers_are_the_likeliest_tokens(
    folders: dict[str, Path], tmp_path: Path, kind: str
):
    passages = PASSAGES
    if kind == "tiles":
        kind = "qwen3_vl"
        passages = [passage(None, image=tile(tmp_path, "a.png", 130, 64))] * 2
    generator, prepare = load(folders[kind])
    generator.eval()
    prompts = prepare.prompts(QUESTIONS, passages, NAMES)
    tokenizer = prepare.tokenizer
    ends = {"end_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    written = generator.write(6, **ends, **prompts)
    # A written token is likelier than any other, given those before it.
    target = written[:, 1:] if kind in SEQ2SEQ else written
    for row in range(2):
        for position in range(3):
            tried = target[row, : position + 1].repeat(2, 1)
            tried[1, position] = (tried[1, position] + 1) % 300
            inputs = {key: value[[row, row]] for key, value in prompts.items()
                      if key not in ("pixel_values", "image_grid_thw")}  # fmt: skip
            if passages is not PASSAGES:  # one image a row, and all of them alike
                inputs |= {key: prompts[key] for key in ("pixel_values", "image_grid_thw")}
            score = generator(**inputs, target_ids=tried, target_mask=torch.ones_like(tried))
            assert score[0, position] > score[1, position]
    assert len(prepare.texts(written)) == 2


def test_writing_touches_the_vision_tower_once(folders: dict[str, Path]):
    generator, prepare = load(folders["qwen3_vl"])
    generator.eval()
    prompts = prepare.prompts(QUESTIONS, PASSAGES, NAMES)
    ends = {"end_token_id": 1, "pad_token_id": prepare.tokenizer.pad_token_id}
    calls = []
    visual = generator.base_model.model.visual
    visual.register_forward_pre_hook(lambda module, args: calls.append(1))
    plain = generator.write(4, **ends, **prompts)
    assert not calls
    touched = generator.write(4, **ends, **prompts, touch_vision=True)
    assert len(calls) == 1
    assert touched.tolist() == plain.tolist()


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_fused_answers_are_written(folders: dict[str, Path], kind: str):
    generator, prepare = load(folders[kind])
    generator.eval()
    tokenizer = prepare.tokenizer
    ends = {"end_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    joint = prepare.joint(QUESTIONS, [[p] for p in PASSAGES], NAMES)
    pairs = prepare.prompts(QUESTIONS, PASSAGES, NAMES)
    got, expected = (generator.write(5, **ends, **inputs) for inputs in (joint, pairs))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_alone_train(folders: dict[str, Path], kind: str):
    lora = LoraConfig(enabled=True, r=4, target_modules=["q"] if kind == "t5" else None)
    if kind == "gpt2":
        lora = lora.model_copy(update={"target_modules": ["lm_head"]})
    if kind == "bart":
        lora = lora.model_copy(update={"target_modules": ["q_proj", "v_proj"]})
    generator, prepare = load(folders[kind], lora)
    plain, _ = load(folders[kind])
    batch = prepare.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES)
    torch.testing.assert_close(generator(**batch), plain(**batch))
    trained = [n for n, p in generator.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    generator(**batch).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_preprocessor_survives_pickling(folders: dict[str, Path], kind: str):
    _, prepare = load(folders[kind])
    again = pickle.loads(pickle.dumps(prepare))  # noqa: S301
    got, expected = (p.pairs(QUESTIONS, PASSAGES, TARGETS, NAMES) for p in (again, prepare))
    assert all(got[key].equal(expected[key]) for key in expected)


def test_chat_needs_a_chat_template(folders: dict[str, Path]):
    with pytest.raises(ModelError, match="an encoder-decoder; set it to auto"):
        load(folders["t5"], chat="on")


def test_an_answer_that_fills_the_model_is_refused(folders: dict[str, Path]):
    with pytest.raises(ModelError, match="reads 512 tokens, prompt and answer together"):
        load(folders["qwen3"], target_max_length=512)
    assert load(folders["qwen3"], prompt_max_length=600)[1].text.prompt_max_length == 512 - 64
