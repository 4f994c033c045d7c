"""The RAG demo: its catalogues, its table, and one small run of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from pixelrag import cli
from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.data.passages import load_passages
from pixelrag.data.questions import QuestionDataset
from pixelrag.demo import rag, rag_measure
from pixelrag.demo.rag_report import Outcome, RunFigures, rag_table, read_run
from pixelrag.demo.rag_shift import all_words, entries, write_catalogue, write_pairs
from pixelrag.errors import ConfigError, DataError


def _fact(passage: str) -> str:
    """Name, property and value of an entry, wherever its remarks stand."""
    words = passage.split()
    place = words.index("is")
    return " ".join(words[place - 3 : place + 3])


def _second_names(catalogue: str) -> set[str]:
    return {_fact(entry.passage).split()[1] for entry in entries(catalogue, 3200, seed=0)}


def test_the_new_catalogues_names_are_noise_in_the_old() -> None:
    old, new = _second_names("old"), _second_names("new")
    assert len(old) == len(new) == 40
    assert not old & new
    for catalogue, share in (("old", 0.5), ("new", 0.0)):
        remarks = [
            word
            for entry in entries(catalogue, 400, seed=1)
            for word in entry.passage.replace(_fact(entry.passage), "").split()
        ]
        assert len(remarks) == 400 * 6
        assert not old & set(remarks)
        assert abs(sum(word in new for word in remarks) / len(remarks) - share) < 0.05


def test_questions_share_no_word_with_their_entries() -> None:
    for entry in entries("new", 300, seed=2):
        assert not set(entry.question.split()) & set(entry.passage.split())
        assert entry.answer in _fact(entry.passage)


def test_every_entry_is_told_by_its_names_and_property() -> None:
    asked = [entry.question for entry in entries("new", 1600, seed=3)]
    assert len(set(asked)) == 1600
    assert len(set(all_words())) == len(all_words())


def test_a_catalogue_is_what_the_job_reads_and_the_same_each_time(tmp_path: Path) -> None:
    written = [
        write_catalogue(tmp_path / name, "new", num_passages=50, num_held_out=8, seed=4)
        for name in ("a", "b")
    ]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    made = written[0]
    other = write_catalogue(tmp_path / "c", "new", num_passages=50, num_held_out=8, seed=5)
    assert other.passages.read_bytes() != made.passages.read_bytes()
    store = load_passages(str(made.passages), split="none")
    train, held_out = (
        QuestionDataset([str(path)], "error", passages=store)
        for path in (made.train, made.held_out)
    )
    assert (len(store), len(train), len(held_out)) == (50, 42, 8)
    for question in [*train.rows, *held_out.rows]:
        (row,) = store.rows_of(question.passage_ids[0])
        assert question.answers[0] in _fact(store[row].text)
    assert not {q.text for q in train.rows} & {q.text for q in held_out.rows}


def test_wrong_counts_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_held_out: got 9"):
        write_catalogue(tmp_path / "a", "new", num_passages=9, num_held_out=9, seed=0)
    with pytest.raises(ConfigError, match="count: got 3201"):
        entries("old", 3201, seed=0)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not the demo's"):
        write_pairs(tmp_path, 10, seed=0)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    rows = [
        {"index/generation": 1.0, "index/age_steps": 10.0, "perf/step_seconds": 0.1},
        {"index/generation": 2.0, "index/age_steps": 3.0, "perf/step_seconds": 0.3},
        {"index/generation": 4.0, "index/age_steps": 0.0, "perf/step_seconds": 0.1},
        {f"eval/{name}": 0.5 for name in ("em", "f1", "recall@1", "recall@5")},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_run(metrics, waits=True) == RunFigures(
        dict.fromkeys(("recall@1", "recall@5", "em", "f1"), 0.5), 2, 2, 10, 0.1
    )
    assert read_run(metrics, waits=False).waited == 0


def _outcome(seed: int, em: list[float]) -> Outcome:
    def values(em: list[float]) -> dict[str, list[float]]:
        return {"em": em, "f1": em, "recall@1": em, "recall@5": em}

    runs = {
        name: RunFigures(dict.fromkeys(values([]), 0.25), swaps, 0, 7, 0.2)
        for name, swaps in (("frozen", 0), ("beside", 2 + seed))
    }
    zeros = [0.0] * len(em)
    fresh = {"frozen": values(zeros), "beside": values(em)}
    return Outcome(seed, values(zeros), fresh, runs, {"frozen": 1.0, "beside": 2.0})


def test_the_table_tells_a_gain_from_luck() -> None:
    lines, results = rag_table([_outcome(0, [1.0] * 20), _outcome(1, [1.0] * 10 + [0.0] * 10)])
    found = results["runs"]["beside"]
    assert found["fresh"]["em"] == 0.75
    assert found["live"]["em"] == 0.25
    assert found["generations"] == [2, 3]
    assert found["gain_over_frozen"]["em"]["mean"] == 0.75
    assert "2-3" in next(line for line in lines if line.startswith("beside, index in use"))
    assert "EM beyond its paired" in lines[-1]
    lines, _ = rag_table([_outcome(0, [1.0] + [0.0] * 19)])
    assert "EM not beyond its paired" in lines[-1]


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--steps", "-1"], ["--held-out", "x"]])
def test_wrong_options_end_with_code_2(words) -> None:
    with pytest.raises(SystemExit) as stopped:
        rag.parse(words)
    assert stopped.value.code == 2


def test_every_configuration_of_the_demo_is_valid(tmp_path: Path) -> None:
    options = rag.parse(["--output", str(tmp_path)])
    made = write_catalogue(tmp_path / "new", "new", num_passages=9, num_held_out=2, seed=0)
    values = rag._config(tmp_path / "run", {"encoder": "e", "generator": "g"}, made)
    values["optim"] = {"max_steps": options.steps}
    config = rag._write(tmp_path / "rag.yaml", values)
    configs = {
        name: load(RagConfig, ["--config", config, *flags])[0] for name, flags in rag.RUNS.items()
    }
    assert "document" not in configs["frozen"].train
    assert configs["waiting"].refresh.deterministic_lag == 0
    assert configs["beside"].refresh.deterministic_lag is None
    # At least two generations are swapped in while a run goes on.
    assert options.steps / configs["beside"].refresh.every_steps > 2


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_demo_runs_from_end_to_end(tmp_path: Path, monkeypatch, capsys) -> None:
    """Too short to learn anything; in this process, which spares many starts of torch."""
    folder = tmp_path / "demo"

    def run(arguments: list[str], *, nproc: int) -> float:
        if str(folder / "reader.yaml") in arguments:
            shutil.copytree(folder / "models" / "generator", folder / "run-reader/last/generator")
            return 0.0
        assert cli.main(list(arguments)) == 0
        assert not dist.is_initialized()
        return 1.0

    def measure(config_file: Path, output: Path, *, models: Path | None = None) -> dict:
        if models is not None:
            return measured(config_file, output, models=models)
        return dict.fromkeys(("em", "f1", "recall@1", "recall@5"), [0.0] * 6)

    measured = rag_measure.measure
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(rag, "run", run)
    monkeypatch.setattr(rag_measure, "measure", measure)
    monkeypatch.setattr(rag, "RUNS", {"frozen": rag.RUNS["frozen"]})
    small = ["--steps", "2", "--passages", "40", "--held-out", "6"]
    small += ["--pair-steps", "3", "--output", str(folder)]
    assert rag.main(small) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["runs"]["frozen"]["generations"] == [0]
    # Nothing was renewed: the index in use is as good as a fresh one.
    assert results["runs"]["frozen"]["live"] == results["runs"]["frozen"]["fresh"]
    place = folder / "seed-0" / "after-frozen"
    lines = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(len(line["passages"]) == 8 for line in lines)
    assert "0 right of 6" in (place / "answers.html").read_text()
    shown = capsys.readouterr().out
    assert f"Everything lies in {folder}" in shown
    assert "frozen, fresh index" in shown
