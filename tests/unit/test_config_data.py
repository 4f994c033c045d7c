"""The contrastive job's data options: every one has something to act on, or is refused."""

import pytest

from pixelrag.config.base import dump, load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.errors import ConfigError

NEEDED = ["--model.name_or_path=m", "--data.train=a.jsonl,b.jsonl", "--optim.max_steps=10"]
TEXT = "--data.text=t.jsonl"


def config_of(*flags: str) -> ContrastiveConfig:
    return load(ContrastiveConfig, [*NEEDED, *flags])[0]


def test_sets_and_text_options_of_flags():
    flags = ["--data.weights=44,5", "--data.mixing=homogeneous", TEXT, "--data.text_mix_ratio=0.2"]
    config = config_of(*flags)
    assert config.data.weights == [44.0, 5.0]
    assert config.data.text == ["t.jsonl"]
    assert ContrastiveConfig.model_validate(config.model_dump()) == config
    assert "weights:" in dump(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.weights=1,2"], "data.weights with data.mixing pooled"),
        (["--data.weights=1", "--data.mixing=homogeneous"], "1 data.weights for 2 of data.train"),
        (["--data.weights=1,0", "--data.mixing=homogeneous"], "a list of numbers"),
        (["--data.text_warmup_steps=1"], "data.text_warmup_steps without data.text"),
        (["--data.text_mix_ratio=0.5"], "data.text_mix_ratio without data.text"),
        (["--data.text_curriculum=true"], "data.text_curriculum without data.text"),
        ([TEXT], "nothing that says when to train on it"),
        (
            [TEXT, "--data.text_curriculum=true", "--data.text_mix_ratio=0.5"],
            "data.text_mix_ratio 0.5 with data.text_curriculum",
        ),
        ([TEXT, "--data.text_warmup_steps=1", "--data.text_mix=rows"], "and no share of text"),
        (
            [TEXT, "--data.text_mix_ratio=.5", "--data.text_mix=rows", "--data.mixing=homogeneous"],
            "data.text_mix rows with data.mixing homogeneous",
        ),
        ([TEXT, "--data.text_warmup_steps=10"], "so that data.train is never trained on"),
        ([TEXT, "--data.text_mix_ratio=1"], "below 1"),
    ],
)
def test_options_without_effect_are_refused(flags, words):
    with pytest.raises(ConfigError) as caught:
        config_of(*flags)
    assert words in str(caught.value)
