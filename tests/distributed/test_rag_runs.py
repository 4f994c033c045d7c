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
from tests.train import nursery

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

RUN = "tests.distributed.rag_runs:run"
PINNED = [
    "--refresh.every_steps=2",
    "--refresh.deterministic_lag=1",
    "--retrieval.over_retrieve=6",
    "--eval.fresh_index=true",
]
TILES = {"generator": "vision", "passages": "mixed"}
SUBSETS = ("question", "document", "generator")
STALE = ["--refresh.max_staleness=2", "--refresh.every_steps=3", "--refresh.final_refresh=skip"]
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
    "fid": {
        "flags": [
            "--loss.answer=fid",
            "--loss.retriever=adist",
            "--loss.label_smoothing=0.1",
            "--refresh.every_steps=3",
        ],
        "served": True,
    },
    "drift": {
        "flags": [
            "--refresh.trigger=drift",
            "--refresh.every_steps=1",
            "--refresh.drift_threshold=0.0015",
            "--refresh.deterministic_lag=0",
            "--loss.retriever=adist",
        ],
        "generator": "decoder",
        "served": True,
    },
    "warn": {"flags": STALE, "served": True},
    "stop": {
        "flags": [*STALE, "--refresh.every_steps=9", "--refresh.on_stale=stop"],
        "served": True,
        "raises": True,
    },
    # Where "stop" ended before its first checkpoint.
    "again": {"flags": ["--optim.max_steps=1"], "there": "stop"},
    **{
        part: {
            "flags": [
                f"--train={part}",
                "--loss.label_smoothing=0.1",
                "--loss.answer=rag_token",
                "--optim.max_steps=1",
            ],
            "apart": True,
        }
        for part in SUBSETS
    },
    # Encoders to which all texts are alike.
    "dpr": {
        "flags": ["--loss.temperature=1", "--optim.max_steps=1"],
        "encoders": ("dpr_question", "dpr_passage"),
    },
    "tiles": {
        "flags": ["--loss.retriever=adist", "--optim.max_steps=1"],
        "encoders": ("vision",),
        **TILES,
    },
    "written": {"then": "written", **TILES},
}
SHARDED = ["--engine.params=sharded", "--engine.grad_sync=per_chunk"]
PAIR = {
    "fsdp2": {
        "flags": [*PINNED, "--engine.name=fsdp2", "--index.num_shards=2"],
        "served": True,
    },
    **{
        f"written {name}": {
            "then": "written",
            "flags": [f"--engine.name={name}", *SHARDED],
            **TILES,
        }
        for name in ("zero3", "fsdp2")
    },
}
CLUSTER = ["--refresh.workers=ray", "--index.holders=ray"]


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
        if "passages" in case:
            flags.append(f"--knowledge_base.source={folder / case['passages']}.jsonl")
        if "served" in case:
            flags.append(f"--index.start_from={folder / 'served'}")
        if "there" in case:
            flags.append(f"--output_dir={folder}/run-{start}-{case['there']}")
        encoders = case.get("encoders", ("questions", "passages") if case.get("apart") else ())
        for part, encoder in zip(("question", "document"), encoders, strict=False):
            flags.append(f"--{part}_encoder.name_or_path={folder / encoder}")
        shorthand = ("generator", "apart", "encoders", "passages", "served")
        other = {key: value for key, value in case.items() if key not in shorthand}
        named[name] = other | {"folder": str(folder), "name": f"{start}-{name}", "flags": flags}
    return named


