"""Each suite of `pixelrag bench` does the work that it names, as its options say."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pixelrag.bench import attention, data, engine, gradcache, kd_chunk, packing, rag_refresh
from pixelrag.bench.flops import count_flops
from pixelrag.bench.models import causal, text_config
from pixelrag.bench.peers_kd import naive
from pixelrag.bench.suite import load_plan
from pixelrag.bench.suite_charts import charts_of
from pixelrag.config.base import load
from pixelrag.config.bench import AttentionConfig, DataWork, KDChunkConfig
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.env import process_group
from pixelrag.engine import build_engine
from tests.unit.bench_cases import ONCE, TINY, measured

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("profile", ["cpu-smoke", "h200"])
def test_every_case_of_a_suite_runs(name: str, profile: str):
    learns_all = ["--work.supervised=1"] if (name, profile) == ("packing", "h200") else []
    rows = measured(name, profile, *learns_all)
    for row in rows:
        assert row.skipped or (row.seconds.p50 > 0 and row.tokens_per_second > 0), row
        assert row.suite == name
    for some in (rows, rows[:1], rows[-1:]):  # whatever was left out or failed
        for chart in charts_of(name, some):
            assert chart.title
    ran = {row.name for row in rows if not row.skipped}
    assert {row.name for row in rows} - ran <= {
        f"documents={count} kernel=flash_attention_2" for count in (1, 4)
    }
    if name in ("kd-chunk", "packing", "attention"):
        flops = {row.flops for row in rows if not row.skipped}
        assert min(flops) > 0
    if name == "packing":  # all ways see the same tokens, whatever they pad
        assert len({(r.case["lengths"], r.tokens, r.supervised_tokens, r.flops) for r in rows}) == 3
        padding = {r.name: r.figures["padding_share"] for r in rows}
        assert padding["lengths=long_tail way=unpacked"] > padding["lengths=long_tail way=isolated"]
    if name == "gradcache":
        assert len({(row.case["tower"], row.tokens, row.flops) for row in rows}) == 2


def test_both_losses_are_the_same_loss_at_every_chunk():
    config = KDChunkConfig(work={"tokens": 24, "student_width": 8, "teacher_width": 16})
    x = kd_chunk.make_inputs(config.work, 40, torch.float64, CPU)
    found = []
    for loss, chunk in [("fused", 4), ("fused", "auto"), ("logits", 5), ("logits", 24)]:
        value = kd_chunk.loss_of(x, loss, chunk).total
        found.append([value.detach(), *torch.autograd.grad(value, (x["h"], x["w"]))])
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            assert torch.allclose(got, expected, rtol=1e-10)
    # Half of the teacher's logits are the student's own, the rest is as far as was asked for.
    distance = x["ht"] @ x["wt"].t() - x["h"] @ x["w"].t()
    assert distance.std().item() == pytest.approx(0.6, rel=0.2)


def test_plain_and_cached_are_one_gradient():
    config = load_plan("gradcache", "cpu-smoke", TINY["gradcache"]).config
    for tower in ("text", "vision"):
        both = []
        for cached in (False, True):
            with process_group("cpu"):
                module = gradcache.tower(config, tower, CPU)
                run = build_engine(module, gradcache.adamw, device=CPU)
                rows = [
                    gradcache.rows_of(module, config.work, tower, 5, seed, CPU) for seed in (0, 1)
                ]
                if cached:
                    gradcache.cached(run, *rows, 2)
                else:
                    gradcache.plain(run, *rows)
                both.append(run.gradients())
        plain, chunks = both
        error = sum(((plain[n] - chunks[n]) ** 2).sum() for n in plain).sqrt()
        norm = sum((g**2).sum() for g in plain.values()).sqrt()
        assert norm > 1e-3
        assert error / norm < 1e-5


def test_operations_are_those_of_the_mathematics():
    flags = ["--work.towers=text", "--work.replay=all", "--work.tokens=8"]
    (row,) = measured("gradcache", "cpu-smoke", *flags)
    config = load_plan("gradcache", "cpu-smoke", [*TINY["gradcache"], *flags]).config
    with torch.device("meta"):
        body = gradcache.tower(config, "text", torch.device("meta")).encoder
    weights = sum(
        p.numel() for n, p in body.named_parameters() if p.ndim == 2 and "embeddings" not in n
    )
    tokens, text = 8, config.text  # attention: two products of a row's square, three passes
    of_attention = 3 * 2 * 2 * tokens * text.hidden_size * text.num_layers
    assert row.tokens == 64
    # The first layer's inputs need no gradient, but its weights' products are all there.
    assert row.flops == pytest.approx((6 * weights + of_attention) * row.tokens, rel=0.01)


def test_lengths_follow_their_distribution():
    work = packing.PackingWork(samples=400, row_length=600)
    lengths = {
        kind: packing.sample_lengths(work, kind) for kind in ("equal", "uniform", "long_tail")
    }
    assert set(lengths["equal"]) == {150}
    assert 270 < lengths["uniform"].mean() < 330
    assert lengths["uniform"].max() > 580
    assert 80 < lengths["long_tail"].mean() < 120
    assert np.median(lengths["long_tail"]) < 0.7 * lengths["long_tail"].mean()


def test_documents_of_a_row_are_isolated_and_kernels_agree():
    config = AttentionConfig(work={"row_length": 12, "rows": 2})
    rows = attention.make_rows(config.work, 4, config.student.vocab_size)
    assert np.diff(rows.bounds).tolist() == [3] * 8
    found = [
        causal(config.student, CPU, attention=kernel).eval().hidden(rows)
        for kernel in ("eager", "sdpa", "varlen")
    ]
    for other in found[1:]:
        assert torch.allclose(other, found[0], atol=1e-5)


def test_loaders_deliver_one_pass_a_step():
    work = DataWork(samples=7, batch=3, tokens=12, row_length=32)
    batches, per_pass = data.pair_batches(work, 0, images=False)
    seen = [name for _ in range(per_pass) for name in next(batches).query_ids]
    assert sorted(seen) == [f"row {n}" for n in range(7)]


def test_memory_is_what_a_step_adds_in_a_fresh_process():
    flags = ["--work.tokens=512", "--work.vocabularies=16384", "--run.memory=true"]
    flags += ["--run.at_once=2", "--work.chunk_sizes=512"]
    fused, logits = measured("kd-chunk", "cpu-smoke", *flags)
    matrix = 512 * 16384 * 4 / 2**20  # 32 MiB
    # Chunks of both models' logits; and whole logits of both, with the student's gradient.
    assert 1.9 * matrix < fused.added_mib < 3.5 * matrix
    assert 3.9 * matrix < logits.added_mib < 7 * matrix
    assert logits.peak_mib > logits.added_mib


def test_the_real_sizes_are_those_of_the_published_models():
    config = load_plan("packing", "h200", []).config
    assert config == load_plan("packing", "b200", []).config
    for sizes, billions in ((config.student, 1.72), (config.teacher, 8.19)):
        model = causal(sizes, torch.device("meta"), attention="eager")
        count = sum(p.numel() for p in model.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=0.01)
    assert text_config(config.teacher).vocab_size == 151_936


def test_what_goes_over_the_wire():
    # Two ranks: a gather hands over half and whole, so 3 MiB of buffers are a whole of 2.
    mib = 2**20
    gathers = {"_allgather_base_": 2}
    reductions = {"_reduce_scatter_base_": 1, "allreduce_": 1}
    sizes = {"_reduce_scatter_base_": 6 * mib, "allreduce_": 5 * mib}
    all_sizes = {"_allgather_base_": 3 * mib} | sizes
    counted = SimpleNamespace(
        everything=SimpleNamespace(calls=gathers | reductions, bytes=all_sizes),
        backward_only=SimpleNamespace(calls=reductions, bytes=sizes, gradient_reductions=2),
    )
    found = engine.summarise(counted, 2)
    assert (found["gathers"], found["gathered_mib"]) == (2, 2.0)
    assert (found["reductions"], found["reduced_mib"]) == (2, 9.0)
    assert found["wire_mib"] == 2 / 2 + 4 / 2 + 5  # (W - 1) / W, and an all-reduce twice that


@pytest.mark.distributed
def test_engines_are_measured_on_their_processes():
    flags = ["--work.worlds=2", "--work.engines=ddp", "--work.grad_sync=per_chunk"]
    flags += ["--work.rows=2", "--work.tokens=4", "--text.hidden_size=32", *ONCE]
    plan = load_plan("engine", "cpu-smoke", flags)
    (group,) = plan.groups()
    (row,) = engine.measure(plan.config, group)
    assert row.tokens == 2 * 4 * 2 * 4  # ranks, chunks, rows, tokens
    assert row.peak_mib is None  # run.memory is off
    assert row.figures["reductions"] == 4
    assert row.figures["wire_mib"] == pytest.approx(row.figures["reduced_mib"], rel=0.01)


def test_steps_of_the_rag_job_are_told_apart_by_whether_a_refresh_is_in_flight(monkeypatch):
    def in_this_process(target: str, payload: dict, **_):
        with process_group("cpu") as world:
            return [rag_refresh.worker(world, payload)]

    monkeypatch.setattr(rag_refresh, "run_workers", in_this_process)
    flags = ["--work.steps=14", "--work.every_steps=6", "--work.passages=60", "--work.k=2"]
    flags += ["--work.factory=Flat", "--work.hidden_size=32", "--work.global_batch=2"]
    plan = load_plan("rag-refresh", "cpu-smoke", [*flags, *ONCE])
    (group,) = plan.groups()
    alone, beside = rag_refresh.measure(plan.config, group)
    assert [row.case["refresh"] for row in (alone, beside)] == ["alone", "beside"]
    assert alone.seconds.p50 > 0
    assert alone.figures["most_age_steps"] >= 5
    assert alone.repeats + beside.repeats <= 13
    assert beside.skipped or beside.figures["mean_age_steps"] >= 6


def test_the_loss_needs_the_operations_of_its_products():
    (row, *_) = measured("kd-chunk", "cpu-smoke", "--work.supervised=1", "--work.losses=fused")
    work = load_plan("kd-chunk", "cpu-smoke", TINY["kd-chunk"]).config.work
    x = kd_chunk.make_inputs(work, 40, torch.float32, CPU)
    assert row.flops == count_flops(lambda: naive(x, 0.3, 8).backward())
    some = work.model_copy(update={"tokens": 4000, "supervised": 0.3})
    labels = kd_chunk.make_inputs(some, 40, torch.float32, CPU)["labels"]
    assert (labels != -100).float().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("replay", "forwards"), [("plain", 2), ("all", 2 * 8), ("half", 4 + 2 * 4), ("none", 8)]
)
def test_replay_is_what_it_says(replay: str, forwards: int):
    config = load_plan("gradcache", "cpu-smoke", TINY["gradcache"]).config
    with process_group("cpu"):
        module = gradcache.tower(config, "text", CPU)
        run = build_engine(module, gradcache.adamw, device=CPU)
        sides = [gradcache.rows_of(module, config.work, "text", 8, seed, CPU) for seed in (0, 1)]
        calls: list[int] = []
        module.encoder.register_forward_hook(lambda *_: calls.append(1))
        gradcache.step_of({"chunk": 2, "replay": replay}, run, *sides)()
    assert len(calls) == forwards


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gradcache", ["--work.towers=text", "--work.replay=all"]),
        ("packing", ["--work.lengths=equal", "--work.ways=isolated"]),
        ("attention", ["--work.documents=4", "--work.kernels=varlen"]),
    ],
)
def test_bf16_computes_in_bf16(name: str, flags: list[str]):
    seen: set[torch.dtype] = set()
    linear = torch.nn.functional.linear

    def spied(x, *others):
        out = linear(x, *others)
        seen.add(out.dtype)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", spied)
        (row,) = measured(name, "cpu-smoke", *flags, "--work.precision=bf16")
    assert not row.skipped
    assert torch.bfloat16 in seen


def test_the_engine_is_built_as_the_case_says(monkeypatch: pytest.MonkeyPatch):
    class Built(Exception):
        pass

    def build(module, factory, **options):
        raise Built(options)

    monkeypatch.setattr(engine, "build_engine", build)
    flags = ["--work.params=resident,sharded", "--work.precision=bf16", "--run.device=cpu"]
    plan = load_plan("engine", "cpu-smoke", [*flags, "--work.engines=ddp,fsdp2"])
    cases_of_all = [case for group in plan.groups() for case in group]
    assert {c["engine"] for c in cases_of_all if c["params"] == "sharded"} == {"fsdp2"}
    payload = {"config": plan.config.model_dump(mode="json"), "case": cases_of_all[-1]}
    with process_group("cpu") as world, pytest.raises(Built) as found:
        engine.worker(world, payload)
    (options,) = found.value.args
    said = {key: options[key] for key in ("grad_sync", "params", "precision")}
    assert said == {"grad_sync": "per_chunk", "params": "sharded", "precision": "bf16"}
    assert options["name"] == "fsdp2"
    assert len(options["blocks"]) == plan.config.text.num_layers


def test_the_rag_job_is_the_one_that_the_suite_describes(tmp_path: Path):
    flags = ["--work.factory=Flat", "--work.k=3", "--work.global_batch=12", "--work.steps=9"]
    config = load_plan("rag-refresh", "cpu-smoke", [*flags, "--work.every_steps=4"]).config
    world = SimpleNamespace(world_size=2)
    job, _ = load(RagConfig, rag_refresh.job_flags(config, tmp_path, world))
    assert (job.index.factory, job.retrieval.k, job.batch.per_device_batch_size) == ("Flat", 3, 6)
    assert (job.optim.max_steps, job.refresh.every_steps, job.engine.name) == (9, 4, "fsdp2")


def test_workers_deliver_what_the_process_itself_does():
    work = DataWork(samples=6, batch=3, tokens=12, row_length=32)
    for source in ("pairs", "packed"):
        own, one = (data._prepare(work, {"source": source, "workers": n}) for n in (0, 1))
        assert own.tokens == one.tokens > 0
    assert "cores here" in str(data._prepare(work, {"source": "pairs", "workers": 10_000}))
