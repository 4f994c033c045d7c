"""The distillation demo's data: docstrings as answers, no file in both splits."""

import json
from pathlib import Path

import pytest

from pixelrag.data.chat import Chat, parse_text_row
from pixelrag.demo.chats import build_chats
from pixelrag.demo.report import distill_table
from pixelrag.errors import DataError


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Forty modules of ten documented functions."""
    root = tmp_path_factory.mktemp("library")
    for module in range(40):
        functions = [
            f"def add_{number}(values):\n"
            f'    """Return the sum of values and {module * 10 + number}, counted from one.\n\n'
            f'    {"It goes on at length. " * (40 if number == 3 else 1)}\n\n    More.\n    """\n'
            f"    total = {module} + {number}\n"
            "    for value in values:\n        total += value * value\n    return total\n"
            for number in range(10)
        ]
        (root / f"m{module}.py").write_text("\n".join(functions))
    return root


def test_questions_name_or_show_a_function_and_answers_are_docstrings(tmp_path, library):
    made = build_chats(tmp_path / "chats", root=library)
    train, held_out = rows(made.train_path), rows(made.eval_path)
    assert (len(train), len(held_out)) == (made.num_train, made.num_eval) == (360, 40)
    kinds = set()
    for row in train + held_out:
        chat = parse_text_row(row, "1")
        assert isinstance(chat, Chat)
        question, answer = (message["content"] for message in chat.messages)
        module, name = row["source"].removesuffix(".py").replace(".py:", ":").split(":")
        assert (
            f"`{name}`" in question or f"`{module}.{name}`" in question or f"def {name}" in question
        )
        assert "Return the sum" not in question
        assert answer.startswith("Return the sum of values and ")
        assert len(answer) <= 700
        assert answer.endswith(("More.", "from one."))
        kinds.add("code" if "```" in question else "name")
    assert kinds == {"code", "name"}


def test_no_file_is_in_both_and_equal_calls_give_equal_bytes(tmp_path, library):
    made = build_chats(tmp_path / "a", root=library, max_eval=7)
    again = build_chats(tmp_path / "b", root=library, max_eval=7)
    for one, other in ((made.train_path, again.train_path), (made.eval_path, again.eval_path)):
        assert one.read_bytes() == other.read_bytes()
    files = [
        {row["source"].split(":")[0] for row in rows(path)}
        for path in (made.train_path, made.eval_path)
    ]
    assert not files[0] & files[1]
    assert made.num_eval == 7
    other = build_chats(tmp_path / "c", root=library, seed=3)
    assert other.train_path.read_bytes() != made.train_path.read_bytes()


def test_a_small_library_is_one_clear_error(tmp_path, library):
    with pytest.raises(DataError, match=r"Only 400 functions .* expected at least 401"):
        build_chats(tmp_path / "chats", root=library, min_rows=401)
    assert not (tmp_path / "chats").exists()


def test_the_table_compares_the_first_evaluation_with_the_last(tmp_path):
    def line(step: int, value: float) -> str:
        names = ("eval/loss", "eval/ce_loss", "eval/kd_loss", "eval/agreement")
        return json.dumps({"step": step} | dict.fromkeys(names, value))

    path = tmp_path / "metrics.jsonl"
    lines = [line(0, 4.0), json.dumps({"step": 1, "train/loss": 9.0}), line(2, 3.0), line(4, 1.5)]
    path.write_text("\n".join(lines) + "\n")
    text, results = distill_table(path)
    change = {"before": 4.0, "after": 1.5}
    assert results == {"ce_loss": change, "kd_loss": change, "agreement": change}
    assert all("4.0000" in part and "1.5000" in part for part in text[1:])
