"""The RAG demo: its pages and slips, its table, and one small run of it."""

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
from pixelrag.demo import rag
from pixelrag.demo.rag_pages import (
    NUM_POINTERS,
    PageSet,
    functions_to_ask_for,
    write_pages,
    write_slips,
)
from pixelrag.demo.rag_report import Outcome, RunFigures, rag_table, read_measured, read_run
from pixelrag.errors import ConfigError, DataError
from tests.train import nursery

MEASURES = ("em", "f1", "recall@1", "recall@5")
PREFIX = "Which module does this: "


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten modules of twelve functions each: every module has more than may be asked for."""
    root = tmp_path_factory.mktemp("library")
    body = "    return [value for value in range(100) if value % {n} == {k}], 'something to do'\n"
    for n in range(10):
        code = (
            f'def f{k}():\n    """Count the number {n} and then {k} of all things."""\n'
            + body.format(n=n + 2, k=k)
            for k in range(12)
        )
        (root / f"{'_' if n == 0 else ''}module{'abcdefghij'[n]}.py").write_text("\n".join(code))
    return root


def _read(made: PageSet):
    store = load_passages(str(made.passages), split="none")
    files = (made.train, made.held_out)
    return store, *(QuestionDataset([str(path)], "error", passages=store).rows for path in files)


def test_functions_are_of_public_modules_and_few_of_each(library: Path) -> None:
    train, held_out = functions_to_ask_for(library)
    assert (len(train), len(held_out)) == (36, 18)  # nine modules, six of each
    modules = [one.module for one in [*train, *held_out]]
    assert not any(module.startswith("_") for module in modules)
    assert {modules.count(module) for module in modules} == {6}
    assert not {one.summary for one in train} & {one.summary for one in held_out}


def test_a_page_holds_its_own_text_and_pointers_to_other_modules(library: Path, tmp_path) -> None:
    made = write_pages(tmp_path / "a", num_train=20, num_held_out=10, seed=1, root=library)
    store, train, held_out = _read(made)
    of = {one.summary: one.module for pool in functions_to_ask_for(library) for one in pool}
    own_first = 0
    for question in [*train, *held_out]:
        (page,) = (store[row] for row in store.rows_of(question.passage_ids[0]))
        summary = question.text.removeprefix(PREFIX)
        assert question.answers == (page.title,) == (of[summary],)
        assert f"On this page: {summary}" in page.text
        mentioned = [one for one in of if one in page.text and one != summary]
        assert len(mentioned) == NUM_POINTERS
        assert page.title not in {of[one] for one in mentioned}
        own_first += page.text.startswith("On this page")
    assert 0 < own_first < 30
    assert not {q.text for q in train} & {q.text for q in held_out}


def test_no_question_is_held_out_in_one_collection_and_trained_on_in_another(
    library: Path, tmp_path: Path
) -> None:
    """The generator and all seeds keep to the same split."""
    sets = [
        _read(write_pages(tmp_path / str(s), num_train=20, num_held_out=10, seed=s, root=library))
        for s in range(3)
    ]
    trained = {question.text for _, train, _ in sets for question in train}
    held_out = {question.text for _, _, held_out in sets for question in held_out}
    assert len(trained) > 20
    assert not trained & held_out


def test_a_slip_tells_its_answer_by_its_title_alone(library: Path, tmp_path: Path) -> None:
    store, train, held_out = _read(
        write_slips(tmp_path / "s", num_train=90, num_held_out=10, seed=0, root=library)
    )
    assert (len(train), len(held_out)) == (90, 10)
    for question in [*train, *held_out]:
        (page,) = (store[row] for row in store.rows_of(question.passage_ids[0]))
        assert (question.text, question.answers) == (page.text, (page.title,))
        assert page.title not in page.text
    assert len({page.title for page in store}) == 9


@pytest.mark.parametrize("write", [write_pages, write_slips])
def test_the_same_seed_writes_the_same(library: Path, tmp_path: Path, write) -> None:
    sizes = {"num_train": 20, "num_held_out": 10, "root": library}
    made = [
        write(tmp_path / name, seed=seed, **sizes)
        for name, seed in zip("abc", (4, 4, 5), strict=True)
    ]
    first, again, other = (one.passages.read_bytes() for one in made)
    assert first == again != other


def test_too_few_functions_and_foreign_folders_are_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 18 functions for held-out questions, got 19"):
        write_pages(tmp_path / "a", num_train=20, num_held_out=19, seed=0, root=library)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not the demo's"):
        write_pages(tmp_path, num_train=20, num_held_out=10, seed=0, root=library)
    assert (tmp_path / "thesis.tex").exists()


def test_this_python_has_pages_for_the_demo() -> None:
    train, held_out = functions_to_ask_for()
    assert len(train) >= rag.TRAIN
    assert len(held_out) >= rag.HELD_OUT


def test_a_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    rows = [
        {"step": 0} | {f"eval/{name}": 0.25 for name in MEASURES},
        {"index/generation": 1.0, "index/age_steps": 10.0, "perf/step_seconds": 0.1},
        {"index/generation": 2.0, "index/age_steps": 3.0, "perf/step_seconds": 0.3},
        {"index/generation": 4.0, "index/age_steps": 0.0, "perf/step_seconds": 0.1},
        {"step": 3} | {f"eval/{name}": 0.5 for name in MEASURES},
    ]
    metrics = tmp_path / "metrics.jsonl"

    def read(rows: list[dict], *, waits: bool) -> RunFigures:
        metrics.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return read_run(metrics, waits=waits)

    before, live = (dict.fromkeys(MEASURES, value) for value in (0.25, 0.5))
    assert read(rows, waits=True) == RunFigures(before, live, 2, 2, 10, 0.1)
    assert read(rows, waits=False).waited == 0
    assert read(rows[1:], waits=False).before is None


def _outcome(seed: int, em: list[float]) -> Outcome:
    def values(em: list[float]) -> dict[str, list[float]]:
        return dict.fromkeys(MEASURES, em)

    low = dict.fromkeys(MEASURES, 0.25)
    runs = {
        name: RunFigures(before, low, swaps, 0, 7, 0.2)
        for name, before, swaps in (
            ("frozen", dict.fromkeys(MEASURES, 0.125), 0),
            ("beside", None, 2 + seed),
        )
    }
    fresh = {"frozen": values([0.0] * len(em)), "beside": values(em)}
    return Outcome(seed, fresh, runs, {"frozen": 1.0, "beside": 2.0})


def test_the_table_tells_a_gain_from_luck() -> None:
    lines, results = rag_table([_outcome(0, [1.0] * 20), _outcome(1, [1.0] * 10 + [0.0] * 10)])
    found = results["runs"]["beside"]
    assert results["before"]["em"] == 0.125
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
    with pytest.raises(ConfigError, match=r"got .*, expected"):
        rag.parse(words)


def test_every_configuration_of_the_demo_is_valid(library: Path, tmp_path: Path) -> None:
    options = rag.parse(["--output", str(tmp_path)])
    made = write_pages(tmp_path / "new", num_train=9, num_held_out=2, seed=0, root=library)
    values = rag._values(tmp_path / "run", Path("g"), made)
    values["optim"] = {"max_steps": options.steps}
    config = rag._write(tmp_path, values)
    configs = {
        name: load(RagConfig, ["--config", config, *flags])[0] for name, flags in rag.RUNS.items()
    }
    assert "document" not in configs["frozen"].train
    assert configs["waiting"].refresh.deterministic_lag == 0
    assert configs["beside"].refresh.deterministic_lag is None
    # At least two generations are swapped in while the training waits; beside it, as time allows.
    assert options.steps > 2 * configs["waiting"].refresh.every_steps
    assert configs["beside"].refresh.final_refresh == "skip"


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_demo_runs_from_end_to_end(tmp_path: Path, monkeypatch, capsys) -> None:
    """Too short to learn anything; in this process, which spares many starts of torch."""
    from pixelrag.models.tiny import save_tiny_bert

    folder = tmp_path / "demo"

    def run_alone(jobs: dict[str, list[str]], *, threads: int, at_once: int) -> dict[str, float]:
        for name, arguments in jobs.items():
            if name == "":
                assert cli.main(["validate", *arguments]) == 0
                fresh = folder / "reader" / "fresh"
                shutil.copytree(fresh, folder / "reader" / "run" / "last" / "generator")
            elif name == "frozen 0":
                assert cli.main(list(arguments)) == 0
                assert not dist.is_initialized()
        for name, arguments in jobs.items():  # the other runs are as the first
            if name not in ("", "frozen 0"):
                place = "after-" if arguments[0] == "eval" else ""
                made = folder / "seed-0" / f"{place}frozen"
                shutil.copytree(made, made.with_name(place + name.removesuffix(" 0")))
        return dict.fromkeys(jobs, 1.0)

    monkeypatch.setattr(rag, "ENCODER", str(save_tiny_bert(tmp_path / "bert")))
    monkeypatch.setattr(rag, "run_alone", run_alone)
    small = ["--seeds", "1", "--steps", "2", "--train", "30", "--held-out", "6"]
    with nursery.warm_background():
        assert rag.main([*small, "--reader-steps", "1", "--output", str(folder)]) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["runs"]["frozen"]["generations"] == [0]
    # Nothing was renewed: the index in use is as good as a fresh one.
    assert results["runs"]["frozen"]["live"] == results["runs"]["frozen"]["fresh"]
    place = folder / "seed-0" / "after-frozen"
    assert read_measured(place / "figures.json").keys() == set(MEASURES)
    lines = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(len(line["passages"]) == 5 for line in lines)
    assert results["runs"]["beside"]["gain_over_frozen"]["em"]["interval"] == [0.0, 0.0]
    assert "0 right of 6" in (place / "answers.html").read_text()
    shown = capsys.readouterr().out
    assert f"Everything lies in {folder}" in shown
    assert "frozen, fresh index" in shown
