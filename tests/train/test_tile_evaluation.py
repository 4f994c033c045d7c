"""Questions about tiles during and after a training, and their answers."""

import json

import numpy as np
import pytest
import torch

from tests.train import nursery
from tests.train.material import command, lines_of, merged
from tests.unit.test_chat_api import Stub, said

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def questions(shelf):
    """Twelve tiles of six articles, nine questions; the first article is asked for twice."""
    folder = shelf / "articles"
    folder.mkdir()
    for i in range(12):
        tile = (shelf / "tiles" / f"{i}.png").read_bytes()
        (folder / f"page{i // 2}_chunk_{i % 2}.png").write_bytes(tile)
    entries = [
        {"id": i, "problem": f"a picture of tile {i}", "answer": f"answer {i}"} for i in range(9)
    ]
    golden = {str(i): [f"page{i // 2}"] for i in range(8)} | {"8": ["page0", "page5"]}
    content = {"tiles_dir": str(folder), "questions": entries, "golden_mapping": golden}
    path = shelf / "questions.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def settings(base, shelf, questions, tmp_path):
    return merged(
        base,
        {
            "output_dir": str(tmp_path / "run"),
            "model": {"name_or_path": str(shelf / "qwen3_vl")},
            "data": {"train": str(shelf / "mixed.jsonl")},
            "batch": {"per_device_batch_size": 3},
            "optim": {"max_steps": 2, "warmup_steps": 0},
            "eval": {"miniv8": str(questions), "every_steps": 1, "batch_size": 4},
            "checkpoint": {"best_metric": "miniv8/mrr"},
        },
    )


@torch.no_grad()
def _naive(model, questions):
    """Figures by loops and sorting, with the exported model, one row at a time."""
    from pixelrag.config.parts import ModelConfig
    from pixelrag.data.schema import Document
    from pixelrag.models import load_embedder

    embedder, prepare = load_embedder(ModelConfig(name_or_path=str(model)))
    embedder.eval()
    content = json.loads(questions.read_text())
    tiles = sorted((questions.parent / "articles").iterdir())
    vectors = [embedder(**prepare.documents([Document.of_image(t)]))[0].double() for t in tiles]
    ranks = []
    for question in content["questions"]:
        query = embedder(**prepare.queries([question["problem"]]))[0].double()
        order = sorted(range(12), key=lambda i: -float(query @ vectors[i]))
        golden = content["golden_mapping"][str(question["id"])]
        hits = [tiles[i].name.split("_chunk_")[0] in golden for i in order]
        ranks.append(hits.index(True) + 1)
    figures = {f"miniv8/hit@{k}": np.mean([rank <= k for rank in ranks]) for k in (1, 5, 10)}
    return figures | {"miniv8/mrr": np.mean([1 / rank for rank in ranks])}


def test_hits_during_a_training_are_those_of_a_plain_search(settings, questions, tmp_path):
    nursery.run(command(tmp_path, settings), nproc=2).check()
    records = [r for r in lines_of(tmp_path / "run") if "miniv8/mrr" in r]
    assert [record["step"] for record in records] == [1, 2]
    expected = _naive(tmp_path / "run" / "last", questions)
    assert {k: v for k, v in records[-1].items() if k != "step"} == pytest.approx(expected)
    assert 0 < expected["miniv8/mrr"] < 1
    assert (tmp_path / "run" / "best").is_dir()
    assert not any("eval/loss" in record for record in records)


@pytest.fixture
def stub():
    server = Stub()
    yield server
    server.close()


def _answering(settings, stub, **options):
    names = {"reader_url": stub.url, "reader_model": "r", "grader_url": stub.url}
    return merged(settings, {"eval": names | {"grader_model": "g", **options}})


def test_questions_are_answered_graded_and_compared(settings, stub, tmp_path):
    """Question 3 gets no reply at all: it is a failure, and the other eight make the accuracy."""

    def behave(request, _):
        content = request["messages"][0]["content"]
        if request["model"] == "r":
            number = content[-1]["text"].rsplit(" ", 1)[1]
            return (400, b"no", {}) if number == "3" else (200, said(f"answer {number}"), {})
        return 200, said("A" if "answer 2\nAnswer" not in content else "B"), {}

    stub.behave = behave
    config = _answering(settings, stub, reader_tiles=2, max_questions=8)
    out = tmp_path / "out.json"
    words = [*command(tmp_path, config, "eval"), "--output", str(out)]
    ended = nursery.run(words, nproc=2).check()
    written = json.loads(out.read_text())
    figures = written["figures"]
    assert figures["miniv8/qa_failed"] == pytest.approx(1 / 8)
    assert figures["miniv8/qa_accuracy"] == pytest.approx(6 / 7)
    assert [a["grade"] for a in written["answers"]] == [
        *("correct", "correct", "incorrect", "failed"), *["correct"] * 4
    ]  # fmt: skip
    assert "1 of 8 questions were not answered and judged" in ended.text
    readers = [r["messages"][0]["content"] for r in stub.requests if r["model"] == "r"]
    assert len(readers) == 8
    assert all(len(parts) == 3 for parts in readers), "two tiles and the question"
    before = len(stub.requests)
    words += ["--baseline", str(out), "--eval.reader_url", "null", "--eval.reader_model", "null"]
    words += ["--eval.grader_url", "null", "--eval.grader_model", "null"]
    words += ["--eval.reader_tiles", "3"]
    assert "miniv8, paired over 8 queries:" in nursery.run(words).check().text
    assert len(stub.requests) == before


def test_a_reader_that_is_gone_ends_no_training(settings, tmp_path):
    stub = Stub()
    stub.close()
    config = _answering(settings, stub)
    ended = nursery.run(command(tmp_path, config), setup="tests.train.faults:no_pauses").check()
    record = [r for r in lines_of(tmp_path / "run") if "miniv8/qa_failed" in r][-1]
    assert record["miniv8/qa_failed"] == 1.0
    assert "miniv8/qa_accuracy" not in record
    assert "ConnectError" in ended.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": {"miniv8": None}}, "eval.every_steps 1 without data.eval"),
        ({"checkpoint": {"best_metric": "eval/mrr"}}, "eval/mrr without data.eval"),
        ({"eval": {"reader_url": "http://h/v1"}}, "eval.reader_url without eval.reader_model"),
        ({"eval": {"reader_url": "http://u:p@h"}}, "a URL without a name or password in it"),
        ({"eval": {"reader_tiles": 5}}, "eval.reader_tiles 5 without eval.reader_url"),
        ({"eval": {"miniv8": None, "max_questions": 5}}, "max_questions 5 without eval.miniv8"),
    ],
)
def test_settings_that_contradict_are_refused(settings, tmp_path, changes, message):
    ended = nursery.run(command(tmp_path, merged(settings, changes)))
    assert ended.codes == [2]
    assert message in ended.text


def test_a_text_model_is_refused(settings, shelf, tmp_path):
    text = {"model": {"name_or_path": str(shelf / "bert")}}
    text["data"] = {"train": str(shelf / "train.jsonl")}
    ended = nursery.run(command(tmp_path, merged(settings, text)))
    assert ended.codes == [3]
    assert "eval.miniv8 names tiles, but the model reads text only" in ended.text
