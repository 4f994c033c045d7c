"""What one run does step by step: its record, its learning rates, its batches."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pixelrag.config.contrastive import RetrieverOptimConfig
from pixelrag.config.parts import ModelConfig, OptimConfig
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.schema import Document
from pixelrag.errors import ConfigError
from pixelrag.models import load_embedder
from pixelrag.models.tower_parts import part_of
from pixelrag.train.optimizer import adamw
from tests.train import nursery
from tests.train.material import command, lines_of, merged, series, text_rows, write_jsonl

pytestmark = pytest.mark.distributed


@pytest.fixture
def run(tmp_path, base):
    """Runs a configuration to its end; returns its folder and what the ranks wrote."""

    def _run(name: str, *overrides: dict, nproc: int = 1, **options):
        config = merged(base, *overrides, {"output_dir": str(tmp_path / name)})
        ended = nursery.run(command(tmp_path, config), nproc=nproc, **options).check()
        return tmp_path / name, ended

    return _run


def test_what_a_run_leaves(run, shelf):
    data = {"data": {"eval": str(shelf / "eval.jsonl")}, "eval": {"every_steps": 2}}
    logging = {"logging": {"every_steps": 2}, "checkpoint": {"every_steps": 2}}
    folder, ended = run("whole", data, logging, {"optim": {"max_steps": 5}}, nproc=2)
    records = lines_of(folder)
    assert [(record["step"], "eval/loss" in record) for record in records] == [
        *[(2, False), (2, True), (4, False), (4, True)],
        *[(5, False), (5, True)],
    ]
    raw = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, third = raw[0], raw[2]
    assert first.keys() - third.keys() == set()
    assert third.keys() >= {
        *("step", "train/loss", "train/accuracy", "train/grad_norm", "train/lr"),
        *("train/temperature", "perf/rows_per_second", "perf/tokens_per_second"),
        *("perf/step_seconds", "mem/peak_gib"),
    }
    assert raw[1].keys() == {
        *("step", "eval/loss", "eval/accuracy", "eval/recall@1", "eval/recall@5"),
        *("eval/recall@10", "eval/mrr", "eval/ndcg@10"),
    }
    assert first["train/temperature"] == pytest.approx(0.07, rel=0.01)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("best", "checkpoint-2", "checkpoint-4", "checkpoint-5", "config.yaml", "last"),
        *("logs", "metrics.jsonl", "run_id", "summary.json"),
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 5
    assert summary["world_size"] == 2
    assert summary["final"] == {k: v for k, v in records[-1].items() if k != "step"}
    best = max(record["eval/ndcg@10"] for record in records if "eval/loss" in record)
    assert summary["best"] == {"eval/ndcg@10": best}
    assert summary["versions"]["torch"]
    assert f"done: the model is in {folder / 'best'} and in {folder / 'last'}" in ended.outputs[0]
    # Lines of progress, on rank 0 alone.
    assert re.findall(r"^step (\d)/5  loss", ended.outputs[0], re.MULTILINE) == ["2", "4", "5"]
    assert "16 rows (8 a rank x 2 ranks x 1 accumulated) in chunks of 3" in ended.outputs[0]
    assert ended.outputs[1] == ""


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_first_step_is_that_of_a_plain_full_batch(run, shelf, nproc):
    """One row at a time in float64, the whole batch in one graph, hard negatives of any number."""
    folder, _ = run("first", {"batch": {"per_device_batch_size": 8 // nproc}}, nproc=nproc)
    loss, accuracy, norm = _plain_step(shelf, GlobalBatchSampler(26, 8).global_batch(0))
    first = lines_of(folder)[0]
    assert first["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert first["train/accuracy"] == pytest.approx(accuracy)
    assert first["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def _plain_step(shelf: Path, indices: Iterable[int]) -> tuple[float, float, float]:
    """Loss, accuracy and gradient norm of the untrained model on these rows of train.jsonl."""
    model = ModelConfig(name_or_path=str(shelf / "bert"))
    embedder, preprocessor = load_embedder(model, dtype=torch.float64)
    log_scale = torch.tensor(math.log(1 / 0.07), dtype=torch.float64, requires_grad=True)
    lines = (shelf / "train.jsonl").read_text().splitlines()
    rows = [json.loads(lines[index]) for index in indices]
    texts = [text for row in rows for text in (row["passage"], *row.get("neg_passages", []))]
    assert len(texts) > len(rows), "no hard negative among these rows"
    query = torch.cat([embedder(**preprocessor.queries([row["query"]])) for row in rows])
    documents = [Document.of_text(text) for text in texts]
    passage = torch.cat([embedder(**preprocessor.documents([text])) for text in documents])
    logits = query @ passage.T * log_scale.exp()
    target = torch.tensor([texts.index(row["passage"]) for row in rows])
    loss = torch.nn.functional.cross_entropy(logits, target)
    loss.backward()
    gradients = [p.grad for p in (*embedder.parameters(), log_scale) if p.grad is not None]
    norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
    loss = loss.detach()
    return float(loss), float((logits.argmax(1) == target).double().mean()), norm


def test_kept_graphs_change_no_bit_of_a_run(run):
    lines = []
    for replay in ("all", "auto"):
        options = {"batch": {"replay": replay}, "optim": {"max_steps": 3}}
        folder, ended = run(replay, options, {"logging": {"every_steps": 1}})
        lines.append(lines_of(folder))
        assert ("batch.replay auto: keeps the graphs of" in ended.outputs[0]) == (replay == "auto")
    counts = [line.pop("replay/kept_chunks") for line in lines[1]]
    assert counts[0] == 0 < min(counts[1:])  # the first step weighs the graphs
    assert lines[0] == lines[1]


def test_a_line_is_the_mean_of_its_steps(run):
    each, _ = run("each", {"logging": {"every_steps": 1}})
    pairs, _ = run("pairs", {"logging": {"every_steps": 2}})
    losses = series(each, "train/loss")
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert series(pairs, "train/loss") == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (
            {"scheduler": "cosine", "warmup_steps": 2},
            [1 / 3, 2 / 3] + [0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(4)],
        ),
        (
            {"scheduler": "linear", "warmup_steps": None, "warmup_ratio": 0.3},
            [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25],
        ),
        ({"scheduler": "constant", "warmup_steps": 0}, [1.0] * 6),
    ],
)
def test_learning_rates(run, optim, expected):
    folder, _ = run("rates", {"optim": {**optim, "max_steps": 6, "learning_rate": 2e-4}})
    assert series(folder, "train/lr") == pytest.approx([2e-4 * x for x in expected], rel=1e-12)


def test_parts_have_rates_of_their_own(run):
    """On the schedule, logged, and in the first step's way, which AdamW makes the rate itself."""
    rates = {"learning_rate": 1e-3, "temperature_learning_rate": 4e-3}
    optim = {**rates, "weight_decay": 0, "warmup_steps": 1, "max_steps": 3}
    folder, _ = run("parts", {"optim": optim, "checkpoint": {"every_steps": 1}})
    factors = [0.5, 1.0, 0.5]
    assert series(folder, "train/lr") == pytest.approx([1e-3 * x for x in factors])
    assert series(folder, "train/lr/temperature") == pytest.approx([4e-3 * x for x in factors])
    first = load_file(folder / "checkpoint-1" / "model.safetensors")
    log_scale = float(first["logit_scale.log_scale"])
    assert abs(log_scale - math.log(1 / 0.07)) == pytest.approx(4e-3 / 2, rel=1e-3)


