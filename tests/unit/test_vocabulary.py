"""The vocabulary contract: what is compared, what is refused, and that no weights are needed."""

import json
import shutil
from pathlib import Path

import pytest

from pixelrag.errors import ModelError
from pixelrag.models.source import resolve_source
from pixelrag.models.tiny_causal import save_tiny_causal
from pixelrag.models.vocabulary import Vocabulary, read_vocabulary, shared_size


def vocabulary(*tokens: str, rows: int | None = None, name: str = "m") -> Vocabulary:
    return Vocabulary(name, {t: i for i, t in enumerate(tokens)}, rows or len(tokens))


def refusal(student: Vocabulary, teacher: Vocabulary, configured: int | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        shared_size(student, teacher, configured)
    return str(caught.value)


def test_padding_rows_are_no_tokens():
    student = vocabulary("a", "b", "c", rows=8)
    assert shared_size(student, vocabulary("a", "b", "c", rows=16), None) == 3
    assert student.size == 3


def test_a_qwen_like_pair_shares_all_real_tokens():
    """Qwen3's numbers: 151,643 of the BPE and 26 added ones in 151,936 rows."""
    base = {f"t{i}": i for i in range(151_643)}
    added = {f"<|x{i}|>": 151_643 + i for i in range(22)}
    thinking = {"<tool_response>": 151_665, "</tool_response>": 151_666}
    thinking |= {"<think>": 151_667, "</think>": 151_668}
    qwen3 = Vocabulary("qwen3", base | added | thinking, 151_936)
    qwen25 = Vocabulary("qwen2.5", base | added, 151_936)
    assert (qwen3.size, qwen25.size) == (151_669, 151_665)
    assert shared_size(qwen3, qwen3, None) == 151_669
    text = refusal(qwen3, qwen25)
    assert "151669" in text
    assert "'<tool_response>' (id 151665)" in text
    # Cutting the thinking tokens is possible, but only on demand.
    assert shared_size(qwen3, qwen25, 151_665) == 151_665


def test_the_first_differing_token_is_named_with_both_ids():
    text = refusal(
        vocabulary("a", "b", "c", "d", name="s"), vocabulary("a", "c", "b", "d", name="t")
    )
    assert "4 entries" in text
    assert "id 1 is 'b' in student s and 'c' in teacher t" in text
    assert "'b' has id 1 in the student and 2 in the teacher" in text


def test_a_token_that_only_one_model_has_is_named():
    student = Vocabulary("s", {"a": 0, "c": 2}, 3)
    text = refusal(student, vocabulary("a", "b", "c", name="t"))
    assert "id 1 is no token in student s and 'b' in teacher t" in text


def test_two_names_for_one_id_count_as_a_difference():
    student = Vocabulary("s", {"a": 0, "b": 1, "b'": 1}, 2)
    assert "'b' or \"b'\"" in refusal(student, vocabulary("a", "b"))


def test_a_difference_beyond_the_shared_range_is_allowed():
    student, teacher = vocabulary("a", "b", "x"), vocabulary("a", "b", "y")
    assert shared_size(student, teacher, 2) == 2
    assert "id 2" in refusal(student, teacher)


def test_more_tokens_than_there_are_cannot_be_configured():
    assert "set it to at most 2" in refusal(vocabulary("a", "b", rows=9), vocabulary("a", "b"), 3)


def test_fingerprints_tell_maps_apart_and_ignore_what_is_beyond():
    one, two = vocabulary("a", "b", "x"), vocabulary("a", "b", "y")
    assert one.fingerprint(2) == two.fingerprint(2)
    assert one.fingerprint(3) != two.fingerprint(3)
    assert vocabulary("b", "a").fingerprint(2) != one.fingerprint(2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    made = {
        "student": save_tiny_causal(root / "student", padded_rows=7),
        "teacher": save_tiny_causal(root / "teacher", "llama", padded_rows=3, hidden_size=64),
        "other": save_tiny_causal(root / "other", vocab_size=400),
    }
    for folder in made.values():  # the contract is read without them
        (folder / "model.safetensors").unlink()
    return made


def read(folder: Path) -> Vocabulary:
    return read_vocabulary(resolve_source(str(folder)))


def test_it_is_read_without_weights(models):
    student, teacher = read(models["student"]), read(models["teacher"])
    assert student.num_rows - student.size == 7
    assert teacher.num_rows - teacher.size == 3
    assert shared_size(student, teacher, None) == student.size


def test_another_tokenizer_is_refused(models):
    assert "vocabularies" in refusal(read(models["student"]), read(models["other"]))


def test_a_tokenizer_larger_than_its_model_is_refused(models, tmp_path):
    folder = tmp_path / "small"
    shutil.copytree(models["other"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 300
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="300 vocabulary rows"):
        read(folder)


def test_added_tokens_count(models, tmp_path):
    folder = tmp_path / "thinking"
    shutil.copytree(models["student"], folder)
    before = read(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    after = read(folder)
    assert after.size == before.size + 2
    assert "'<think>'" in refusal(after, before)
