"""`pixelrag validate` of a distillation job: no weights, every row, and true figures."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pixelrag.cli import main
from pixelrag.config.base import load
from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import process_group
from tests.train.material import command, merged, write_jsonl

CHAT = {"messages": [{"role": "user", "content": "a fox"}, {"role": "assistant", "content": "dog"}]}


@pytest.fixture
def validate(lesson, tmp_path, monkeypatch, capsys):
    """Validates a configuration; returns the exit code and the lines of the report."""

    def _run(*overrides: dict) -> tuple[int, list[str]]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            # What a run loads weights with must not be touched.
            patch.setattr("transformers.PreTrainedModel.from_pretrained", None)
            code = main(command(tmp_path, merged(lesson, *overrides), "validate"))
        return code, capsys.readouterr().out.splitlines()

    return _run


def words(folder: Path, count: int) -> str:
    """A text of so many tokens, the end token that goes behind it included."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "x" * (count - 1)
    assert len(tokenizer(text)["input_ids"]) == count - 1
    return text


def test_steps_epochs_and_fill_are_those_of_a_hand_count(validate, classroom, tmp_path):
    """Eight texts of 16 tokens and one of 8, in rows of 32: four are full, one is to a quarter."""
    rows = [{"text": words(classroom / "tied", 16)} for _ in range(8)]
    train = write_jsonl(tmp_path / "t.jsonl", [*rows, {"text": words(classroom / "tied", 8)}])
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"text": words(classroom / "tied", 40)}])
    code, lines = validate(
        {"data": {"train": train, "eval": held_out, "eval_samples": None}},
        {"packing": {"length": 32}, "optim": {"max_steps": None, "num_epochs": 2.5}},
        {"batch": {"per_device_batch_size": 2, "gradient_accumulation_steps": 1}},
    )
    assert (code, lines[-1]) == (0, "valid")
    # The first token of a text is predicted from nothing.
    assert f"{train}: 9 rows, 0 bad; 136 tokens, 93% of them learnt from" in lines
    assert f"{held_out}: 1 rows, 0 bad; 40 tokens, 98% of them learnt from" in lines
    assert "lengths: 8 to 16 tokens, mean 15; 9 samples, 136 tokens, 127 of them learnt from" in (
        lines
    )
    assert (
        "5 rows of 32 tokens, 85.00% full; a step sees 2 of them (2 a rank x 1 ranks x 1 "
        "accumulated); 8 steps, 2.67 epochs" in lines
    )
    assert any(
        line.startswith("held out: 1 samples, 32 tokens, 31 of them learnt from; 1 samples longer")
        for line in lines
    )


def test_the_model_lines_count_parameters_memory_and_operations(validate, classroom):
    code, lines = validate({"packing": {"length": 64}})
    assert code == 0
    student, teacher = (
        json.loads((classroom / name / "config.json").read_text()) for name in ("tied", "teacher")
    )
    # Qwen3 with heads of 8, their norms, and a tied head; Llama with heads of 12.
    h, v = 32, student["vocab_size"]
    layer = 2 * h * 4 * 8 + 2 * h * 2 * 8 + 3 * h * 64 + 2 * 8 + 2 * h
    count = 3 * layer + h + v * h
    assert lines[0].startswith(f"student {classroom / 'tied'}: {count:,} parameters, 3 layers, ")
    assert f"{teacher['vocab_size']:,} vocabulary rows" in lines[0].partition("teacher ")[2]
    tokens = v - 9
    assert lines[1] == f"vocabulary: {tokens:,} shared tokens"
    gib = 2**30
    teacher_count = 2 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 96 + 2 * 48) + 48
    teacher_count += 48 * teacher["vocab_size"]
    loss = 7 * tokens * 8 + 4 * v * h
    assert lines[2].startswith(
        f"memory of a rank before sharding: student, gradients and AdamW {16 * count / gib:,.2f} "
        f"GiB; teacher {4 * teacher_count / gib:,.2f} GiB; the loss {loss / gib:,.2f} GiB"
    )


