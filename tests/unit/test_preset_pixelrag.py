"""PixelRAG's flags: every one is an option of ours, or an error that says what to do instead."""

import pytest

from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.preset_pixelrag import ALIASES, DEFAULTS
from pixelrag.config.problems import options_of
from pixelrag.errors import ConfigError

# Every flag of its argument parser, by hand, so that none of the table can be forgotten.
FLAGS = [
    *("model", "mode", "query_side_backward", "debug_trace", "gpu_id", "train_jsonl"),
    *("data_split_dir", "img_mix", "skip_image_verify", "eval_jsonl", "test_jsonl"),
    *("test_data", "test_batch_size", "test_eval_steps", "search_api_url", "articles_json"),
    *("search_api_batch_size", "simpleqa_jsonl", "simpleqa_max_examples"),
    *("simpleqa_grader_model", "vllm_url", "vllm_model", "vllm_enable_thinking"),
    *("vllm_max_tokens", "eval_only", "output_dir", "resume", "batch_size", "num_workers"),
    *("prefetch_factor", "grad_cache_chunk", "lr", "warmup_steps", "max_steps", "scheduler"),
    *("num_cycles", "temperature", "weight_decay", "eval_steps", "save_steps"),
    *("max_grad_norm", "max_eval_batches", "num_hard_negatives", "in_batch_only"),
    *("hardness_alpha", "text_warmup_steps", "text_data_dir", "text_mix_ratio"),
    *("text_curriculum", "lora_r", "lora_alpha", "no_lora_vit", "lora_vit", "lora_mlp"),
    *("lora_vit_r", "unfreeze_vit", "bidirectional", "two_stage_lr", "lora_vit_attn_only"),
    *("reverse_data", "dora", "rslora", "lora_dropout", "ema", "ema_decay", "loss"),
    *("label_smoothing", "max_num_visual_tokens", "wandb_project", "wandb_run_name"),
    "no_wandb",
]
DERIVED = {"img_mix", "max_eval_batches", "resume", "lora_vit_attn_only", "unfreeze_vit"} | {
    *("ema", "ema_decay"),
}


def config_of(*words: str) -> ContrastiveConfig:
    return load(ContrastiveConfig, ["--preset", "pixelrag", *words])[0]


def mistakes(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*words)
    return str(caught.value)


def test_the_table_has_every_flag_and_only_options_that_exist():
    assert set(ALIASES) == set(FLAGS)
    options = set(options_of(ContrastiveConfig))
    for name, alias in ALIASES.items():
        assert {option for option, _ in alias.options} <= options, name
        assert bool(alias.options) + (alias.refusal is not None) + (name in DERIVED) == 1, name
    named = {
        f"{section}.{leaf}" if isinstance(values, dict) else section
        for section, values in DEFAULTS.items()
        for leaf in (values if isinstance(values, dict) else [None])
    }
    assert named <= options


def test_the_defaults_are_those_of_its_code():
    config = config_of()
    assert config.model.name_or_path == "Qwen/Qwen3-VL-Embedding-2B"
    assert config.model.max_visual_tokens == 4096
    lora = config.lora
    assert (lora.enabled, lora.r, lora.alpha, lora.dropout, lora.vision) == (
        *(True, 32, 32, 0.05),
        "all",
    )
    assert (config.batch.per_device_batch_size, config.batch.chunk_size) == (4, 2)
    optim = config.optim
    assert (optim.scheduler, optim.learning_rate, optim.max_steps) == ("constant", 2e-5, 500)
    assert (optim.warmup_ratio, optim.weight_decay, optim.max_grad_norm) == (0.05, 0.01, 1)
    assert (config.loss.temperature, config.data.num_hard_negatives) == (0.07, 0)
    assert (config.eval.every_steps, config.eval.max_rows) == (100, 20 * 2)
    assert config.checkpoint.every_steps == 100


def test_its_flags_are_our_options(tmp_path):
    ours = load(
        ContrastiveConfig,
        [
            *("--preset=pixelrag", "--data.train=D", "--data.eval=D", "--data.text=T"),
            *("--data.text_warmup_steps=50", "--batch.per_device_batch_size=64"),
            *("--batch.chunk_size=4", "--data.num_hard_negatives=2", "--optim.scheduler=cosine"),
            *("--optim.learning_rate=7e-6", "--optim.warmup_steps=20", "--optim.max_steps=350"),
            *("--eval.every_steps=25", "--checkpoint.every_steps=null", "--eval.max_rows=80"),
            *("--lora.vision=false", "--data.text_curriculum=true", "--data.order=reversed"),
            "--lora.target_modules=q_proj,k_proj,v_proj,o_proj,down_proj,gate_proj,up_proj",
        ],
    )[0]
    theirs = config_of(
        *("--train-jsonl", "x.jsonl", "--data-split-dir", "D", "--text-data-dir", "T"),
        *("--text-warmup-steps", "50", "--batch-size", "64", "--grad-cache-chunk=4"),
        *("--num-hard-negatives", "2", "--scheduler", "cosine", "--lr", "7e-6"),
        *("--warmup-steps", "20", "--max-steps", "350", "--eval-steps", "25"),
        *("--save-steps", "0", "--no-lora-vit", "--text-curriculum", "--reverse-data"),
        *("--lora-mlp", "--no-wandb", "--mode", "standard", "--loss=infonce"),
        *("--hardness-alpha", "0", "--simpleqa-max-examples", "0"),
    )
    assert theirs == ours


