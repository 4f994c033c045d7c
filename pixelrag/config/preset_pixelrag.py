"""`--preset pixelrag`: the flags and defaults of PixelRAG's `train_contrastors.py`.

A thin layer: each of its flags is rewritten into options of `pixelrag contrastive`, its defaults
(as its code has them, not its documents) stand below every file and flag. A flag whose effect
pixelrag does not have is an error that says what to do instead; never is one ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelrag.config.problems import Problem

DEFAULTS: dict[str, Any] = {
    "output_dir": "training/output_contrastors",
    "model": {"name_or_path": "Qwen/Qwen3-VL-Embedding-2B", "max_visual_tokens": 4096},
    "lora": {"enabled": True, "r": 32, "alpha": 32, "dropout": 0.05, "vision": "all"},
    "data": {
        "train": ["training/data/train.jsonl"],
        "eval": ["training/data/eval.jsonl"],
        "num_hard_negatives": 0,
        "num_workers": 4,
        "prefetch_factor": 2,
        "drop_last": True,
    },
    "loss": {"temperature": 0.07, "learnable_temperature": True},
    "batch": {"per_device_batch_size": 4, "chunk_size": 2},
    "optim": {
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "scheduler": "constant",
        "warmup_ratio": 0.05,
        "max_steps": 500,
    },
    "engine": {"precision": "bf16"},
    # 20 batches of 2; it measures the loss alone.
    "eval": {"every_steps": 100, "max_rows": 40, "retrieval": False},
    "checkpoint": {"every_steps": 100, "keep_last": 1_000_000, "best_metric": "eval/loss"},
}
"""Options by section; below the configuration files."""

_LLM = ("q_proj", "k_proj", "v_proj", "o_proj")
_LLM_MLP = ("down_proj", "gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Alias:
    """What a flag of PixelRAG's becomes.

    Attributes:
        options: ours that it sets; the value is the flag's where None stands.
        refusal: what to do instead, of a flag that has no counterpart.
        neutral: values with which a refused flag has no effect, so that it may stand.
        zero_is_null: 0 means "off", which is null here.
        num_words: words that follow it: 0 for a switch, 1, or -1 for one or more.
    """

    options: tuple[tuple[str, str | None], ...] = ()
    refusal: str | None = None
    neutral: tuple[str, ...] = ()
    zero_is_null: bool = False
    num_words: int = 1


def _to(*options: str, zero_is_null: bool = False) -> Alias:
    return Alias(tuple((option, None) for option in options), zero_is_null=zero_is_null)


def _switch(**options: str) -> Alias:
    named = tuple((name.replace("__", "."), value) for name, value in options.items())
    return Alias(named, num_words=0)


def _no(refusal: str, *neutral: str, num_words: int = 1) -> Alias:
    return Alias(refusal=refusal, neutral=neutral, num_words=num_words)


_EVAL = "pixelrag trains without it; measure the exported model with `pixelrag eval`"
_SERVICE = "the trainer calls no service; leave it out, and measure with `pixelrag eval`"

ALIASES: dict[str, Alias] = {
    "model": _to("model.name_or_path"),
    "output_dir": _to("output_dir"),
    "resume": Alias(),
    "mode": _no("leave it out; `--train=query` trains queries alone", "standard"),
    "query_side_backward": _no(
        "leave it out; `--batch.replay=none` is the direct way, `all` GradCache's", "direct"
    ),
    "debug_trace": _no("leave it out; a hang is reported with the ranks it waits for", num_words=0),
    "gpu_id": _no("set CUDA_VISIBLE_DEVICES"),
    "train_jsonl": _to("data.train"),
    "eval_jsonl": _to("data.eval"),
    "data_split_dir": _to("data.train", "data.eval"),
    "img_mix": Alias(num_words=-1),
    "skip_image_verify": _no(
        "every image is opened once before training; leave it out, as "
        "PixelRAG's trainer does nothing with it",
        num_words=0,
    ),
    "reverse_data": _switch(data__order="reversed"),
    "num_workers": _to("data.num_workers"),
    "prefetch_factor": _to("data.prefetch_factor"),
    "num_hard_negatives": _to("data.num_hard_negatives"),
    "in_batch_only": _switch(data__num_hard_negatives="0"),
    "text_data_dir": _to("data.text"),
    "text_warmup_steps": _to("data.text_warmup_steps"),
    "text_mix_ratio": _to("data.text_mix_ratio"),
    "text_curriculum": _switch(data__text_curriculum="true"),
    "batch_size": _to("batch.per_device_batch_size"),
    "grad_cache_chunk": _to("batch.chunk_size"),
    "lr": _to("optim.learning_rate"),
    "warmup_steps": _to("optim.warmup_steps"),
    "max_steps": _to("optim.max_steps"),
    "scheduler": _to("optim.scheduler"),
    "num_cycles": _no("optim.scheduler has no restarts; use cosine", "2"),
    "two_stage_lr": _no(
        "run the text warm-up by itself, with data.train naming the text, and "
        "start the second run from it with checkpoint.init_from",
        num_words=0,
    ),
    "weight_decay": _to("optim.weight_decay"),
    "max_grad_norm": _to("optim.max_grad_norm"),
    "temperature": _to("loss.temperature"),
    "loss": _to("loss.name"),
    "label_smoothing": _to("loss.label_smoothing"),
    "hardness_alpha": _to("loss.hardness_alpha"),
    "bidirectional": _no(
        "it is no loss there but attention without the causal mask, in the text "
        "warm-up alone; pixelrag keeps the model's own mask",
        num_words=0,
    ),
    "ema": Alias(num_words=0),
    "ema_decay": Alias(),
    "lora_r": _to("lora.r"),
    "lora_alpha": _to("lora.alpha"),
    "lora_dropout": _to("lora.dropout"),
    "lora_vit": _switch(lora__vision="all"),
    "no_lora_vit": _switch(lora__vision="none"),
    "lora_mlp": _switch(lora__target_modules=",".join(_LLM + _LLM_MLP)),
    "lora_vit_r": _to("lora.vision_r"),
    "lora_vit_attn_only": Alias(num_words=0),
    "unfreeze_vit": Alias(num_words=0),
    "dora": _switch(lora__dora="true"),
    "rslora": _switch(lora__rslora="true"),
    "max_num_visual_tokens": _to("model.max_visual_tokens"),
    "eval_steps": _to("eval.every_steps", zero_is_null=True),
    "save_steps": _to("checkpoint.every_steps", zero_is_null=True),
    "max_eval_batches": Alias(),
    "eval_only": _no("use `pixelrag eval`", num_words=0),
    "test_jsonl": _no(_EVAL),
    "test_data": _no(_EVAL, num_words=-1),
    "test_eval_steps": _no(_EVAL, "0"),
    "test_batch_size": _no(_EVAL),
    "search_api_url": _no(_SERVICE),
    "search_api_batch_size": _no(_SERVICE),
    "articles_json": _no(_SERVICE),
    "simpleqa_jsonl": _no(_SERVICE),
    "simpleqa_max_examples": _no(_SERVICE, "0"),
    "simpleqa_grader_model": _no(_SERVICE),
    "vllm_url": _no(_SERVICE),
    "vllm_model": _no(_SERVICE),
    "vllm_enable_thinking": _no(_SERVICE, num_words=0),
    "vllm_max_tokens": _no(_SERVICE),
    "wandb_project": _no("set WANDB_PROJECT in the environment, and --logging.wandb true"),
    "wandb_run_name": _no("set WANDB_NAME in the environment, and --logging.wandb true"),
    "no_wandb": _switch(logging__wandb="false"),
}
"""By name without dashes; every flag of the trainer is here."""


def expand(argv: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Rewrite PixelRAG's flags into ours; all other words stay as they are.

    Returns:
        The command line, and what is wrong with it.
    """
    ours: list[str] = []
    problems: list[Problem] = []
    given: dict[str, list[str]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        alias = ALIASES.get(name) if flag.startswith("--") else None
        if alias is None:
            ours.append(word)
            continue
        values = [text] if equals else []
        most = len(words) if alias.num_words < 0 else alias.num_words - len(values)
        while len(values) < most and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if (alias.num_words == 0) == bool(values):
            says = "a switch, expected no value" if values else "got nothing, expected a value"
            problems.append(Problem(flag, says))
            continue
        given[name] = values
        if alias.refusal is not None and values[:1] not in [[value] for value in alias.neutral]:
            problems.append(Problem(flag, f"cannot be taken over: {alias.refusal}"))
        for option, value in alias.options:
            ours.append(f"--{option}={_value(alias, values, value)}")
    for derive in (
        _resume,
        _splits_win,
        _in_batch_wins,
        _vision_tower,
        _averaged,
        _mixture,
        _eval_rows,
    ):
        derive(given, ours, problems)
    return ours, problems


def _value(alias: Alias, values: list[str], fixed: str | None) -> str:
    if fixed is not None:
        return fixed
    return "null" if alias.zero_is_null and values[0] == "0" else values[0]


Given = dict[str, list[str]]


def _resume(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """Its checkpoints give weights to begin with; ours are gone on from."""
    if "resume" not in given:
        return
    folder = Path(given["resume"][0])
    has_adapter = (folder / "adapter_model.safetensors").is_file()
    has_state = (folder / "training_state.pt").is_file()
    if has_adapter:
        ours.append(f"--model.adapter={folder}")
    if has_state:
        ours.append(f"--model.training_state={folder}")
    if not has_adapter and not has_state:
        ours.append(f"--checkpoint.resume={folder}")


def _splits_win(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """`--data-split-dir` wins over `--train-jsonl` and `--eval-jsonl`, wherever it stands."""
    if "data_split_dir" in given:
        folder = given["data_split_dir"][0]
        ours += [f"--data.train={folder}", f"--data.eval={folder}"]


def _in_batch_wins(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """`--in-batch-only` wins over `--num-hard-negatives`."""
    if "in_batch_only" in given:
        ours.append("--data.num_hard_negatives=0")


def _vision_tower(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """`--unfreeze-vit` wins over its adapters; a rank of their own is their alpha too."""
    if "unfreeze_vit" in given:
        ours += ["--lora.vision=none", "--model.unfrozen=vision,merger"]
    elif "lora_vit_attn_only" in given:
        chosen = [word for word in ours if word.startswith("--lora.vision=")][-1:]
        if chosen != ["--lora.vision=none"]:
            ours.append("--lora.vision=attention")
    if (rank := given.get("lora_vit_r")) and rank != given.get("lora_r", ["32"]):
        ours.append(f"--lora.vision_alpha={rank[0]}")


def _averaged(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """`--ema-decay` acts with `--ema` alone."""
    decay = given.get("ema_decay", ["0.999"])[0]
    if "ema" in given:
        ours.append(f"--ema.decay={decay}")
    elif decay != "0.999":
        problems.append(Problem("--ema-decay", "does nothing without --ema; give both or none"))


def _mixture(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """`--img-mix name:path:count ...` are sets with weights, so many rows of each in a batch."""
    if "img_mix" not in given:
        return
    parts = [spec.rsplit(":", 2) for spec in given["img_mix"]]
    if any(len(part) != 3 or not part[2].isdecimal() for part in parts):
        problems.append(Problem("--img-mix", "expected name:jsonl:count, the count a number"))
        return
    total = sum(int(part[2]) for part in parts)
    batch = given.get("batch_size", [str(DEFAULTS["batch"]["per_device_batch_size"])])[0]
    if str(total) != batch:
        problems.append(
            Problem("--img-mix", f"its counts add up to {total}, expected --batch-size {batch}")
        )
    ours += [
        "--data.train=[" + ", ".join(f'"{part[1]}"' for part in parts) + "]",
        "--data.weights=" + ",".join(part[2] for part in parts),
        "--data.mixing=proportional",
    ]


def _eval_rows(given: Given, ours: list[str], problems: list[Problem]) -> None:
    """It evaluates `--max-eval-batches` batches of the smaller of batch and chunk; 0 is all."""
    if not given.keys() & {"max_eval_batches", "batch_size", "grad_cache_chunk"}:
        return
    batch = DEFAULTS["batch"]
    words = [
        given.get("max_eval_batches", ["20"])[0],
        given.get("batch_size", [str(batch["per_device_batch_size"])])[0],
        given.get("grad_cache_chunk", [str(batch["chunk_size"])])[0],
    ]
    if all(word.isdecimal() for word in words):
        batches, rows, chunk = map(int, words)
        ours.append(f"--eval.max_rows={batches * min(rows, chunk) or 'null'}")
    elif not words[0].isdecimal():
        problems.append(Problem("--max-eval-batches", f"got {words[0]!r}, expected a number"))
