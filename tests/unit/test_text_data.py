"""From files and data sets to stored tokens: every row or its fault, the same on every run."""

import json
import logging
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pixelrag.data.chat import Completion, PlainText, parse_text_row
from pixelrag.data.schema import RowError
from pixelrag.data.text_data import load_texts
from pixelrag.data.text_encoder import TextEncoder
from pixelrag.data.text_sources import TextSource, parse_source, read_rows
from pixelrag.data.token_store import TokenStore, hold_out
from pixelrag.errors import DataError, ModelError
from pixelrag.models.tiny_tokenizer import byte_tokenizer
from tests.unit.chat_templates import chat_tokenizer
from tests.unit.token_stores import token_store

ENCODER = TextEncoder(chat_tokenizer())


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep `datasets` from filling the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def chat(number: int) -> dict:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }


def write(path: Path, *rows: object) -> str:
    """A JSONL file of rows; a string is written as the line itself."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def answers(store: TokenStore) -> list[str]:
    """What each sample teaches."""
    decode = ENCODER._tokenizer.decode
    return [decode(store[i].ids[store[i].supervised]) for i in range(len(store))]


# Tokens.


def test_text_and_completions_end_with_the_end_token_which_is_learnt():
    tokenizer = byte_tokenizer()
    text, completion = TextEncoder(tokenizer).encode([PlainText("a fox"), Completion("a", " fox")])
    assert tokenizer.decode(text.ids) == tokenizer.decode(completion.ids) == "a fox<|im_end|>"
    assert text.supervised.all()
    assert tokenizer.decode(completion.ids[completion.supervised]) == " fox<|im_end|>"
    (whole,) = TextEncoder(tokenizer, supervise="all").encode([Completion("a", " fox")])
    assert whole.supervised.all()


def test_a_token_that_the_tokenizer_puts_first_stays_and_is_not_learnt():
    tokenizer = chat_tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    text, talk = TextEncoder(tokenizer).encode([PlainText("fox"), parse_text_row(chat(1), "")])
    assert text.ids[0] == bos
    assert not text.supervised[0]
    assert bos not in talk.ids  # the template's affair


# The space before an answer is the model's to write, or the prompt's; the token is one either way.
SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'q: ' + m.content }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PROMPT = SPACE.replace("' ' +", "': ' +") + "{{ ': ' if add_generation_prompt }}"


def spaced_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """In the fashion of Llama 2: every text gets a space in front."""
    words = ["▁fox", "▁a", "▁", "a", "f", "o", "x", "\n", ":", "fox", "q", "</s>", "▁q", "q:"]
    vocabulary = [(word, -float(len(words) - len(word))) for word in ["<unk>", *words]]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("template", [SPACE, PROMPT])
def test_tokenizers_that_put_a_space_first_are_not_cut(template):
    tokenizer = spaced_tokenizer(template)
    encoder = TextEncoder(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "fox"}]
    good, bad = encoder.encode(
        [parse_text_row({"messages": messages}, ""), Completion("a f", "ox")]
    )
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert good.ids.tolist() == whole
    assert tokenizer.convert_ids_to_tokens(good.ids[good.supervised]) == ["▁fox", "</s>"]
    assert isinstance(bad, RowError)
    assert "the token ' fox' lies across the border" in str(bad)


def test_tokenizers_that_will_not_do():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-text token"):
        TextEncoder(tokenizer)


# Sources.


def test_sources_are_told_apart(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "file.pdf").touch()
    assert parse_source("a/b.jsonl").kind == "lines"
    assert parse_source("a/b.parquet").kind == "parquet"
    assert parse_source(str(tmp_path / "set")).kind == "folder"
    assert parse_source("org/name", "test") == TextSource("org/name", None, "test", "hub")
    assert parse_source("org/name:all[train[:1%]]") == TextSource(
        "org/name", "all", "train[:1%]", "hub"
    )
    assert parse_source("org/name:all[dev]").label == "org/name:all[dev]"
    for wrong in ("./nothing", "a/b/c/d", "org/name:"):
        with pytest.raises(DataError, match=r"no file or folder .*cannot be the name"):
            parse_source(wrong)
    with pytest.raises(DataError, match=r"ending that says nothing.*\.jsonl"):
        parse_source(str(tmp_path / "file.pdf"))


# Not parquet as a stream: `datasets` sleeps five seconds after each.
@pytest.mark.parametrize(
    ("form", "streaming"),
    [
        *((form, False) for form in ("jsonl", "json", "parquet", "folder")),
        *((form, True) for form in ("jsonl", "json", "folder")),
    ],
)
def test_every_form_gives_the_same_samples(tmp_path, form, streaming):
    rows = [chat(number) for number in range(20)]
    # A table fills what other rows have with nulls.
    rows[3]["messages"][1]["reasoning_content"] = "hm"
    rows[4]["tools"] = [{"type": "function", "function": {"name": "f"}}]
    table = datasets.Dataset.from_list(rows)
    path = str(tmp_path / f"data.{form}")
    if form == "parquet":
        table.to_parquet(path)
    elif form == "folder":
        table.save_to_disk(path)
    else:
        write(Path(path), *rows)
    store, report = load_texts(path, ENCODER, streaming=streaming)
    reference, _ = load_texts(write(tmp_path / "ref.jsonl", *rows), ENCODER)
    assert sorted(answers(store)) == sorted(answers(reference))
    if not streaming:
        assert store.fingerprint == reference.fingerprint
        first = 1 if form == "jsonl" else 0
        assert store.sample_id(0) == f"data.{form}:{first}"
    assert report.num_rows == report.num_samples == 20
    assert report.num_tokens == len(store.ids)
    assert report.num_supervised == int(store.supervised.sum())


def test_text_files_are_read_line_by_line(tmp_path):
    (tmp_path / "a.txt").write_text("one fox\n\n  \ntwo foxes\n")
    store, _ = load_texts(str(tmp_path / "a.txt"), ENCODER)
    assert answers(store) == ["one fox<|im_end|>", "two foxes<|im_end|>"]


def test_what_cannot_be_read_is_told(tmp_path):
    for name, match in [
        (str(tmp_path / "no.jsonl"), "does not exist"),
        (str(tmp_path / "no.parquet"), "cannot be read as a data set: it does not exist"),
        (str(tmp_path), "cannot be read as a data set"),
        ("nobody/nothing", "nobody/nothing cannot be read as a data set"),
    ]:
        with pytest.raises(DataError, match=match):
            load_texts(name, ENCODER)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as a data set"):
        load_texts(str(tmp_path / "bad.parquet"), ENCODER)
    with pytest.raises(DataError, match="no rows"):
        load_texts(write(tmp_path / "empty.jsonl", ""), ENCODER)
    with pytest.raises(DataError, match="named twice"):
        load_texts(["a/b", "a/b"], ENCODER)


# Bad rows.


def test_bad_rows_are_named_by_file_line_and_reason(tmp_path, caplog):
    file = write(
        tmp_path / "train.jsonl",
        chat(1),
        "{broken",
        "",
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "u", "content": 3}, {"role": "assistant", "content": "a"}]},
        chat(2) | {"tools": "["},
        {"messages": [{"role": "user", "content": "<|im_end|>"}, chat(3)["messages"][1]]},
        chat(4),
    )
    with pytest.raises(DataError) as error:
        load_texts(file, ENCODER)
    message = str(error.value)
    assert "5 of 7 rows cannot be used" in message
    for line, reason in [
        (2, "not valid JSON"),
        (4, "no message of the assistant"),
        (5, "messages[0].role"),
        (5, "messages[0].content is a string"),
        (6, "tools: not valid JSON"),
        (7, "contains the control token"),
    ]:
        assert f"{file}:{line}: " in message
        assert any(f"{file}:{line}: " in part and reason in part for part in message.split("\n"))
    with caplog.at_level(logging.WARNING, "pixelrag"):
        store, report = load_texts(file, ENCODER, bad_rows="skip")
    assert answers(store) == ["answer 1<|im_end|>", "answer 4<|im_end|>"]
    assert [store.sample_id(i) for i in range(2)] == ["train.jsonl:1", "train.jsonl:8"]
    assert (report.num_rows, report.num_bad_rows, len(report.bad)) == (7, 5, 6)
    assert "5 of 7 rows cannot be used" in caplog.text


def test_no_usable_row_is_an_error_even_where_bad_ones_are_skipped(tmp_path):
    file = write(tmp_path / "t.jsonl", {"text": ""}, {"text": 1})
    with pytest.raises(DataError, match="No row is left: 2 of 2 rows"):
        load_texts(file, ENCODER, bad_rows="skip")


def test_bad_rows_of_a_table_are_named_by_row(tmp_path):
    path = str(tmp_path / "data.parquet")
    datasets.Dataset.from_list([{"text": "a"}, {"text": ""}, {"text": "b"}]).to_parquet(path)
    with pytest.raises(DataError, match=r"data\.parquet:1: text is empty"):
        load_texts(path, ENCODER)


# Draws.


@pytest.mark.parametrize("form", ["jsonl", "parquet", "stream"])
def test_a_cut_off_source_is_drawn_from_not_begun(tmp_path, form):
    rows = [chat(number) for number in range(200)]
    path = str(tmp_path / ("data.json" if form == "stream" else f"data.{form}"))
    if form == "jsonl":
        write(Path(path), "", *rows[:50], "", *rows[50:])
    elif form == "stream":
        write(Path(path), *rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)

    def draw(**options) -> list[str]:
        options = {"max_samples": 40, "streaming": form == "stream"} | options
        return answers(load_texts(path, ENCODER, **options)[0])

    drawn = draw()
    assert len(set(drawn)) == 40
    assert draw() == drawn
    assert draw(shuffle_seed=26) != drawn
    # Samples of the file's second half come as often as its size says.
    numbers = [int(answer.split()[1].removesuffix("<|im_end|>")) for answer in drawn]
    assert 8 <= sum(number >= 100 for number in numbers) <= 32


def test_drawn_lines_keep_their_numbers_and_bad_ones_are_not_counted(tmp_path):
    file = write(tmp_path / "t.jsonl", chat(1), "{", "", chat(4), chat(5))
    Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes())
    store, report = load_texts(file, ENCODER, max_samples=3, bad_rows="skip")
    found = dict(zip(answers(store), map(store.sample_id, range(len(store))), strict=True))
    assert found == {f"answer {n}<|im_end|>": f"t.jsonl:{n}" for n in (1, 4, 5)}
    assert report.num_bad_rows <= 1
    source = parse_source(file)
    assert Counter(number for number, _ in read_rows(source, shuffle=True)) == Counter([1, 2, 4, 5])


def test_sources_take_turns_where_they_are_cut_off(tmp_path, caplog):
    one = write(tmp_path / "a" / "t.jsonl", *[chat(n) for n in range(30)])
    two = write(tmp_path / "b" / "t.jsonl", *[chat(100 + n) for n in range(5)])
    store, _ = load_texts([one, two], ENCODER, max_samples=20)
    labels = Counter(store.sample_id(i).split(":")[0] for i in range(20))
    assert labels == {"a/t.jsonl": 15, "b/t.jsonl": 5}
    with caplog.at_level(logging.WARNING, "pixelrag"):
        assert len(load_texts([one, two], ENCODER, max_samples=50)[0]) == 35
    assert "the data has 35 usable rows" in caplog.text


def test_progress_is_told(tmp_path):
    file = write(tmp_path / "t.jsonl", *[chat(n) for n in range(300)])
    told: list[int] = []
    load_texts(file, ENCODER, progress=told.append)
    assert told == [256, 300]


# Stored tokens.


def test_a_store_survives_the_disk(tmp_path):
    store = token_store([[True, False], [False, True, True], [True]])
    store.save(tmp_path / "tokens")
    loaded = TokenStore.load(tmp_path / "tokens")
    assert loaded.fingerprint == store.fingerprint
    assert len(loaded) == 3
    for sample in range(3):
        assert np.array_equal(loaded[sample].ids, store[sample].ids)
        assert np.array_equal(loaded[sample].supervised, store[sample].supervised)
        assert loaded.sample_id(sample) == store.sample_id(sample) == f"train.jsonl:{sample + 1}"
    with pytest.raises(DataError, match="cannot be written"):
        store.save(tmp_path / "tokens")


def test_a_torn_store_is_refused(tmp_path):
    token_store([[True, False], [False, True, True]]).save(tmp_path / "tokens")
    np.save(tmp_path / "tokens" / "ids.npy", np.zeros(4, np.int32))
    with pytest.raises(DataError, match="do not fit together"):
        TokenStore.load(tmp_path / "tokens")
    np.save(tmp_path / "tokens" / "ids.npy", np.zeros(5, np.int64))
    with pytest.raises(DataError, match=r"ids\.npy holds int64"):
        TokenStore.load(tmp_path / "tokens")
    (tmp_path / "tokens" / "ids.npy").unlink()
    with pytest.raises(DataError, match="delete it, and it is written anew"):
        TokenStore.load(tmp_path / "tokens")


def test_the_fingerprint_is_of_tokens_masks_and_lengths(tmp_path):
    base = token_store([[True, False], [False, True, True]])
    assert base.fingerprint == token_store([[True, False], [False, True, True]]).fingerprint
    others = [
        token_store([[True, False], [False, True, True]], seed=1),
        token_store([[True, False], [False, True, False]]),
        token_store([[True, False, False], [True, True]]),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 4
    # Not of names and places.
    one = write(tmp_path / "one.jsonl", chat(1))
    two = write(tmp_path / "two.jsonl", "", chat(1))
    assert load_texts(one, ENCODER)[0].fingerprint == load_texts(two, ENCODER)[0].fingerprint


def test_held_out_samples_are_drawn_by_seed_and_repeated_ones_stay_together(tmp_path):
    rows = [chat(number % 50) for number in range(100)]
    store, _ = load_texts(write(tmp_path / "t.jsonl", *rows), ENCODER)
    texts = answers(store)
    train, held = hold_out(store, 20)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(100))
    assert len(held) == 20
    assert not {texts[i] for i in train} & {texts[i] for i in held}
    assert len(hold_out(store, 21)[1]) == 22
    assert not np.array_equal(hold_out(store, 20, seed=26)[1], held)
    # Not by order.
    backwards, _ = load_texts(write(tmp_path / "b.jsonl", *rows[::-1]), ENCODER)
    again = {answers(backwards)[i] for i in hold_out(backwards, 20)[1]}
    assert again == {texts[i] for i in held}
    with pytest.raises(DataError, match="leaves none to train on"):
        hold_out(store, 100)