def test_a_rate_of_what_is_not_trained_is_an_error():
    named = [("encoder.layer.weight", torch.nn.Parameter(torch.ones(2, 2)))]
    config = RetrieverOptimConfig(vision_learning_rate=1e-5)
    with pytest.raises(ConfigError, match=r"optim\.vision_learning_rate: nothing of that part"):
        adamw(config, part_of)(named)
    config = RetrieverOptimConfig(text_learning_rate=1e-5)
    optimizer = adamw(config, part_of)(named)
    assert [group["part"] for group in optimizer.param_groups] == ["text"]
    adamw(RetrieverOptimConfig(vision_learning_rate=1e-5))(named)  # nobody asks for parts


def test_weight_decay_spares_vectors():
    """Norms, biases and the temperature are not pulled to zero."""
    parameters = [(str(n), torch.nn.Parameter(torch.ones([2] * n))) for n in (1, 2, 3)]
    optimizer = adamw(OptimConfig(learning_rate=1e-9, weight_decay=1e8))(parameters)
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = [float(parameter.detach().mean()) for _, parameter in parameters]
    assert values == pytest.approx([1.0, 0.9, 0.9])


def test_the_learning_rate_acts(run):
    """A step at a rate of nearly nothing leaves the weights; one at a real rate does not."""
    still, _ = run("still", {"optim": {"learning_rate": 1e-12, "max_steps": 1, "warmup_steps": 0}})
    moved, _ = run("moved", {"optim": {"learning_rate": 1e-3, "max_steps": 1, "warmup_steps": 0}})
    before = load_file(still / "checkpoint-1" / "model.safetensors")
    after = load_file(moved / "checkpoint-1" / "model.safetensors")
    changed = max(float((after[name] - before[name]).abs().max()) for name in before)
    # AdamW's first step is the learning rate itself, and a little weight decay.
    assert changed == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        # 26 rows in batches of 8: 4 batches an epoch, the last of 2 rows.
        ({"optim": {"num_epochs": 2}}, 8),
        ({"optim": {"num_epochs": 0.5}}, 2),
        ({"optim": {"num_epochs": 2}, "data": {"drop_last": True}}, 6),
        ({"optim": {"num_epochs": 2}, "batch": {"gradient_accumulation_steps": 3}}, 3),
        # 2.2 times 25 batches is 55.00000000000001 in floating point.
        ({"optim": {"num_epochs": 2.2}, "batch": {"per_device_batch_size": 1}, "rows": 25}, 55),
    ],
)
def test_epochs(run, tmp_path, overrides, steps):
    overrides = merged({"optim": {"max_steps": None}}, overrides)
    if rows := overrides.pop("rows", None):
        path = write_jsonl(tmp_path / "rows.jsonl", text_rows(rows))
        overrides = merged({"data": {"train": path}}, overrides)
    folder, _ = run("epochs", overrides)
    assert len(series(folder, "train/loss")) == steps
    assert (folder / f"checkpoint-{steps}").is_dir()


