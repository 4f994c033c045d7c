"""The RAG job: refreshes at pinned steps, resumed runs, engines, and what is exported."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from pixelrag import cli
from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.models import load_embedder
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.generations import Generations
from pixelrag.train.build_index import build
from tests.distributed.harness import Results, run_alone, run_cases
from tests.distributed.rag_runs import flags, make_material
from tests.ray_cluster import ray_cluster

pytestmark = pytest.mark.distributed

RUN = "tests.distributed.rag_runs:run"
PINNED = [
    "--refresh.every_steps=2",
    "--refresh.deterministic_lag=1",
    "--retrieval.over_retrieve=6",
]
ALONE = {
    "whole": {"flags": PINNED},
    "resumed": {"flags": PINNED, "stop_at": 2},
    # A frozen document encoder needs no second generation.
    "decoder": {
        "flags": [
            "--train=question,generator",
            "--loss.retriever=loop",
            "--loss.contrastive_weight=0.5",
            "--generator_lora.enabled=true",
            "--encoder_lora.enabled=true",
        ],
        "generator": "decoder",
        "apart": True,
    },
}
CLUSTER = ["--refresh.workers=ray", "--index.holders=ray"]
PAIR = {"fsdp2": {"flags": [*PINNED, "--engine.name=fsdp2", "--index.num_shards=2"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rag")
    make_material(root)
    return root


def _named(cases: dict[str, dict], folder: Path, start: str) -> dict[str, dict]:
    named = {}
    for name, case in cases.items():
        flags = list(case.get("flags", []))
        if "generator" in case:
            flags.append(f"--generator.name_or_path={folder / case['generator']}")
        if case.get("apart"):
            flags.append(f"--document_encoder.name_or_path={folder / 'passages'}")
        named[name] = {"folder": str(folder), "name": f"{start}-{name}", "flags": flags}
        named[name] |= {key: case[key] for key in ("stop_at",) if key in case}
    return named


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Results]:
    with ray_cluster() as address:
        there = {"there": {"flags": [*PINNED, *CLUSTER, f"--ray.address={address}"]}}
        yield run_alone(RUN, _named(ALONE | there, folder, "alone"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Generation:
    """What `pixelrag index` makes of the runs' configuration."""
    return build(load(RagConfig, flags(folder, folder / "run-index"))[0], folder / "served")


@pytest.fixture(scope="module")
def pair(folder: Path, served: Generation) -> Results:
    cases = _named(PAIR, folder, "pair")
    cases["fsdp2"]["flags"].append(f"--index.start_from={folder / 'served'}")
    return run_cases(RUN, cases, nproc=2, timeout_seconds=580, collective_timeout_seconds=300)


def test_a_generation_is_used_at_its_pinned_step(alone: Results):
    found = alone["whole"][0]
    events = [(event["step"], event["kind"]) for event in found["history"]]
    assert events == [(0, "start"), (0, "switch"), (2, "start"), (3, "switch")]
    # As of the end of each step: the second generation is of step 2 and used in the fourth.
    assert found["steps"]["index/age_steps"] == [1, 2, 3, 2]


def test_a_resumed_run_is_the_uninterrupted_one(alone: Results):
    whole, resumed = alone["whole"][0], alone["resumed"][0]
    assert resumed["parameters"] == whole["parameters"]
    assert resumed["steps"] == whole["steps"]
    assert resumed["history"] == whole["history"]
    assert resumed["eval"] == whole["eval"]


def test_a_run_with_a_cluster_is_the_run_without(alone: Results):
    whole, there = alone["whole"][0], alone["there"][0]
    assert there["history"] == whole["history"]
    assert there["steps"] == whole["steps"]
    assert there["parameters"] == whole["parameters"]


