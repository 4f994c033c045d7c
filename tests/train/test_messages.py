"""What a user reads when something is wrong: the thing, the place, what was got, what mends it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import NamedTuple

import pytest

from pixelrag import errors
from pixelrag.cli import main
from tests.distributed.rag_runs import flags
from tests.train import nursery
from tests.train.material import write_jsonl


class Case(NamedTuple):
    """How to provoke an error, and what its text must name: thing, place, got, remedy."""

    job: str
    words: list[str]
    names: list[str]


CASES = {
    "ConfigError": [
        Case(
            "contrastive", ["--optim.learning_rate=fast"],
            ["optim.learning_rate (--optim.learning_rate)", "got 'fast'", "a number above 0"],
        ),
        Case(
            "contrastive", ["--config=run.yaml"],
            ["batch.chunk_sise (run.yaml line 2)", "unknown option", "mean batch.chunk_size?"],
        ),
    ],
    "DataError": [
        Case(
            "contrastive", ["--data.train=bad.jsonl"],
            ["bad.jsonl:3: ", "neither passage nor chunk_path", 'it has "query"',
             "1 of 3 rows", "`data.bad_rows: skip` trains without them"],
        ),
        Case(
            "distill", ["--data.train=gone.jsonl"],
            ["gone.jsonl does not exist", "looked for in "],
        ),
    ],
    "ModelError": [
        Case(
            "contrastive", ["--model.name_or_path=models/gone/x"],
            ["model.name_or_path 'models/gone/x'", "no such folder", "Give a folder"],
        ),
        Case(
            "contrastive", ["--lora.enabled=true", "--lora.vision=all"],
            ["lora.vision is all", "BertModel has no vision tower", "set it none"],
        ),
    ],
    "CheckpointError": [
        Case(
            "contrastive", ["--checkpoint.init_from=empty"],
            ["checkpoint.init_from: empty", "no checkpoint (it has no COMPLETE)",
             "expected a checkpoint-<step>", "name it as the model instead"],
        ),
    ],
    "EngineError": [
        Case(
            "contrastive", ["--engine.device=cuda"],
            ["engine.device: got 'cuda'", "no CUDA device", "use auto or cpu"],
        ),
    ],
    "NonFiniteError": [
        Case(
            "contrastive", ["--optim.learning_rate=1e30", "--optim.max_grad_norm=null"],
            ["step 2: the loss is ", "train.jsonl:", "no checkpoint is written",
             "there is none of an earlier step", "lower optim.learning_rate"],
        ),
    ],
    "IndexError_": [
        Case(
            "rag", ["--index.factory=Nonsense"],
            ["index.factory 'Nonsense' for 16 vectors of 16", "could not parse",
             "such as Flat, HNSW32"],
        ),
        Case(
            "rag", ["--index.start_from=empty"],
            ["index.start_from empty", "no manifest.json", "`pixelrag index`", "leave it out"],
        ),
    ],
    "ProvenanceError": [
        Case("inspect", ["empty"], ["empty: not an artifact", "none of COMPLETE", "a checkpoint,"]),
        Case(
            "distill", ["--teacher.source=cache", "--teacher.path=empty",
                        "--teacher.name_or_path=null"],
            ["teacher.path empty", "no manifest.json there", "`pixelrag cache-logits`"],
        ),
    ],
}  # fmt: skip
TABLE = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.fixture
def words_of(tmp_path, monkeypatch, base, lesson, shelf, library):
    """The command line of a job that would run, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    # The terminal of an earlier test is closed.
    monkeypatch.setattr(logging.getLogger("pixelrag"), "handlers", [])
    Path("empty").mkdir()
    Path("run.yaml").write_text("batch:\n  chunk_sise: 3\n")
    rows = [json.loads(line) for line in (shelf / "train.jsonl").read_text().splitlines()[:2]]
    write_jsonl(Path("bad.jsonl"), [*rows, {"query": "x"}])
    configs = {"contrastive": base | {"output_dir": "run"}, "distill": lesson}

    def _words(job: str) -> list[str]:
        if job == "rag":
            return [job, *flags(library, tmp_path / "run")]
        if job not in configs:
            return [job]
        Path(f"{job}.yaml").write_text(json.dumps(configs[job]))
        return [job, "--config", f"{job}.yaml"]

    return _words


def test_every_error_of_the_users_has_a_case():
    found = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PixelragError)
    }
    assert found - {"PixelragError"} == set(CASES)
    codes = [getattr(errors, name).exit_code for name in CASES]
    assert sorted(codes) == list(range(2, 2 + len(codes)))


@pytest.mark.parametrize(("name", "case"), TABLE, ids=[f"{n}-{c.words[0]}" for n, c in TABLE])
def test_the_message_says_what_where_and_what_mends_it(name, case, words_of, capsys):
    with nursery.warm_background():
        code = main([*words_of(case.job), *case.words])
    told = capsys.readouterr()
    assert code == getattr(errors, name).exit_code, told.err
    assert "Traceback" not in told.out + told.err
    message = told.err[told.err.rindex("pixelrag: error: ") :]
    missing = [words for words in case.names if words not in message]
    assert not missing, f"{missing} not in\n{message}"


@pytest.mark.parametrize(("name", "case"), [TABLE[0], TABLE[2]], ids=["config", "data"])
def test_debug_shows_where_it_comes_from(name, case, words_of):
    with pytest.raises(getattr(errors, name)):
        main([*words_of(case.job), *case.words, "--debug"])