def test_each_bad_row_is_named_and_the_other_file_is_still_read(validate, tmp_path):
    silent = {"messages": [{"role": "user", "content": "alone"}]}
    inside = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "<|im_end|>"}]}
    train = write_jsonl(tmp_path / "t.jsonl", [CHAT, silent, inside, {"words": "x"}])
    with Path(train).open("a") as file:
        file.write("{\n")
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"prompt": "a"}])
    data = {"train": train, "eval": held_out, "eval_samples": None}
    code, lines = validate({"data": data})
    assert (code, lines[-1]) == (3, "not valid")
    for place in (*(f"{train}:{number}" for number in (2, 3, 4, 5)), f"{held_out}:1"):
        assert sum(line.startswith(f"{place}: ") for line in lines) == 1, place
    assert not any(line.startswith(f"{train}:1: ") for line in lines)
    assert f"{train}: 5 rows, 4 bad; " in "\n".join(lines)
    # Skipped, but told, and valid as long as something is left.
    skip = {"data": {**data, "bad_rows": "skip", "eval": str(tmp_path / "good.jsonl")}}
    write_jsonl(tmp_path / "good.jsonl", [CHAT])
    code, lines = validate({"packing": {"length": 64}}, skip)
    assert (code, lines[-1]) == (0, "valid")
    assert f"{train}: 5 rows, 4 bad; " in "\n".join(lines)
    assert sum(line.startswith(f"{train}:") for line in lines) == 5
    write_jsonl(tmp_path / "good.jsonl", [silent])
    assert validate({"packing": {"length": 64}}, skip)[0] == 3


def test_a_file_that_is_not_there_is_a_fault_of_the_data(validate, tmp_path):
    gone, good = str(tmp_path / "gone.jsonl"), write_jsonl(tmp_path / "e.jsonl", [CHAT])
    code, lines = validate({"data": {"train": gone, "eval": good, "eval_samples": None}})
    assert code == 3
    assert any("gone.jsonl" in line for line in lines)
    assert any(line.startswith(f"{good}: 1 rows, 0 bad") for line in lines)


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_a_model_that_is_not_there_ends_in_4_and_says_what_was_not_checked(validate, name):
    code, lines = validate({name: {"name_or_path": "nobody/nothing"}})
    assert (code, lines[-1]) == (4, "not valid")
    assert "nobody/nothing" in lines[0]
    assert lines[1] == "the rows were not read: how they are tokenized depends on the models"


def test_a_template_that_cannot_be_used_is_a_fault_of_the_model(validate, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    code, lines = validate({"data": {"chat_template": str(tmp_path / "t.jinja")}})
    assert code == 4, lines
    assert validate({"data": {"chat_template": str(tmp_path / "no.jinja")}})[0] == 3


def test_tokens_that_only_one_model_has_are_named(validate, classroom):
    tokenizer = AutoTokenizer.from_pretrained(classroom / "tied")
    code, lines = validate({"loss": {"vocab_size": 300}})
    assert (code, lines[-1]) == (3, "not valid")
    (told,) = (line for line in lines if "loss.vocab_size" in line)
    assert told.startswith("chats.jsonl:1 holds token ")
    assert int(told.split("holds token ")[1].split(",")[0]) in range(300, len(tokenizer))
    code, lines = validate({"loss": {"vocab_size": len(tokenizer) + 1}})
    assert code == 4
    assert f"set it to at most {len(tokenizer)}" in lines[0]


def test_the_time_on_a_device_that_is_not_here(lesson, tmp_path, capsys):
    assert main([*command(tmp_path, lesson, "validate"), "--device=h100"]) == 0
    told = capsys.readouterr().out
    assert " on 1 x h100, a bound of the planner's by " in told
    assert "a step learns from about " in told
    assert "samples (48): half have at most " in told


def test_rows_longer_than_a_model_reads(validate):
    code, lines = validate({"packing": {"length": 513}})
    assert code == 4
    assert "packing.length 513: the student reads up to 512 tokens" in lines[0]


def test_a_cache_of_other_data_ends_in_9(validate, lesson, tmp_path, classroom):
    from pixelrag.train.cache_answers import write

    some = (classroom / "chats.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "some.jsonl").write_text("".join(some))
    few = {"data": {"train": str(tmp_path / "some.jsonl"), "eval_samples": None}}
    path = tmp_path / "few.yaml"
    path.write_text(json.dumps(merged(lesson, few)))
    config, _ = load(DistillConfig, ["--config", str(path)])
    with process_group("cpu", 60) as world:
        write(config, world, tmp_path / "cache", kind="top_k", k=4)
    cached = {"teacher": {"source": "cache", "path": str(tmp_path / "cache")}}
    cached["teacher"]["name_or_path"] = None
    code, lines = validate(few, cached)
    assert (code, lines[-1]) == (0, "valid"), lines
    assert "teacher" not in lines[0]
    code, lines = validate(cached)
    assert (code, lines[-1]) == (9, "not valid")
    assert "does not belong to this run" in "\n".join(lines)
    assert "  data: the cache has " in "\n".join(lines)
    code, lines = validate(few, cached, {"loss": {"temperature": 3.0}})
    assert code == 9
    assert "  temperature: the cache has 2.0, the run 3.0" in lines
