"""Loading a configuration: precedence, all mistakes at once with their places, rules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pixelrag.config.base import dump, fingerprint, load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.help import help_text
from pixelrag.config.problems import nearest, options_of
from pixelrag.errors import ConfigError

NEEDED = ["--model.name_or_path", "m", "--data.train", "t.jsonl", "--optim.max_steps", "10"]


def config_of(*flags: str) -> ContrastiveConfig:
    return load(ContrastiveConfig, [*NEEDED, *flags])[0]


def mistakes(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*flags)
    return str(caught.value)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> str:
        Path(name).write_text(text, "utf-8")
        return name

    return _write


def test_defaults_of_the_contract():
    config = config_of()
    assert config.output_dir == "runs/contrastive"
    assert (config.lora.enabled, config.lora.r, config.lora.alpha) == (False, 32, 32)
    assert (config.loss.initial_temperature, config.loss.learnable_temperature) == (0.07, True)
    assert config.optim.learning_rate == 2e-5
    assert (config.engine.name, config.engine.precision) == ("ddp", "fp32")
    assert config.checkpoint.best_metric == "eval/ndcg@10"
    assert config.data.eval == []


def test_flags_win_over_later_files_over_earlier_files(write):
    write("a.yaml", "optim: {learning_rate: 1, beta1: 0.1, beta2: 0.1}\n")
    write("b.yaml", "optim: {learning_rate: 2, beta1: 0.2}\n")
    config = config_of("--config", "a.yaml", "--optim.learning_rate=3", "--config", "b.yaml")
    assert (config.optim.learning_rate, config.optim.beta1, config.optim.beta2) == (3, 0.2, 0.1)


LEAVES = ("optim.beta1", "optim.beta2", "loss.temperature", "ema.decay")
LAYER = st.dictionaries(st.sampled_from(LEAVES), st.sampled_from([0.25, 0.5, 0.75]))


@given(layers=st.lists(LAYER, min_size=1, max_size=4), flags=LAYER)
def test_the_last_layer_that_names_an_option_decides(layers, flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    argv = list(NEEDED)
    for number, layer in enumerate(layers):
        path = folder / f"{number}.yaml"
        path.write_text("".join(f"{k.replace('.', ': {')}: {v}}}\n" for k, v in _merged(layer)))
        argv += ["--config", str(path)]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    config = load(ContrastiveConfig, argv)[0]
    for name in LEAVES:
        section, leaf = name.split(".")
        named = [layer[name] for layer in [*layers, flags] if name in layer]
        default = getattr(getattr(config_of(), section), leaf)
        assert getattr(getattr(config, section), leaf) == (named[-1] if named else default)


def _merged(layer: dict[str, float]) -> list[tuple[str, float]]:
    """A layer's options, the two of one section on one line (a section stands once in a file)."""
    both = "optim.beta1" in layer and "optim.beta2" in layer
    items = [(k, v) for k, v in layer.items() if not (both and k.startswith("optim."))]
    if both:
        items.append(("optim.beta1", f"{layer['optim.beta1']}, beta2: {layer['optim.beta2']}"))
    return items


def test_all_mistakes_at_once_each_with_its_place(write):
    write("a.yaml", "model:\n  poling: mean\noptim:\n  scheduler: cosin\nengine: {name: zero9}\n")
    write("b.yaml", "batch:\n\n  chunk_size: 0\nmodle: {}\n")
    text = mistakes(
        "--config=a.yaml", "--config", "b.yaml", "--config", "c.yaml", "--loss.temperatur", "1",
        "--seed", "x", "--logging.progress",
    )  # fmt: skip
    assert text.startswith("9 problems in the configuration\n")
    for part in (
        "model.poling (a.yaml line 2)\n      unknown option; did you mean model.pooling?",
        "optim.scheduler (a.yaml line 4)\n      got 'cosin', expected one of cosine, linear, "
        "constant; did you mean cosine?",
        "engine.name (a.yaml line 5)\n      got 'zero9', expected one of ddp,",
        "batch.chunk_size (b.yaml line 3)\n      got 0, expected an integer of 1 or more",
        "modle (b.yaml line 4)\n      unknown option; did you mean model?",
        "c.yaml, expected a readable YAML file (No such file or directory)",
        "--loss.temperatur)\n      unknown option; did you mean loss.temperature?",
        "seed (--seed)\n      got 'x', expected an integer of 0 or more",
        "--logging.progress\n      got nothing, expected a value after it",
    ):
        assert part in text, part