def test_accumulation_is_the_mean_of_its_batches(run, tmp_path):
    """Each global batch is the whole data, so three of them give the gradient of one."""
    data = {"data": {"train": write_jsonl(tmp_path / "eight.jsonl", text_rows(8))}}
    two_steps = {"optim": {"max_steps": 2}}
    one, _ = run("one", data, two_steps)
    for nproc, engine in ((1, "ddp"), (2, "zero2"), (2, "fsdp2")):
        accumulated = {
            "batch": {"gradient_accumulation_steps": 3, "per_device_batch_size": 8 // nproc},
            "engine": {"name": engine},
        }
        many, _ = run(f"many-{engine}", data, two_steps, accumulated, nproc=nproc)
        for name in ("train/loss", "train/grad_norm", "train/temperature"):
            assert series(many, name) == pytest.approx(series(one, name), rel=1e-5), name


def test_accumulated_batches_have_their_own_negatives(run):
    """The loss of two batches of four is not that of one batch of eight."""
    whole, _ = run("eight")
    halves = {"batch": {"per_device_batch_size": 4, "gradient_accumulation_steps": 2}}
    halved, _ = run("four", halves)
    assert series(halved, "train/loss")[0] < 0.95 * series(whole, "train/loss")[0]


def test_workers_prepare_the_same_batches(run):
    alone, _ = run("alone", {"optim": {"max_steps": 6}})
    helped, _ = run("helped", {"optim": {"max_steps": 6}, "data": {"num_workers": 2}})
    assert lines_of(helped) == lines_of(alone)


def test_unequal_last_batches(run, tmp_path):
    """13 rows in batches of 6 on 3 ranks: the last batch has one row, two ranks have none."""
    data = {"data": {"train": write_jsonl(tmp_path / "rows.jsonl", text_rows(13))}}
    epochs = {"optim": {"max_steps": None, "num_epochs": 1.3}}
    alone, _ = run("alone", data, epochs, {"batch": {"per_device_batch_size": 6}})
    assert len(series(alone, "train/loss")) == 4  # 6, 6, 1 and again 6 rows
    for engine in ("ddp", "zero3", "fsdp2"):
        split = {"engine": {"name": engine}, "batch": {"per_device_batch_size": 2, "chunk_size": 1}}
        three, _ = run(engine, data, epochs, split, nproc=3)
        for name in ("train/loss", "train/grad_norm", "train/accuracy"):
            expected = series(alone, name)
            assert series(three, name) == pytest.approx(expected, rel=2e-5, abs=1e-6), name


def test_dropout_draws_anew_each_step_and_for_each_seed(run, shelf, tmp_path):
    """At a learning rate of nothing, on one batch whose rows have a fixed order, by length."""
    rows = [{"query": "sort " * n, "passage": "list " * n} for n in range(1, 5)]
    settings = {
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {"train": write_jsonl(tmp_path / "four.jsonl", rows)},
        "batch": {"per_device_batch_size": 4},
        "optim": {"learning_rate": 1e-30, "max_steps": 3},
    }
    without, _ = run("without", settings, {"model": {"name_or_path": str(shelf / "bert")}})
    assert len(set(series(without, "train/loss"))) == 1, "something else than dropout differs"
    folder, _ = run("dropout", settings)
    losses = series(folder, "train/loss")
    assert len(set(losses)) == 3
    again, _ = run("again", settings)
    assert series(again, "train/loss") == losses
    other, _ = run("other", settings, {"seed": 2**32 - 1})
    assert not set(series(other, "train/loss")) & set(losses)


def test_dropout_differs_between_ranks(run, shelf, tmp_path):
    """Two equal rows, one a rank: equal draws would give equal vectors, and a loss of ln 2."""
    rows = [{"query": "sort", "passage": "list"}] * 2
    settings = {
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {"train": write_jsonl(tmp_path / "two.jsonl", rows)},
        "batch": {"per_device_batch_size": 1},
        "optim": {"max_steps": 1, "warmup_steps": 0},
    }
    folder, _ = run("ranks", settings, nproc=2)
    assert abs(series(folder, "train/loss")[0] - math.log(2)) > 1e-3


def test_rows_with_faults_are_skipped_when_told_to(run, tmp_path):
    rows = [*text_rows(9), {"query": "", "passage": "x"}]
    data = {"data": {"train": write_jsonl(tmp_path / "bad.jsonl", rows), "bad_rows": "skip"}}
    folder, ended = run("skip", data, nproc=2)
    assert "1 of 10 rows cannot be used" in ended.outputs[0]
    assert "9 rows; a step sees" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert len(series(folder, "train/loss")) == 4


def test_a_run_without_held_out_rows_names_no_best_model(run):
    """And of fewer rows than a batch, an epoch is a batch."""
    folder, ended = run(
        "small", {"optim": {"max_steps": 2}}, {"batch": {"per_device_batch_size": 64}}
    )
    assert f"done: the model is in {folder / 'last'}\n" in ended.outputs[0]
    assert not (folder / "best").exists()
    assert "26 rows; a step sees 26 rows" in ended.outputs[0]
    assert "2 steps, 2.00 epochs" in ended.outputs[0]


def test_a_fresh_run_keeps_the_figures_of_an_older_one(run):
    """Without a checkpoint there is nothing to resume; the older record is not lost."""
    settings = {"optim": {"max_steps": 1, "warmup_steps": 0}}
    folder, _ = run("twice", settings)
    first = (folder / "metrics.jsonl").read_text()
    for path in folder.glob("checkpoint-*"):
        path.rename(folder.parent / path.name)
    run("twice", settings)
    assert (folder / "metrics.1.jsonl").read_text() == first


def test_config_yaml_runs_the_same_again(run, tmp_path):
    folder, _ = run("first")
    again = ["contrastive", "--config", str(folder / "config.yaml")]
    nursery.run([*again, "--output_dir", str(tmp_path / "second")]).check()
    assert lines_of(tmp_path / "second") == lines_of(folder)


def test_a_bar_shows_where_the_run_stands(run):
    _, ended = run("bar", {"logging": {"progress": "on"}})
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ended.outputs[0])
    assert "step 4/4" in plain
    assert "loss" in plain.rsplit("step 4/4", 1)[1]
    assert not re.search(r"^step 1/4  loss", plain, re.MULTILINE)