def test_in_batch_only_wins_and_a_file_wins_over_the_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optim: {scheduler: cosine, learning_rate: 1}\nbatch: {chunk_size: 3}\n")
    config = config_of(
        *("--in-batch-only", "--num-hard-negatives", "2", "--config", str(path), "--lr", "2")
    )
    assert config.data.num_hard_negatives == 0
    assert (config.optim.scheduler, config.optim.learning_rate) == ("cosine", 2)
    assert config.batch.chunk_size == 3


def test_its_adapters_of_the_vision_tower():
    lora = config_of("--lora-vit-attn-only", "--lora-vit-r", "64", "--dora", "--rslora").lora
    assert (lora.vision, lora.of_vision, lora.dora, lora.rslora) == (
        *("attention", (64, 64)),
        *(True, True),
    )
    assert config_of("--lora-vit-r", "8", "--lora-r", "8", "--lora-alpha", "5").lora.of_vision == (
        *(8, 5),
    )
    assert config_of("--no-lora-vit", "--lora-vit-attn-only").lora.vision == "none"
    assert config_of("--no-lora-vit", "--lora-vit").lora.vision == "all"
    whole = config_of("--lora-vit-attn-only", "--unfreeze-vit")
    assert (whole.lora.vision, whole.model.unfrozen) == ("none", ["vision", "merger"])
    assert "lora.vision_r with neither" in mistakes("--no-lora-vit", "--lora-vit-r", "64")


def test_its_averages():
    assert config_of("--ema-decay", "0.999").ema.decay is None
    assert config_of("--ema").ema.decay == 0.999
    assert config_of("--ema", "--ema-decay", "0.9").ema.decay == 0.9
    assert "does nothing without --ema" in mistakes("--ema-decay", "0.9")


def test_a_mixture_is_sets_with_exact_shares():
    config = config_of("--img-mix", "wiki:d/w.jsonl:44", "moca:m, n.jsonl:5", "--batch-size", "49")
    assert config.data.train == ["d/w.jsonl", "m, n.jsonl"]
    assert config.data.weights == [44, 5]
    assert config.data.mixing == "proportional"
    assert "add up to 49, expected --batch-size 4" in mistakes("--img-mix", "a:a:44", "b:b:5")
    assert "expected name:jsonl:count" in mistakes("--img-mix", "a.jsonl")


@pytest.mark.parametrize("name", [name for name in FLAGS if ALIASES[name].refusal])
def test_what_has_no_counterpart_says_so(name):
    alias = ALIASES[name]
    flag = f"--{name.replace('_', '-')}"
    told = mistakes(flag, *(["value"] if alias.num_words else []))
    assert f"{flag}\n      cannot be taken over: {alias.refusal}" in told
    for value in alias.neutral:
        assert config_of(flag, value) == config_of()


def test_its_checkpoints_are_begun_with_and_ours_gone_on_from(tmp_path):
    theirs = tmp_path / "checkpoint-200"
    theirs.mkdir()
    assert config_of("--resume", str(theirs)).checkpoint.resume == str(theirs)
    for name in ("adapter_model.safetensors", "training_state.pt"):
        (theirs / name).touch()
    config = config_of("--resume", str(theirs))
    assert (config.model.adapter, config.model.training_state) == (str(theirs), str(theirs))
    assert config.checkpoint.resume == "auto"


def test_switches_and_values_are_told_apart():
    assert "--lr\n      got nothing, expected a value" in mistakes("--lr", "--lora-vit")
    assert "--lora-vit\n      a switch, expected no value" in mistakes("--lora-vit=1")
    assert "data.text_mix_ratio without data.text" in mistakes("--text-mix-ratio", "0.2")
    assert "got 'colbert', expected pixelrag" in mistakes("--preset", "colbert")
    with pytest.raises(ConfigError, match="unknown option"):
        load(ContrastiveConfig, ["--text-data-dir", "T"])