def test_a_file_that_is_not_there_is_all_that_is_wrong():
    with pytest.raises(ConfigError, match=r"(?s)^1 problem .*no\.yaml") as caught:
        load(ContrastiveConfig, ["--config", "no.yaml"])
    assert "required" not in str(caught.value)


def test_what_is_required_is_named_by_its_path():
    with pytest.raises(ConfigError) as caught:
        load(ContrastiveConfig, [])
    text = str(caught.value)
    assert "model.name_or_path\n      missing" in text
    assert "data.train\n      missing" in text
    assert "neither optim.max_steps nor optim.num_epochs" in text


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("learning_rate", "optim.learning_rate"),
        ("optim.lr", "optim.learning_rate"),
        ("optim.learning_rte", "optim.learning_rate"),
        ("lora.rank", "lora.r"),
        ("data.evals", "data.eval"),
        ("model.pool", "model.pooling"),
        ("batch.mini_batch_size", "batch.chunk_size"),
        ("per_device_train_batch_size", "batch.per_device_batch_size"),
        ("zzzz", None),
    ],
)
def test_the_nearest_name(wrong: str, meant: str | None):
    assert nearest(wrong, options_of(ContrastiveConfig)) == meant


def test_environment_variables_are_no_configuration():
    environment = {
        "SEED": "7", "OUTPUT_DIR": "elsewhere", "OPTIM": '{"beta1": 0.5}', "MODEL": "[]",
    }  # fmt: skip
    code = (
        "from pixelrag.config.base import load; "
        "from pixelrag.config.contrastive import ContrastiveConfig as C; "
        f"c, _ = load(C, {NEEDED!r}); print(c.seed, c.output_dir, c.optim.beta1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.stdout.split() == ["0", "runs/contrastive", "0.9"], done.stderr


def test_configuration_imports_no_torch():
    code = (
        "import sys, pixelrag.config.contrastive; "
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_frozen():
    config = config_of()
    with pytest.raises(ValidationError):
        config.seed = 3
    with pytest.raises(ValidationError):
        config.optim.beta1 = 0.1


class TestFlags:
    def test_forms(self):
        config = config_of(
            "--data.train=a, b", "--data.eval", '["c,d"]', "--lora.enabled", "true",
            "--optim.max-grad-norm", "none", "--model.query_instruction", "none",
            "--model.document_instruction=null", "--lora.target_modules", "q,v",
        )  # fmt: skip
        assert config.data.train == ["a", "b"]
        assert config.data.eval == ["c,d"]
        assert config.lora.enabled is True
        assert config.optim.max_grad_norm is None
        assert config.model.query_instruction == "none"
        assert config.model.document_instruction is None
        assert config.lora.target_modules == ["q", "v"]

    def test_a_text_may_hold_anything(self):
        assert config_of("--model.query_instruction=--a=b").model.query_instruction == "--a=b"
        assert config_of("--model.query_instruction", "[1").model.query_instruction == "[1"

    def test_the_last_of_a_repeated_flag_counts(self):
        assert config_of("--seed", "1", "--seed", "2").seed == 2

    def test_shortcuts(self, tmp_path):
        (tmp_path / "z.json").write_text('{"zero_optimization": {"stage": 1}}')
        config = config_of("--deepspeed", f"{tmp_path}/z.json", "--resume", "never")
        assert (config.engine.name, config.checkpoint.resume) == ("zero1", "never")

    def test_a_negative_number_is_a_value(self):
        assert "got '-1', expected an integer of 1 or more" in mistakes("--batch.chunk_size", "-1")

    def test_mistakes(self):
        assert "stray\n      unexpected word" in mistakes("stray")
        assert "expected true or false after it" in mistakes("--lora.enabled")
        assert "is a section" in mistakes("--optim", "3")
        assert "did you mean --deepspeed?" in mistakes("--deepsped", "x")
        assert "got 'maybe', expected true or false" in mistakes("--lora.enabled", "maybe")
        assert "got '[a', expected a list as in [a, b]" in mistakes("--data.train", "[a")

    def test_a_commands_own_flags_come_back(self):
        _, own = load(ContrastiveConfig, [*NEEDED, "--output", "f.json"], own=("output",))
        assert own == {"output": "f.json"}


BAD_PAIRS = [
    (["--optim.num_epochs", "1"], "optim.max_steps 10 and optim.num_epochs 1.0", "null"),
    (["--optim.max_steps", "null"], "neither optim.max_steps", "--optim.num_epochs"),
    (["--optim.warmup_steps", "10"], "optim.warmup_steps 10 with optim.max_steps 10", "fewer"),
    (["--engine.params", "sharded"], "sharded on ddp", "zero3 or fsdp2"),
    (["--engine.params=sharded", "--engine.name=zero2"], "sharded on zero2", "zero3 or fsdp2"),
    (["--engine.offload_optimizer", "true"], "offload_optimizer on ddp", "zero1, zero2, zero3"),
    (
        ["--engine.offload_optimizer=true", "--engine.name=fsdp2", "--engine.device=cpu"],
        "on fsdp2 with engine.device cpu",
        "zero1 to 3",
    ),
    (["--ema.start_step=3"], "ema.start_step 3 without ema.decay", "set ema.decay"),
    (["--ema.decay=0.9", "--ema.start_step=10"], "with optim.max_steps 10", "before the last"),
    (["--lora.vision", "true"], "lora.enabled is false", "lora.enabled true"),
    (["--lora.r=4", "--lora.dora=true"], "lora.r 4, lora.dora true while", "leave them out"),
    (["--lora.enabled=true", "--lora.vision_r=4"], "neither lora.vision nor", "lora.merger true"),
    (
        ["--lora.enabled=true", "--lora.merger=true", "--model.unfrozen=vision,merger"],
        "merger in model.unfrozen with lora.merger true",
        "drop one",
    ),
    (["--model.unfrozen=text", "--lora.enabled=true"], "with lora.enabled true", "drop one"),
    (
        ["--model.unfrozen=vision", "--loss.learnable_temperature=false"],
        "nothing would train",
        "unfreeze text",
    ),
    (["--loss.bias", "-5"], "loss.bias -5 with loss.name infonce", "siglip"),
    (["--loss.bidirectional=true", "--loss.name=siglip"], "no direction", "infonce"),
    (["--loss.matryoshka_dims", "8,4,8"], "[8, 4, 8], which names", "once"),
    (
        ["--loss.matryoshka_dims=8,4", "--loss.matryoshka_weights=1"],
        "1 loss.matryoshka_weights for 2",
        "one weight to each",
    ),
    (["--eval.every_steps", "5"], "eval.every_steps 5 without data.eval", "data.eval"),
    (["--eval.corpus", "c"], "eval.corpus c without data.eval", "data.eval"),
    (["--eval.max_rows", "5"], "eval.max_rows 5 without data.eval", "data.eval"),
    (["--checkpoint.best_metric", "eval/acc"], "'eval/acc'", "eval/accuracy"),
    (["--checkpoint.best_metric", "eval/loss"], "without data.eval", "data.eval"),
    (
        ["--eval.retrieval=false", "--data.eval=e"],
        "eval/ndcg@10 while eval.retrieval is false",
        "eval/loss",
    ),
    (
        ["--eval.retrieval=false", "--data.eval=e", "--eval.corpus=c"],
        "eval.corpus while eval.retrieval is false",
        "eval.corpus null",
    ),
    (
        ["--batch.chunk_tokens=9"],
        "batch.chunk_tokens 9 with batch.chunk_size 16, which counts rows",
        "batch.chunk_size auto",
    ),
    (["--train=query,query"], "train ['query', 'query']", "each part once"),
    (["--train=document"], "train without query", "[query, document] or [query]"),
    (
        ["--train=query", "--model.adapter=a"],
        "train [query] with model.adapter",
        "model.adapter out",
    ),
    (
        ["--train=query", "--model.unfrozen=text,merger"],
        "train [query] with model.unfrozen ['merger']: no query goes through",
        "model.unfrozen out",
    ),
    (
        ["--train=query", "--lora.enabled=true", "--lora.vision=all"],
        "train [query] with lora.vision 'all'",
        "[query, document]",
    ),
    (["--checkpoint.keep_best=true"], "keep_best true without data.eval", "data.eval"),
    (
        ["--checkpoint.init_from=a", "--resume=runs/gone/checkpoint-5"],
        "checkpoint.init_from beside checkpoint.resume",
        "one of them",
    ),
    (["--resume", "atuo"], "'atuo', and there is no such folder", "auto, never"),
]


@pytest.mark.parametrize(("flags", "got", "remedy"), BAD_PAIRS)
def test_what_cannot_stand_together(flags: list[str], got: str, remedy: str):
    text = mistakes(*flags)
    assert got in text
    assert remedy in text.partition("fix: ")[2]


@pytest.mark.parametrize(
    "flags",
    [
        ["--optim.max_steps=null", "--optim.num_epochs=0.5"],
        ["--optim.warmup_steps", "9"],
        ["--engine.params=sharded", "--engine.name=zero3"],
        ["--engine.params=resident", "--engine.name=zero3"],
        ["--engine.offload_optimizer=true", "--engine.name=zero1"],
        ["--engine.offload_optimizer=true", "--engine.name=fsdp2"],
        ["--lora.vision=true", "--lora.enabled=true"],
        ["--loss.matryoshka_dims=8,4", "--loss.matryoshka_weights=1,0.5", "--loss.tile_size=9"],
        ["--data.eval=e", "--eval.every_steps=5", "--checkpoint.best_metric=eval/loss"],
        ["--eval.retrieval=false"],
        ["--optim.max_grad_norm=0"],
        ["--train=query", "--lora.enabled=true"],
        ["--batch.chunk_size=auto", "--batch.chunk_tokens=9"],
        ["--resume=runs/gone/checkpoint-5"],
    ],
)
def test_what_can_stand_together(flags: list[str]):
    config_of(*flags)


def test_an_option_of_two_kinds_is_described_once():
    text = mistakes("--batch.chunk_size", "aut")
    assert "got 'aut', expected an integer of 1 or more or auto; did you mean auto?" in text
    assert text.startswith("1 problem ")


def test_a_list_of_choices_names_them():
    text = mistakes("--model.unfrozen=foo")
    assert "expected a list of some of text, vision, merger or null" in text


def test_siglip_starts_as_in_its_paper():
    loss = config_of("--loss.name=siglip").loss
    assert (loss.initial_temperature, loss.initial_bias) == (0.1, -10.0)
    loss = config_of("--loss.name=siglip", "--loss.bias=-5", "--loss.temperature=0.5").loss
    assert (loss.initial_temperature, loss.initial_bias) == (0.5, -5.0)
    assert config_of().loss.initial_bias is None


def test_a_temperature_out_of_its_range_is_refused():
    for value in ("2", "0.001"):
        text = mistakes("--loss.temperature", value)
        assert f"got '{value}', expected a number of 0.01 or more and at most 1 or null" in text


def test_conflicts_are_told_beside_other_mistakes_but_not_because_of_them():
    text = mistakes("--engine.params=sharded", "--batch.chunk_size=0", "--optim.max_steps=x")
    assert "sharded on ddp" in text
    assert "got 'x'" in text
    assert "neither" not in text
    assert text.startswith("3 problems")


def test_conflicts_are_found_without_the_loader():
    with pytest.raises(ValidationError, match="neither optim"):
        ContrastiveConfig(model={"name_or_path": "m"}, data={"train": ["t"]})


@pytest.mark.parametrize("flag", ["--seed", "--optim.learning_rate", "--optim.max_grad_norm"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_are_finite(flag: str, value: str):
    assert f"got '{value}', expected" in mistakes(flag, value)


class TestDeepSpeedFile:
    @pytest.fixture
    def file(self, tmp_path):
        def _file(text: str) -> str:
            (tmp_path / "ds.json").write_text(text)
            return str(tmp_path / "ds.json")

        return _file

    def test_the_stage_picks_the_engine(self, file):
        path = file('{"zero_optimization": {"stage": 2}}')
        assert config_of("--deepspeed", path).engine.name == "zero2"
        assert config_of("--deepspeed", path, "--engine.name", "zero2").engine.name == "zero2"

    def test_offload_comes_with_the_file(self, file):
        text = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
        assert config_of("--deepspeed", file(text)).engine.offload_optimizer is True
        said = mistakes("--deepspeed", file(text), "--engine.offload_optimizer", "false")
        assert "engine.offload_optimizer false with" in said

    def test_precision_comes_with_the_file(self, file):
        text = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
        assert config_of("--deepspeed", file(text)).engine.precision == "bf16"
        said = mistakes("--deepspeed", file(text), "--engine.precision", "fp32")
        assert "engine.precision fp32 with" in said

    def test_auto_leaves_the_stage_to_the_job(self, file):
        path = file('{"zero_optimization": {"stage": "auto"}}')
        assert config_of("--deepspeed", path, "--engine.name", "zero3").engine.name == "zero3"
        assert "engine.name ddp with engine.deepspeed" in mistakes("--deepspeed", path)

    def test_contradictions(self, file):
        path = file('{"zero_optimization": {"stage": 3}}')
        assert "a file of stage 3" in mistakes("--deepspeed", path, "--engine.name", "zero2")
        assert "zero0 to zero3" in mistakes("--deepspeed", path, "--engine.name", "fsdp2")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{", "double quotes at line 1 column 2"),
            ("[]", "a JSON object"),
            ('{"a": 1, "a": 2}', 'names the key "a" more than once'),
            ('{"zero_optimization": {"stage": 7}}', "stage 0 to 3 (it has 7)"),
            ('{"zero_optimization": {"stage": true}}', "stage 0 to 3 (it has True)"),
            ('{"zero_optimization": 3}', "zero_optimization is an object"),
        ],
    )
    def test_broken_files(self, file, text: str, expected: str):
        said = mistakes("--deepspeed", file(text))
        assert "engine.deepspeed (--deepspeed)" in said
        assert expected in said

    def test_a_missing_file(self):
        said = mistakes("--deepspeed", "nowhere.json", "--batch.chunk_size", "0")
        assert "got 'nowhere.json', expected a readable JSON file (No such file" in said
        assert said.startswith("2 problems")


TEXTS = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\u2028\u2029\ufeff"),
    min_size=1,
)


@given(text=TEXTS, rate=st.floats(1e-300, 1e300), seed=st.integers(0, 2**32 - 1))
def test_a_dump_is_read_back_as_it_was(text: str, rate: float, seed: int, tmp_path_factory):
    config = ContrastiveConfig(
        model={"name_or_path": text, "query_instruction": text},
        data={"train": ["a"], "eval": ["b"]},
        optim={"learning_rate": rate, "num_epochs": 1},
        seed=seed,
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump(config), "utf-8")
    assert load(ContrastiveConfig, ["--config", str(path)])[0] == config


@pytest.mark.parametrize(
    "text", ["on", "no", "1e-5", "2e5", "null", "~", "0x1", "true", "3", "1:30"]
)
def test_texts_that_look_like_something_else_survive_a_dump(text: str, tmp_path):
    config = config_of(f"--model.name_or_path={text}")
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(ContrastiveConfig, ["--config", str(path)])[0].model.name_or_path == text


def test_the_fingerprint_tells_what_is_trained_not_where():
    base = fingerprint(config_of())
    assert base == fingerprint(config_of("--output_dir=x", "--engine.name=zero2", "--resume=never"))
    assert base != fingerprint(config_of("--seed=1"))
    assert base != fingerprint(config_of("--optim.learning_rate=3e-5"))
    assert len(base) == 64


def test_every_option_is_explained_in_the_help():
    text = help_text("pixelrag contrastive", "train", ContrastiveConfig)
    for path, field in options_of(ContrastiveConfig).items():
        assert field.description, f"{path} has no documentation"
        assert f"  --{path}  " in text
        assert field.description in text
    assert max(len(line) for line in text.splitlines()) <= 100