@pytest.fixture(scope="module")
def alone(folder: Path, served: Generation) -> Iterator[Results]:
    with ray_cluster() as address:
        flags = [*PINNED, *CLUSTER, f"--ray.address={address}"]
        there = {"there": {"flags": flags, "served": True}}
        yield run_alone(RUN, _named(ALONE | there, folder, "alone"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Generation:
    """What `pixelrag index` makes of the runs' configuration."""
    config = load(RagConfig, flags(folder, folder / "run-index"))[0]
    with nursery.warm_background():
        return build(config, folder / "served")


@pytest.fixture(scope="module")
def pair(folder: Path, served: Generation) -> Results:
    cases = _named(PAIR, folder, "pair")
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


def test_drift_starts_a_refresh_and_its_lack_does_not(alone: Results):
    found = alone["drift"][0]
    moved = dict(enumerate(found["steps"]["index/drift"]))  # of the look before each step
    starts = [event["step"] for event in found["history"] if event["kind"] == "start"]
    assert starts == [0, *(step for step in (1, 2, 3) if moved[step] >= 0.0015)]
    assert 1 < len(starts) < 4, moved
    # Lag 0: in use before the next step is taken.
    switches = [event["step"] for event in found["history"] if event["kind"] == "switch"]
    assert switches == starts


def test_a_refresh_in_flight_at_the_end_is_waited_for_or_dropped(alone: Results):
    waited, skipped = alone["fid"][0], alone["warn"][0]
    assert waited["generations"] == ["gen-000001", "gen-000002"]
    assert [event["kind"] for event in skipped["history"]] == ["start", "switch", "start"]
    assert skipped["generations"] == ["gen-000001", "gen-000002.part"]


def test_a_stale_index_is_said_once_or_ends_the_run(alone: Results):
    said = [text for text in alone["warn"][0]["warnings"] if "steps old" in text]
    assert said == ["step 3: generation 1 is 3 steps old, more than refresh.max_staleness 2"]
    assert alone["stop"][0]["raised"].startswith("IndexError_: step 3: generation 1 is 3 steps old")


@pytest.mark.parametrize("part", SUBSETS)
def test_what_is_not_trained_does_not_change_in_any_bit(alone: Results, part: str):
    changed = alone[part][0]["changed"]
    assert changed == [part if part == "generator" else f"{part}_encoder"]
    assert alone["decoder"][0]["changed"] == ["generator", "question_encoder"]


def test_reading_all_passages_at_once_trains_and_answers(alone: Results):
    found = alone["fid"][0]
    assert len(found["steps"]["train/loss"]) == 4
    assert {"eval/em", "eval/f1"} <= found["eval"].keys()
    assert found["changed"] == ["generator", "question_encoder"]


def test_a_configuration_is_validated(alone: Results, folder: Path, capsys):
    run = folder / "run-alone-whole"
    part = f"--generator.name_or_path={run / 'last' / 'generator'}"
    command = ["validate", "--config", str(run / "config.yaml"), part]
    assert cli.main(command) == 0
    assert "16 passages of 16 documents" in capsys.readouterr().out
    # Every right answer is to be trained on.
    assert cli.main([*command, "--generator.target_max_length=4"]) == 3
    assert "train.jsonl:1: the answer 'it is brown' has 5 tokens" in capsys.readouterr().out
    assert cli.main([*command, "--generator.target_max_length=4", "--data.answers=first"]) == 0


def test_tiles_on_one_rank_alone_stop_nobody_from_writing(alone: Results, pair: Results):
    expected = alone["written"][0]["answers"]
    assert len(expected) == 7
    for name in ("written zero3", "written fsdp2"):
        assert [told["answers"] for told in pair[name]] == [expected] * 2


def test_questions_that_all_find_the_same_are_said_to(alone: Results):
    found = alone["dpr"][0]
    (said,) = [text for text in found["warnings"] if "collapsed" in text]
    assert said.startswith("step 0: whatever the 8 questions ask, they find the same few passages")
    assert not any("collapsed" in text for text in alone["fid"][0]["warnings"])
    assert found["changed"] == ["document_encoder", "generator", "question_encoder"]


def test_tiles_are_found_and_read(alone: Results):
    found = alone["tiles"][0]
    assert found["changed"] == ["generator", "question_encoder"]
    assert {"eval/em", "eval/recall@1"} <= found["eval"].keys()


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


def test_a_run_that_ended_before_its_first_checkpoint_encodes_nothing_again(
    alone: Results, folder: Path
):
    assert alone["again"][0]["generations"] == ["gen-000001", "gen-000002"]
    index = folder / "run-alone-stop" / "index"
    told = Generations(index).open(2).manifest.validation
    assert told["vectors from"] == str(index / "gen-000001")


def test_exports_load(alone: Results, folder: Path):
    for name in ("whole", "fid", "drift", "dpr"):
        assert alone[name][0]["exported_as_trained"], name
    assert alone["whole"][0]["exported"] == ["generator", "question_encoder"]
    last = folder / "run-alone-whole" / "last"
    model = AutoModelForSeq2SeqLM.from_pretrained(last / "generator")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    encoder, prepare = load_embedder(EncoderConfig(name_or_path=str(last / "question_encoder")))
    first, _ = load_embedder(EncoderConfig(name_or_path=str(folder / "questions")))
    batch = prepare.queries(["what is the fox"])
    assert not torch.allclose(encoder(**batch), first(**batch))


def test_what_was_exported_is_evaluated(alone: Results, folder: Path, tmp_path: Path, capsys):
    run = folder / "run-alone-whole"
    flags = [
        f"--question_encoder.name_or_path={run / 'last' / 'question_encoder'}",
        f"--generator.name_or_path={run / 'last' / 'generator'}",
        f"--output_dir={tmp_path / 'work'}",
        f"--answers={tmp_path / 'answers'}",
        f"--output={tmp_path / 'figures.json'}",
    ]
    with nursery.warm_background():
        assert cli.main(["eval", "rag", "--config", str(run / "config.yaml"), *flags]) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    told = capsys.readouterr().out
    assert f"eval/em          {written['figures']['eval/em']:.4f}" in told
    answers = tmp_path / "answers"
    assert f"\nwrote {tmp_path / 'figures.json'}\n" in told
    assert f"\nwrote {answers}/answers.jsonl and {answers}/answers.html\n" in told
    assert set(written["figures"]) == {k for k in alone["whole"][0]["eval"] if "eval/" in k}
    # At the end of the run the index in use lagged by a step.
    for k in (1, 5):
        expected = alone["whole"][0]["eval"][f"eval/fresh_recall@{k}"]
        assert written["figures"][f"eval/recall@{k}"] == expected
    lines = [json.loads(x) for x in (tmp_path / "answers/answers.jsonl").read_text().splitlines()]
    assert [line["written"] for line in lines] == [one["answer"] for one in written["answers"]]
    found = [any(hit["gold"] for hit in line["passages"][:5]) for line in lines]
    assert found == written["measured"]["eval"]["per_query"]["recall@5"]
    assert "7 held-out questions" in (tmp_path / "answers/answers.html").read_text()
    assert not (tmp_path / "work" / "eval").exists()
