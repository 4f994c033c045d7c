"""`pixelrag init`: what is written is valid as it stands, and says what was seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pixelrag.cli import main
from pixelrag.config.base import load
from pixelrag.config.jobs import config_class
from pixelrag.config.problems import options_of
from tests.train.material import image_rows, text_rows, write_jsonl


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def jobs(shelf, classroom, library) -> dict[str, list[str]]:
    """Command lines of `pixelrag init`, by what they are about."""
    encoder = f"--question_encoder.name_or_path={library / 'questions'}"
    return {
        "texts": [
            "contrastive", "--data", str(shelf / "train.jsonl"), str(shelf / "eval.jsonl"),
            f"--model.name_or_path={shelf / 'bert'}",
        ],
        "tiles": [
            "contrastive", "--data", str(shelf / "mixed.jsonl"), str(shelf / "mixed_eval.jsonl"),
            f"--model.name_or_path={shelf / 'qwen3_vl'}",
        ],
        "chats": [
            "distill", "--data", str(classroom / "chats.jsonl"),
            f"--student.name_or_path={classroom / 'tied'}",
            f"--teacher.name_or_path={classroom / 'teacher'}",
        ],
        "questions": [
            "rag", "--data", str(library / "train.jsonl"), str(library / "eval.jsonl"),
            str(library / "kb.jsonl"), encoder, f"--generator.name_or_path={library / 't5'}",
        ],
        "decoder": [
            "rag", "--data", str(library / "train.jsonl"), str(library / "mixed.jsonl"),
            f"--question_encoder.name_or_path={library / 'vision'}",
            f"--generator.name_or_path={library / 'vision'}",
        ],
    }  # fmt: skip


SEEN = {
    "texts": [
        "# 26 rows that name 51 texts as documents.",
        "all 26 queries half have at most",
        "Rows name 0 to 2 hard negatives",
        "best eval/ndcg@10",
    ],
    "tiles": ["images half have at most", "Less memory for a third more time.", "vision: all"],
    "chats": ["48 rows: 48 of the form chat.", "eval_samples: 2", "up to 2 answers", "length: "],
    "questions": ["9 questions, 9 of which name their", "16 passages, texts alone", "Flat"],
    "decoder": ["17 passages, images among them", "generator_lora:", "max_visual_tokens: "],
}  # fmt: skip


@pytest.mark.parametrize("about", list(SEEN))
def test_what_is_written_is_valid_and_says_what_was_seen(about, jobs, here, capsys):
    job = jobs[about][0]
    assert main(["init", *jobs[about]]) == 0
    told = capsys.readouterr().out
    assert "pixelrag validate --config config.yaml" in told
    assert f"-m pixelrag {job} --config config.yaml" in told
    text = Path("config.yaml").read_text()
    flat = " ".join(line.strip(" #") for line in text.splitlines())
    missing = [words for words in SEEN[about] if words.strip("# ") not in flat]
    assert not missing, f"{missing}\n{text}"
    # Every option has its reason above it, and every one that is off can be switched on.
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"^  [a-z_]+: |^output_dir", line):
            assert lines[number - 1].lstrip().startswith("# "), line
    leaves = {path.rpartition(".")[2] for path in options_of(config_class(job))}
    found = [(n, re.match(r"^ *# ([a-z_]+): ", line)) for n, line in enumerate(lines)]
    for off in [n for n, match in found if match and match[1] in leaves]:
        on = [line.replace("# ", "", 1) if n == off else line for n, line in enumerate(lines)]
        Path("on.yaml").write_text("\n".join(on))
        load(config_class(job), ["--config", "on.yaml"])
    assert main(["validate", "--config", "config.yaml"]) == 0, capsys.readouterr().out
    if about in ("texts", "chats"):
        assert main([job, "--config", "config.yaml"]) == 0
        (folder,) = Path("runs").iterdir()
        assert (folder / "best" / "config.json").is_file()


@pytest.mark.parametrize("about", list(SEEN))
def test_a_gpu_changes_what_is_chosen(about, jobs, here, monkeypatch):
    from pixelrag.init import shared

    monkeypatch.setattr(shared, "has_gpu", lambda: True)
    assert main(["init", *jobs[about]]) == 0
    config, _ = load(config_class(jobs[about][0]), ["--config", "config.yaml"])
    assert config.engine.precision == "bf16"
    if about == "tiles":
        assert config.model.gradient_checkpointing


def test_rows_that_cannot_be_trained_on_are_named_or_left_out(jobs, here, classroom, capsys):
    """By their form, and by what only the tokenizer tells."""
    lines = (classroom / "chats.jsonl").read_text().splitlines()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<|im_end|>"}]
    for bad, told in ((json.dumps({"messages": turns}), "control token"), ("{", "not valid JSON")):
        (here / "data.jsonl").write_text("\n".join([*lines[:30], bad, *lines[30:]]))
        words = ["distill", "--data", "data.jsonl", *jobs["chats"][3:]]
        assert main(["init", *words]) == 3
        shown = capsys.readouterr().err
        assert "data.jsonl:31: " in shown
        assert told in shown
        assert "--data.bad_rows skip" in shown
        assert main(["init", *words, "--data.bad_rows=skip", f"--output={told[0]}.yaml"]) == 0
        assert main(["validate", "--config", f"{told[0]}.yaml"]) == 0


def test_a_student_needs_a_teacher(jobs, here, capsys):
    words = [word for word in jobs["chats"] if not word.startswith("--teacher")]
    assert main(["init", *words]) == 2
    assert "name a larger model with the same tokenizer" in capsys.readouterr().err


def test_nothing_is_overwritten(jobs, here, capsys):
    Path("mine.yaml").write_text("precious")
    assert main(["init", *jobs["texts"], "--output", "mine.yaml"]) == 2
    assert "mine.yaml exists; nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["mine.yaml"]
    assert Path("mine.yaml").read_text() == "precious"


def test_what_was_asked_for_is_taken_and_judged(jobs, here, capsys):
    assert main(["init", *jobs["texts"], "--batch.chunk_size=3", "--seed", "7"]) == 0
    config, _ = load(config_class("contrastive"), ["--config", "config.yaml"])
    assert (config.batch.chunk_size, config.seed) == (3, 7)
    assert Path("config.yaml").read_text().count("chunk_size:") == 1
    Path("config.yaml").unlink()
    assert main(["init", *jobs["texts"], "--batch.chunk_tokens=3", "--batch.chunk_sise=3"]) == 2
    assert "did you mean batch.chunk_size?" in capsys.readouterr().err
    assert main(["init", *jobs["texts"], "--batch.chunk_tokens=3"]) == 2
    told = capsys.readouterr().err
    assert "batch.chunk_tokens (config.yaml line " in told
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("job", "rows", "expected"),
    [
        ("contrastive", [{"query": "a", "passage": "b"}, {"messages": []}],
         ["data.jsonl:2: ", "expected a query with its document", "pixelrag init distill"]),
        ("contrastive", [{"question": "a", "answer": "b"}],
         ["data.jsonl:1: ", "expected a query with its document", "pixelrag init rag"]),
        ("contrastive", [{"query": "a", "passage": "b"}, {"query": "c"}],
         ["data.jsonl:2: has neither passage nor chunk_path", "Expected a query with"]),
        ("contrastive", [{"query": "a", "chunk_path": "gone.png"}],
         ["data.jsonl:1: image ", "gone.png does not exist"]),
        ("contrastive", [], ["data.jsonl has no rows"]),
        ("distill", [{"text": "a"}, {"query": "a", "passage": "b"}],
         ["data.jsonl:2: ", "expected a chat or text", "pixelrag init contrastive"]),
        ("distill", [{"words": "a"}], ["data.jsonl:1: ", "expected a chat or text", "words"]),
        ("rag", [{"question": "a", "answer": "b"}], ["knowledge base: got none, expected one"]),
        ("rag", [{"id": "a", "text": "b"}], ["no questions; name a JSONL file of them too"]),
        ("rag", [{"text": "b"}], ["data.jsonl:1: ", "expected a question", "init distill"]),
    ],
)  # fmt: skip
def test_wrong_files_are_named_by_line(job, rows, expected, here, capsys):
    write_jsonl(here / "data.jsonl", rows)
    assert main(["init", job, "--data", "data.jsonl"]) == 3
    told = capsys.readouterr().err
    assert not [words for words in expected if words not in told], told
    assert not Path("config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.csv", "query,passage\na,b\n", "of a table: pandas.read_csv('a.csv', sep=None, "),
        ("a.json", '[{"query": "a"}]', "of a JSON array: jq -c '.[]' a.json > a-rows.jsonl"),
        ("a.json", '[\n{"query": "a"}]', "of a JSON array: jq -c '.[]' a.json > a-rows.jsonl"),
        ("a.txt", "words\n", "expected JSONL, one JSON object a line\n"),
    ],
)
def test_files_of_another_form_are_told_what_they_should_be(name, content, hint, here, capsys):
    Path(name).write_text(content)
    assert main(["init", "contrastive", "--data", name]) == 3
    told = capsys.readouterr().err
    assert f"{name}:1: " in told
    assert "; expected JSONL, one JSON object a line" in told
    assert hint in told


def test_a_model_that_is_not_there_leaves_lengths_guessed(here, monkeypatch, capsys):
    """Unless it was asked for: that is the user's to mend."""
    from pixelrag.init import shared

    monkeypatch.setattr(shared, "is_installed", lambda package: False)
    write_jsonl(here / "data.jsonl", text_rows(40))
    assert main(["init", "contrastive", "--data", "data.jsonl"]) == 0
    text = Path("config.yaml").read_text()
    assert "sentence-transformers/all-MiniLM-L6-v2" in text
    assert "guessed from characters" in " ".join(text.replace("#", " ").split())
    words = ["--data", "data.jsonl", "--output", "b.yaml", "--model.name_or_path=no/thing"]
    assert main(["init", "contrastive", *words]) == 4
    assert "no/thing" in capsys.readouterr().err


