"""`pixelrag validate` of a RAG job: its figures, and what its models lack, without weights."""

import pytest

from pixelrag.cli import main
from tests.distributed.rag_runs import flags


@pytest.fixture
def validate(library, tmp_path, capsys):
    def _run(*more: str) -> tuple[int, list[str]]:
        code = main(["validate", "rag", *flags(library, tmp_path / "run"), *more])
        return code, capsys.readouterr().out.splitlines()

    return _run


def test_the_run_in_figures(validate):
    """Nine questions in batches of eight over two processes: two steps, the last one of one."""
    code, lines = validate(
        "--world_size=2", "--batch.per_device_batch_size=4", "--optim.max_steps=null",
        "--optim.num_epochs=3",
    )  # fmt: skip
    assert (code, lines[-1]) == (0, "valid")
    assert lines[3:5] == [
        "a step: 4 a rank x 2 ranks x 1 accumulated = 8 questions, with 3 passages each 24 "
        "prompts; a question is told from 2 other passages",
        "9 questions, 2.0 steps an epoch; 6 steps, 3.00 epochs",
    ]
    assert any(line.startswith("questions (9): half have at most ") for line in lines)
    assert any(line.startswith("passages of text (16): half have") for line in lines)
    assert any(line.startswith("time: at least ") for line in lines)


def test_what_the_planner_cannot_tell_is_unknown(validate):
    """What it can is tested with the other jobs."""
    code, lines = validate(
        "--device=h100", "--engine.offload_optimizer=true", "--engine.name=zero2"
    )
    assert code == 0
    assert any(line.startswith("time: unknown; the planner says: ") for line in lines)


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (["--encoder_lora.enabled=true", "--encoder_lora.vision=all"], 4, "no vision tower"),
        (
            ["--generator.name_or_path={library}/decoder", "--generator_lora.enabled=true",
             "--generator_lora.merger=true"],
            4, "no vision tower",
        ),
        (["--question_encoder.name_or_path=a/b/c"], 4, "there is no such folder"),
        (["--document_encoder.name_or_path=a/b/c"], 4, "there is no such folder"),
        (["--knowledge_base.source={library}/mixed.jsonl"], 3, "reads text only"),
    ],
)  # fmt: skip
def test_what_the_models_lack_is_found(more, code, told, validate, library):
    found, lines = validate(*(word.format(library=library) for word in more))
    assert (found, lines[-1]) == (code, "not valid")
    assert told in "\n".join(lines)


def test_bad_questions_are_named_once(validate, tmp_path, caplog):
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n{\n')
    code, lines = validate(f"--data.train={rows}")
    assert (code, lines[-1]) == (3, "not valid")
    assert sum("questions.jsonl:2: " in line for line in lines) == 1
    assert not [text for text in caplog.messages if "bad rows" in text]
