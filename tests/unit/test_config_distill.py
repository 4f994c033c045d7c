"""The distillation job's configuration: the playbook's defaults, and every rule across sections."""

from pathlib import Path

import pytest

from pixelrag.config.base import dump, load
from pixelrag.config.distill import METRICS, DistillConfig
from pixelrag.config.help import help_text
from pixelrag.errors import ConfigError

NEEDED = ["--student.name_or_path=s", "--data.train=t.jsonl", "--optim.max_steps=10"]
LIVE = ["--teacher.name_or_path=t"]
HOME = Path(__file__).parents[2] / "recipes" / "quintus_qwen3_8b_to_1_7b.yaml"


def config_of(*flags: str) -> DistillConfig:
    return load(DistillConfig, [*NEEDED, *LIVE, *flags])[0]


def mistakes(*flags: str, live: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        load(DistillConfig, [*NEEDED, *(LIVE if live else []), *flags])
    return str(caught.value)


def test_defaults_are_the_playbooks():
    config = config_of()
    assert (config.loss.ce_weight, config.loss.temperature, config.loss.chunk_size) == (
        0.3,
        2,
        2048,
    )
    assert (config.loss.kind, config.loss.implementation) == ("forward_kl", "fused")
    assert (config.packing.enabled, config.packing.length) == (True, 4096)
    assert config.packing.attention == "isolated"
    batch = config.batch
    assert (batch.per_device_batch_size, batch.gradient_accumulation_steps) == (4, 2)
    assert (config.data.stream_shuffle_seed, config.data.split_seed, config.seed) == (25, 25, 25)
    assert config.optim.fused
    assert (config.student.compile, config.student.gradient_checkpointing) == (False, False)
    assert config.checkpoint.best_metric == "eval/loss"


def test_the_home_recipe_says_the_home_shape():
    config, _ = load(DistillConfig, ["--config", str(HOME)])
    assert (config.teacher.name_or_path, config.student.name_or_path) == (
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-1.7B",
    )
    assert (config.engine.precision, config.teacher.precision) == ("bf16", "bf16")
    assert (config.loss.vocab_size, config.loss.chunk_size) == (151_669, 2048)
    assert (config.loss.ce_weight, config.loss.temperature) == (0.3, 2.0)
    batch = config.batch
    assert (batch.per_device_batch_size, batch.gradient_accumulation_steps) == (4, 2)
    assert (config.packing.enabled, config.packing.length) == (True, 4096)
    assert (config.student.attention, config.student.liger) == ("auto", "auto")
    assert (config.student.compile, config.student.gradient_checkpointing) == (False, False)
    assert config.optim.fused


def test_a_dump_loads_to_the_same(tmp_path):
    config = config_of("--loss.chunk_size=auto", "--student.num_layers=4", "--data.eval=e.jsonl")
    (tmp_path / "c.yaml").write_text(dump(config))
    assert load(DistillConfig, ["--config", str(tmp_path / "c.yaml")])[0] == config


def test_help_names_every_option_within_its_width():
    lines = help_text("pixelrag distill", "distil", DistillConfig).splitlines()
    for option in ("student.num_layers", "teacher.placement", "loss.tail", "watch.kd_rise"):
        assert any(line.startswith(f"  --{option}  ") for line in lines)
    # One line of meaning to an option.
    options = sum(line.startswith("  --") for line in lines)
    assert sum(line.startswith("      ") for line in lines) == options
    assert max(map(len, lines)) <= 140


CONFLICTS = {
    "a live teacher without a name": ([], "teacher.source live without teacher.name_or_path"),
    "no teacher in a cache job": (["--teacher.source=cache"], "without teacher.path"),
    "no socket": (["--teacher.source=remote"], "give the socket"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_teachers_that_are_not_there(name: str):
    flags, expected = CONFLICTS[name]
    assert expected in mistakes(*flags, live=False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--teacher.path=cache"], "with teacher.source live"),
        (["--teacher.source=hidden_states", "--teacher.path=c", "--teacher.precision=bf16"],
         "no teacher runs in this job"),
        (["--teacher.source=cache", "--teacher.path=c", "--packing.attention=concatenated"],
         "the cache holds each sample seen by itself"),
        (["--teacher.placement=sharded", "--teacher.offload=true", "--engine.device=cuda"],
         "ranks share one copy"),
        (["--teacher.offload=true", "--engine.device=cpu"], "lie in CPU memory as it is"),
        (["--teacher.placement=sharded", "--teacher.device=cpu", "--engine.device=cuda"],
         "shard it on the student's devices"),
        (["--teacher.attention=flash_attention_2"], "it needs CUDA and bf16"),
        (["--teacher.liger=on", "--teacher.device=cpu"], "set teacher.liger to auto"),
        (["--student.attention=flash_attention_2"], "set engine.precision bf16"),
        (["--student.liger=on", "--engine.device=cpu"], "set student.liger to auto"),
        (["--student.random_init=true", "--lora.enabled=true"], "drop one"),
        (["--lora.r=4"], "set lora.enabled true, or leave them out"),
        (["--loss.beta=0.3"], "set loss.kind jsd"),
        (["--loss.kind=reverse_kl", "--loss.skew=0.3"], "set a skewed loss.kind"),
        (["--loss.tail=renormalise"], "set loss.top_k"),
        (["--loss.implementation=logits", "--teacher.source=remote", "--teacher.path=s"],
         "or loss.implementation fused"),
        (["--teacher.source=cache", "--teacher.path=c", "--loss.top_k=4"], "with its own k"),
        (["--loss.ce_weight=1"], "below 1"),
        (["--loss.chunk_size=0"], "an integer of 1 or more, or auto"),
        (["--loss.chunk_size=many"], "an integer of 1 or more, or auto"),
        (["--data.streaming=true"], "data.max_samples"),
        (["--packing.enabled=false", "--packing.attention=concatenated"], "packing.enabled true"),
        (["--packing.mask_first_token=true"], "never learn from the one before them"),
        (["--data.eval=e", "--data.eval_samples=5"], "beside data.eval"),
        (["--data.eval_samples=5", "--data.max_samples=5"], "fewer samples than there are"),
        (["--eval.every_steps=5"], "without anything held out"),
        (["--checkpoint.best_metric=eval/ndcg@10"], ", ".join(METRICS)),
        (["--optim.num_epochs=1"], "give one of them"),
        (["--engine.params=sharded"], "set engine.name to zero3 or fsdp2"),
        (["--checkpoint.resume=nver"], "there is no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_stand_together_is_named_with_what_mends_it(flags, expected):
    text = mistakes(*flags)
    assert expected in text
    assert text.startswith("1 problem")


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss.kind=jsd", "--loss.beta=0.3"],
        ["--loss.kind=skewed_kl", "--loss.skew=0.3"],
        ["--loss.top_k=8", "--loss.tail=renormalise"],
        ["--teacher.offload=true", "--engine.device=cuda"],
        ["--packing.enabled=false"],
        ["--data.eval_samples=5", "--eval.every_steps=5", "--checkpoint.best_metric=eval/kd_loss"],
    ],
)
def test_what_can_stand_together_does(flags):
    config_of(*flags)


def test_caches_need_no_teacher():
    for source in ("cache", "hidden_states", "remote"):
        load(DistillConfig, [*NEEDED, f"--teacher.source={source}", "--teacher.path=somewhere"])