def test_images_are_nothing_for_a_text_model(shelf, here, capsys):
    write_jsonl(here / "data.jsonl", image_rows(here / "tiles", 2))
    model = f"--model.name_or_path={shelf / 'bert'}"
    assert main(["init", "contrastive", "--data", "data.jsonl", model]) == 3
    told = capsys.readouterr().err
    assert "tiles/0.png" in told
    assert "reads text only" in told


def test_images_that_lie_elsewhere_are_allowed_by_name(shelf, here, capsys):
    (here / "rows").mkdir()
    rows = image_rows(here / "tiles", 4)
    rows = [row | {"chunk_path": f"../{row['chunk_path']}", "neg_chunk_paths": []} for row in rows]
    write_jsonl(here / "rows" / "data.jsonl", rows)
    model = f"--model.name_or_path={shelf / 'qwen3_vl'}"
    assert main(["init", "contrastive", "--data", "rows/data.jsonl", model]) == 0
    assert f'image_roots: ["{here / "tiles"}"]' in Path("config.yaml").read_text()
    assert main(["validate", "--config", "config.yaml"]) == 0, capsys.readouterr().out


def test_the_sample_is_drawn_evenly():
    from pixelrag.data.lengths import SAMPLE, Sample

    sample: Sample[int] = Sample()
    for number in range(10 * SAMPLE):
        sample.add(number)
    assert (len(sample.items), sample.seen) == (SAMPLE, 10 * SAMPLE)
    assert abs(sum(sample.items) / SAMPLE / (5 * SAMPLE) - 1) < 0.05


def test_the_command_line(here, capsys):
    assert main(["init", "contrastive"]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["init", "other", "--data", "x"]) == 2
    assert "job: got 'other', expected one of contrastive" in capsys.readouterr().err
