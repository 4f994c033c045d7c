"""Options of a distillation job that decide which tokens are learnt from, and how they come."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pixelrag.config.distill import DistillConfig
from pixelrag.data.packed_batch import PackedCollator
from pixelrag.data.text_data import load_texts
from pixelrag.distributed.env import process_group
from pixelrag.models import causal_load
from pixelrag.models import distill as model_distill
from pixelrag.models.causal_load import load_tokenizer, student_source, teacher_source
from pixelrag.models.distill import Supervision
from pixelrag.models.isolation import sample_rows
from pixelrag.train import distill
from pixelrag.train.distill_data import DistillData, plan_rows, reading_options, text_encoder
from pixelrag.train.distill_models import agree_on_models, open_teacher
from tests.train.material import merged, write_jsonl


@pytest.fixture
def planned(lesson):
    """The rows that a configuration makes, and its tokenizer."""

    def _planned(*overrides: dict) -> tuple[DistillData, object]:
        config = DistillConfig(**merged(lesson, *overrides))
        tokenizer = load_tokenizer(student_source(config.student))
        encoder = text_encoder(config, tokenizer)
        store, held_out = (
            load_texts(sources, encoder, **reading_options(config, draw=draw))[0]
            if sources
            else None
            for sources, draw in ((config.data.train, True), (config.data.eval, False))
        )
        return plan_rows(config, tokenizer, 0.0, store, held_out), tokenizer

    return _planned


def first_row(data: DistillData, tokenizer) -> tuple[list[int], int, int]:
    """Tokens, samples and targets of the first row that holds several samples."""
    epoch = data.train.epoch(0)
    row = next(r for r in range(data.train.num_rows) if len(epoch.row(r)) > 1)
    batch = PackedCollator(data.train, tokenizer.pad_token_id)(0, [row])
    return batch.input_ids[0].tolist(), len(epoch.row(row)), batch.num_supervised


@pytest.mark.parametrize(
    ("attention", "separator", "stands"),
    [
        ("isolated", "auto", False),
        ("isolated", "on", True),
        ("isolated", "off", False),
        ("concatenated", "auto", True),
        ("concatenated", "on", True),
        ("concatenated", "off", False),
    ],
)
def test_separators_stand_where_they_are_asked_for(planned, attention, separator, stands):
    packing = {"packing": {"attention": attention, "separator": separator}}
    # Texts end with an end token of their own; chats do not, but for that of each turn.
    data, tokenizer = planned(packing)
    ids, samples, _ = first_row(data, tokenizer)
    pairs = list(itertools.pairwise(ids))
    opening = tokenizer.convert_tokens_to_ids("<|im_start|>")
    between = pairs.count((tokenizer.eos_token_id, opening))
    assert between == (samples - 1 if stands else 0)
    # What is held out is measured alike in every run.
    assert data.held_out.settings.separator_id is None
    assert data.held_out.settings.attention == "isolated"


def test_the_first_token_of_a_sample_is_learnt_or_not(planned):
    whole = {"data": {"supervise": "all"}}
    counts = []
    for mask in (False, True):
        packing = {"packing": {"attention": "concatenated", "mask_first_token": mask}}
        data, tokenizer = planned(whole, packing)
        counts.append(first_row(data, tokenizer)[1:])
    (samples, plain), (same, masked) = counts
    assert (same, masked) == (samples, plain - (samples - 1))


def test_overlong_samples(planned):
    reports = {}
    for kind in ("truncate", "split", "drop"):
        data, _ = planned({"packing": {"length": 48, "overlong": kind}})
        reports[kind] = data.train.report
    whole = planned({"packing": {"length": 512}})[0].train.report
    assert reports["split"].num_supervised == whole.num_supervised
    assert reports["truncate"].num_samples == whole.num_samples
    assert reports["drop"].num_tokens < reports["truncate"].num_tokens < whole.num_tokens
    assert reports["drop"].num_pieces < whole.num_pieces < reports["split"].num_pieces


def test_a_row_a_sample_without_packing(planned):
    data, _ = planned({"packing": {"enabled": False}})
    assert data.train.num_rows == data.train.report.num_samples == 40
    assert planned()[0].train.num_rows < 40


def test_who_is_learnt_from(planned, lesson, tmp_path):
    turns = [("user", "a fox"), ("assistant", "jumps"), ("user", "why"), ("assistant", "so")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    alone = {"train": write_jsonl(tmp_path / "one.jsonl", [row]), "eval_samples": None}
    learnt = {}
    for kind in ("assistant", "last_assistant", "all"):
        data, tokenizer = planned({"data": {**alone, "supervise": kind}})
        tokens = data.train.store[0]
        learnt[kind] = tokenizer.decode(np.asarray(tokens.ids)[np.asarray(tokens.supervised)])
    assert learnt["last_assistant"] == "so<|im_end|>"
    assert learnt["assistant"] == "jumps<|im_end|>so<|im_end|>"
    assert "a fox" in learnt["all"]


def held_out(data: DistillData) -> set[str]:
    plan = data.held_out
    return {plan.store.sample_id(int(sample)) for sample in plan.pieces.samples}


def test_what_is_held_out_is_drawn_by_its_own_seed(planned):
    drawn = held_out(planned()[0])
    assert len(drawn) == 8
    assert held_out(planned({"seed": 3})[0]) == drawn
    assert held_out(planned({"data": {"split_seed": 26}})[0]) != drawn
    assert len(held_out(planned({"data": {"eval_samples": 5}})[0])) == 5


def test_caps_on_samples(planned, classroom):
    data, _ = planned({"data": {"max_samples": 20, "eval_samples": 4}})
    assert (len(data.train.store), data.train.report.num_samples) == (20, 16)
    data, _ = planned({"eval": {"max_samples": 3}})
    assert (len(held_out(data)), data.train.report.num_samples) == (3, 40)
    # data.max_samples is of data.train alone.
    both = {"max_samples": 20, "eval": str(classroom / "chats.jsonl"), "eval_samples": None}
    data, _ = planned({"data": both})
    assert (data.train.report.num_samples, len(held_out(data))) == (20, 48)


def test_how_datasets_are_read(lesson):
    data = {
        "split": "test", "streaming": True, "max_samples": 9, "stream_shuffle_seed": 3,
        "stream_shuffle_buffer": 17,
    }  # fmt: skip
    config = DistillConfig(**merged(lesson, {"data": data}))
    assert reading_options(config, draw=True) == {
        "split": "test", "max_samples": 9, "streaming": True, "shuffle_seed": 3,
        "shuffle_buffer": 17,
    }  # fmt: skip
    held = reading_options(config, draw=False)
    assert (held["split"], held["max_samples"], held["streaming"]) == ("test", None, False)


def test_options_of_a_run_reach_what_they_are_of(lesson, tmp_path, monkeypatch):
    seen = {}

    def watched(name):
        real = getattr(distill, name)

        def call(*arguments, **options):
            seen[name] = options
            return real(*arguments, **options)

        monkeypatch.setattr(distill, name, call)

    for name in ("load_steps", "load_student", "PackedCollator"):
        watched(name)
    config = DistillConfig(
        **merged(
            lesson,
            {"data": {"prefetch_factor": 3, "worker_timeout_seconds": 77, "eval_samples": None}},
            {"student": {"num_layers": 2, "random_init": True}, "seed": 11},
            {"optim": {"max_steps": 1, "warmup_steps": 0}, "checkpoint": {"save_optimizer": False}},
        )
    )
    with process_group("cpu", 60) as world:
        distill.train(config, world)
    assert seen["load_steps"] == {
        "num_workers": 0,
        "prefetch_factor": 3,
        "timeout_seconds": 77,
    }
    assert seen["load_student"]["seed"] == 11
    assert seen["PackedCollator"] == {"fixed_width": False}
    run = tmp_path / "run"
    assert json.loads((run / "last" / "config.json").read_text())["num_hidden_layers"] == 2
    assert not (run / "checkpoint-1" / "optimizer.safetensors").exists()
    assert (run / "checkpoint-1" / "model.safetensors").exists()
    assert not (run / "best").exists()


@pytest.mark.parametrize("trusted", ["student", "teacher", None])
def test_code_of_a_model_runs_only_where_that_model_is_trusted(lesson, monkeypatch, trusted):
    asked = set()
    for name in ("AutoConfig", "AutoTokenizer"):
        real = getattr(causal_load, name)

        class Asked(real):
            @classmethod
            def from_pretrained(cls, location, *arguments, **options):
                asked.add(
                    (Path(location).name, cls.__mro__[1].__name__, options["trust_remote_code"])
                )
                return cls.__mro__[1].from_pretrained(location, *arguments, **options)

        monkeypatch.setattr(causal_load, name, Asked)
    config = DistillConfig(
        **merged(lesson, {trusted: {"trust_remote_code": True}} if trusted else {})
    )
    source = student_source(config.student)
    trust = config.student.trust_remote_code
    agree_on_models(config, load_tokenizer(source, trust_remote_code=trust))
    assert asked == {
        (folder, kind, name == trusted)
        for folder, name in (("tied", "student"), ("teacher", "teacher"))
        for kind in ("AutoConfig", "AutoTokenizer")
    }


@pytest.mark.parametrize(
    ("options", "student", "teacher"),
    [
        ({}, ("pixelrag_varlen", torch.float32), ("pixelrag_varlen", torch.float32)),
        (
            {"student": {"attention": "sdpa"}, "teacher": {"attention": "eager"}},
            ("sdpa", torch.float32),
            ("eager", torch.float32),
        ),
        (
            {"teacher": {"precision": "bf16", "device": "cpu"}},
            ("pixelrag_varlen", torch.float32),
            ("pixelrag_varlen", torch.bfloat16),
        ),
        (
            {"engine": {"precision": "bf16"}, "lora": {"enabled": True, "r": 3, "alpha": 6.0}},
            ("pixelrag_varlen", torch.bfloat16),
            ("pixelrag_varlen", torch.bfloat16),
        ),
        (
            {"engine": {"precision": "bf16"}, "teacher": {"precision": "fp32"}},
            ("pixelrag_varlen", torch.float32),
            ("pixelrag_varlen", torch.float32),
        ),
    ],
    ids=["defaults", "attention", "bf16_teacher", "bf16_lora", "fp32_teacher"],
)
def test_how_each_model_computes(lesson, options, student, teacher):
    config = DistillConfig(**merged(lesson, options))
    contract = agree_on_models(config, load_tokenizer(student_source(config.student)))
    with process_group("cpu", 60) as world:
        container = distill.build_container(config, world, contract)
        live = open_teacher(config, world, contract, DistillData(None, None))
    found = container.student
    assert (found.attention, found.dtype) == student
    assert (live.model.attention, live.model.dtype) == teacher
    adapters = {n: p for n, p in container.named_parameters() if "lora_A" in n}
    assert {len(p) for p in adapters.values()} == ({3} if config.lora.enabled else set())


def test_a_gguf_file_is_named_within_its_folder(lesson, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "q.gguf").write_bytes(b"GGUF")
    named = {"name_or_path": str(tmp_path / "m"), "gguf_file": "q.gguf"}
    config = DistillConfig(**merged(lesson, {"student": named, "teacher": named}))
    for source in (student_source(config.student), teacher_source(config.teacher)):
        assert (source.location, source.gguf_file) == (str(tmp_path / "m"), "q.gguf")


def test_settings_of_the_loss_that_change_no_result_reach_it(lesson, monkeypatch):
    seen = []
    monkeypatch.setattr(
        model_distill, "distill_loss", lambda *_, **options: seen.append(options) or 1 / 0
    )
    loss = {"chunk_size": 5, "precision": "fast", "compile": True, "vocab_size": 300}
    config = DistillConfig(**merged(lesson, {"loss": loss}))
    container = model_distill.DistillModel(
        causal_load.load_student(config.student), config.loss, vocab_size=300, half_precision=False
    )
    rows = sample_rows(300)
    one = torch.tensor([1])
    with pytest.raises(ZeroDivisionError):
        container("student", rows=rows, supervision=Supervision(one, one, None, 9))
    (options,) = seen
    assert options == {
        "num_tokens": 9, "chunk_size": 5, "precision": "fast", "vocab_size": 300,
        "compile_kernel": True, "count_top1": False,
    }  # fmt: skip
