"""`pixelrag eval` of a retriever: files for other tools, and a paired test against a baseline."""

import json

import pytest
import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.evaluate.compare import read_measured
from pixelrag.evaluate.runs import read_qrels
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.source import SETTINGS_FORMAT
from pixelrag.train.evaluate import _scale_and_bias
from pixelrag.train.export import export
from tests.train import nursery
from tests.train.material import command, merged, write_jsonl

pytestmark = pytest.mark.distributed


@pytest.fixture
def asked(tmp_path, base, shelf):
    """Runs `pixelrag eval` on the shelf's held-out rows with further flags."""

    def _run(*flags: str, nproc: int = 1, **sections):
        data = {"eval": str(shelf / "eval.jsonl")}
        config = merged(base, {"output_dir": str(tmp_path / "run"), "data": data}, sections)
        return nursery.run([*command(tmp_path, config, "eval"), *flags], nproc=nproc)

    return _run


def test_runs_qrels_and_results_agree(asked, tmp_path, shelf):
    corpus = [json.loads(line) for line in (shelf / "train.jsonl").read_text().splitlines()]
    corpus += [json.loads(line) for line in (shelf / "eval.jsonl").read_text().splitlines()]
    path = write_jsonl(
        tmp_path / "corpus.jsonl",
        [{"id": f"doc {i}", "text": row["passage"]} for i, row in enumerate(corpus)],
    )
    paths = {name: str(tmp_path / "out" / name) for name in ("run", "qrels", "all.json")}
    flags = ["--run-file", paths["run"], "--qrels-file", paths["qrels"]]
    asked(*flags, "--output", paths["all.json"], nproc=2, eval={"corpus": path}).check()
    written = json.loads((tmp_path / "out" / "all.json").read_text())
    rows = written["measured"]["eval"]
    assert rows["queries"] == [f"eval.jsonl:{i}" for i in range(1, 10)]
    qrels = read_qrels(tmp_path / "out" / "qrels")
    assert qrels["eval.jsonl:1"] == {"doc%2026"}
    judged = read_measured(tmp_path / "out" / "run", qrels)["eval"]
    for name, values in judged.per_query.items():
        assert values.tolist() == pytest.approx(rows["per_query"][name])
        assert written["figures"][f"eval/{name}"] == pytest.approx(values.mean())
    assert 0 < judged.per_query["mrr"].mean() < 1


def test_queries_that_were_trained_alone_keep_the_documents_of_their_base(tmp_path, base, shelf):
    """In training, in `pixelrag eval`, and after an export of the export."""
    held_out = {"data": {"eval": str(shelf / "eval.jsonl")}, "output_dir": str(tmp_path / "run")}
    fixed = {"train": ["query"], "loss": {"learnable_temperature": False}}
    config = merged(base, held_out, fixed)
    nursery.run(command(tmp_path, config), nproc=2).check()
    last = tmp_path / "run" / "last"
    settings = json.loads((last / "pixelrag.json").read_text())
    assert (settings["trained"], settings["document_encoder"]) == (
        ["query"],
        base["model"]["name_or_path"],
    )
    again = tmp_path / "again"
    export(last, "hf", again)
    assert (
        json.loads((again / "pixelrag.json").read_text())["document_encoder"]
        == settings["document_encoder"]
    )
    assert "**This model embeds queries only.**" in (again / "README.md").read_text()
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]
    out = tmp_path / "out.json"

    def loss() -> float:
        model = {"model": {"name_or_path": str(again)}}
        argv = command(tmp_path, merged(base, held_out, model), "eval")
        nursery.run([*argv, "--output", str(out)]).check()
        return json.loads(out.read_text())["figures"]["eval/loss"]

    assert loss() == pytest.approx(final["eval/loss"], rel=1e-5)
    # As if it embedded documents itself.
    (again / "pixelrag.json").write_text(json.dumps(settings | {"document_encoder": None}))
    assert loss() != pytest.approx(final["eval/loss"], rel=1e-3)


def test_a_baseline_may_be_a_model_or_an_earlier_result(asked, tmp_path, shelf):
    other = str(shelf / "qwen3_vl")
    asked("--output", str(tmp_path / "first.json"), "--model.name_or_path", other).check()
    ends = []
    for baseline in (other, str(tmp_path / "first.json")):
        out = tmp_path / "second.json"
        ended = asked("--baseline", baseline, "--output", str(out)).check()
        assert "eval, paired over 9 queries:" in ended.text
        ends.append(json.loads(out.read_text()))
    first = json.loads((tmp_path / "first.json").read_text())
    assert ends[0]["comparison"] == ends[1]["comparison"]
    mrr = ends[0]["comparison"]["eval"]["mrr"]
    assert mrr["baseline"] == pytest.approx(first["figures"]["eval/mrr"])
    assert mrr["value"] == pytest.approx(ends[0]["figures"]["eval/mrr"])
    assert mrr["baseline"] != mrr["value"]
    assert mrr["change"]["mean"] == pytest.approx(mrr["value"] - mrr["baseline"])
    assert mrr["change"]["low"] <= mrr["change"]["mean"] <= mrr["change"]["high"]


def test_a_baseline_that_is_not_there_is_named_by_its_flag(asked):
    ended = asked("--baseline", "/nowhere/model")
    assert ended.codes == [4]
    assert "--baseline '/nowhere/model': there is no such folder" in ended.text


def test_the_temperature_is_the_one_exported(tmp_path):
    config = ContrastiveConfig(
        model={"name_or_path": str(tmp_path)}, data={"train": ["t"]}, optim={"max_steps": 1},
        loss={"name": "siglip", "temperature": 0.2, "bias": -3.0},
    )  # fmt: skip
    container = BiEncoder(torch.nn.Linear(2, 2), temperature=0.2, bias=-3.0)

    def found() -> tuple[float, float]:
        scale, bias = _scale_and_bias(config, container)
        return 1 / float(scale), float(bias)

    assert found() == pytest.approx((0.2, -3.0)), "a model that brings none"
    settings = {"format": SETTINGS_FORMAT, "temperature": 0.05, "bias": -7.5}
    (tmp_path / "pixelrag.json").write_text(json.dumps(settings))
    assert found() == pytest.approx((0.05, -7.5))


def test_what_needs_a_ranking_is_refused_without_one(asked, tmp_path):
    ended = asked(
        "--run-file", "r", eval={"retrieval": False}, checkpoint={"best_metric": "eval/loss"}
    )
    assert ended.codes == [2]
    assert "--run_file: needs data.eval, and eval.retrieval true" in ended.text
