"""Every shipped YAML and DeepSpeed file is one that a run accepts."""

from pathlib import Path

import pytest

from pixelrag.config.base import dump, load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.jobs import config_class, job_of
from pixelrag.config.yaml_file import read_yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DS_FILES = sorted((ROOT / "ds_configs").glob("*.json"))


def test_there_are_some():
    assert len(RECIPES) >= 3
    names = [path.stem for path in DS_FILES]
    stage2, stage3 = ([f"zero{z}", f"zero{z}_bf16", f"zero{z}_offload"] for z in (2, 3))
    assert names == ["zero0", "zero1", *stage2, *stage3]
    table = (ROOT / "ds_configs" / "README.md").read_text()
    assert all(f"`{name}.json`" in table for name in names)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_whole_configuration(path: Path):
    given = read_yaml(path).values
    flags = ["--config", str(path)]
    config, _ = load(config_class(job_of(flags)), flags)
    # What a recipe sets is what the job gets: nothing is shadowed or lost on the way.
    for name, values in given.items():
        got = getattr(config, name)
        for leaf, value in values.items() if isinstance(values, dict) else ():
            expected = [value] if name == "data" and leaf in ("train", "eval", "text") else value
            assert getattr(got, leaf) == expected
        if not isinstance(values, dict):
            assert got == values
    assert config.output_dir.startswith("runs/")
    names = ("model", "student", "teacher", "question_encoder", "document_encoder", "generator")
    models = [getattr(config, name) for name in names if hasattr(config, name)]
    assert models
    assert not any(model.trust_remote_code for model in models)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_no_path_of_one_machine(path: Path):
    text = path.read_text()
    assert "http" not in text
    assert not any(word.startswith("/") for word in text.split())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("path", DS_FILES, ids=lambda path: path.stem)
def test_a_deepspeed_file_resolves_without_a_leftover(path: Path, bf16: bool, tmp_path: Path):
    from pixelrag.engine.ds_config import read_ds_config, resolve

    flags = ["--model.name_or_path=m", "--data.train=t", "--optim.max_steps=1"]
    bf16 = bf16 or path.stem.endswith("_bf16")
    precision = [f"--engine.precision={'bf16' if bf16 else 'fp32'}"]
    if path.stem.endswith("_bf16"):
        precision = []  # the file says it
    config, _ = load(ContrastiveConfig, [*flags, *precision, "--deepspeed", str(path)])
    assert config.engine.precision == ("bf16" if bf16 else "fp32")
    assert config.engine.name == path.stem.partition("_")[0]
    assert config.engine.offload_optimizer == path.stem.endswith("_offload")
    resolved = resolve(
        read_ds_config(path),
        stage=int(config.engine.name[-1]),
        world_size=2,
        bf16=bf16,
        per_chunk=False,
        resident=False,
        num_trained=1000,
        offload_optimizer=config.engine.offload_optimizer,
    )
    assert "'auto'" not in str(resolved)
    assert resolved["gradient_clipping"] == 0.0
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(ContrastiveConfig, ["--config", str(tmp_path / "again.yaml")])[0] == config