def test_two_ranks_do_what_one_does(alone: Results, pair: Results):
    expected = alone["whole"][0]
    for got in pair["fsdp2"]:
        assert got["history"] == expected["history"]
        assert got["steps"]["index/age_steps"] == expected["steps"]["index/age_steps"]
        for figure in ("train/loss", "train/grad_norm", "train/posterior_entropy"):
            # The first step shows the gradient; later ones what AdamW makes of its rounding.
            limits = (1e-5, 1e-3, 1e-2, 3e-2)
            pairs = zip(got["steps"][figure], expected["steps"][figure], limits, strict=True)
            for value, wanted, limit in pairs:
                assert abs(value - wanted) <= limit * abs(wanted), figure
        assert got["eval"].keys() == expected["eval"].keys()


def test_every_form_trains(alone: Results):
    got = alone["decoder"][0]
    assert len(got["steps"]["train/loss"]) == 4
    assert got["exported"] == ["document_encoder", "generator", "question_encoder"]
    assert [event["kind"] for event in got["history"]] == ["start", "switch"]


def test_the_training_encodes_what_is_indexed(alone: Results, folder: Path):
    """At lag 0 the same vectors, for every generation: they are compared before it is used."""
    for run in ("whole", "decoder"):
        assert alone[run]
        generations = Generations(folder / f"run-alone-{run}" / "index")
        assert generations.numbers()
        for number in generations.numbers():
            assert 0 <= generations.open(number).manifest.validation["training_parity"] < 1e-5


def test_an_index_without_training_is_the_first_of_a_run(
    alone: Results, folder: Path, served: Generation
):
    assert alone["whole"]
    first = Generations(folder / "run-alone-whole" / "index").open(1)
    assert served.path == folder / "served" / "gen-000001"
    assert served.manifest.files == first.manifest.files
    assert served.manifest.fingerprints == first.manifest.fingerprints


def test_a_run_starts_from_it(pair: Results, folder: Path, served: Generation):
    assert pair["fsdp2"]
    first = Generations(folder / "run-pair-fsdp2" / "index").open(1).manifest
    assert first.validation["vectors from"] == str(served.path)
    assert first.files["vectors.npy"] == served.manifest.files["vectors.npy"]
    assert len(first.index_files) == 2  # of its own


def test_exports_load(alone: Results, folder: Path):
    assert alone["whole"][0]["exported"] == ["generator", "question_encoder"]
    last = folder / "run-alone-whole" / "last"
    model = AutoModelForSeq2SeqLM.from_pretrained(last / "generator")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    encoder, prepare = load_embedder(EncoderConfig(name_or_path=str(last / "question_encoder")))
    first, _ = load_embedder(EncoderConfig(name_or_path=str(folder / "questions")))
    batch = prepare.queries(["what is the fox"])
    assert not torch.allclose(encoder(**batch), first(**batch))


def test_what_was_exported_is_evaluated(alone: Results, folder: Path, tmp_path: Path, capsys):
    """At the end the index in use lags by a step, so that only what is of the format is equal."""
    run = folder / "run-alone-whole"
    flags = [
        f"--question_encoder.name_or_path={run / 'last' / 'question_encoder'}",
        f"--generator.name_or_path={run / 'last' / 'generator'}",
        f"--output_dir={tmp_path / 'work'}",
        f"--answers={tmp_path / 'answers'}",
        f"--output={tmp_path / 'figures.json'}",
    ]
    assert cli.main(["eval", "rag", "--config", str(run / "config.yaml"), *flags]) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    assert f"eval/em          {written['figures']['eval/em']:.4f}" in capsys.readouterr().out
    assert set(written["figures"]) == {k for k in alone["whole"][0]["eval"] if "eval/" in k}
    lines = [json.loads(x) for x in (tmp_path / "answers/answers.jsonl").read_text().splitlines()]
    assert [line["written"] for line in lines] == [one["answer"] for one in written["answers"]]
    found = [any(hit["gold"] for hit in line["passages"][:5]) for line in lines]
    assert found == written["per_query"]["recall@5"]
    assert "7 held-out questions" in (tmp_path / "answers/answers.html").read_text()
    assert not (tmp_path / "work" / "eval").exists()
