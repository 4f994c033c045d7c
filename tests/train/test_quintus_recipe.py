"""The home recipe, checked on models of its true sizes of which only the small files are here."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from pixelrag.cli import main
from tests.train.material import write_jsonl

RECIPE = Path(__file__).parents[2] / "recipes" / "quintus_qwen3_8b_to_1_7b.yaml"
TOKENS, ROWS = 151_669, 151_936
# From 151,643 on, as Qwen3 has them; what stands between is of tools and pictures there.
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|{number}|>" for number in range(21)),
    *("<think>", "</think>"),
)
# As the models' own config.json have it.
SIZES = {
    "teacher": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "student": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """`student` and `teacher`: config.json and a tokenizer of as many tokens as Qwen3's."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: number for number, token in enumerate(sorted(letters))}
    for number in range(len(vocabulary), TOKENS - len(SPECIALS)):
        vocabulary[f"piece {number}"] = number
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIALS), chat_template=CHAT,
    )  # fmt: skip
    assert len(fast) == TOKENS
    root = tmp_path_factory.mktemp("qwen3")
    for name, sizes in SIZES.items():
        config = Qwen3Config(
            vocab_size=ROWS, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
            architectures=["Qwen3ForCausalLM"], **sizes,
        )  # fmt: skip
        config.save_pretrained(root / name)
        fast.save_pretrained(root / name)
    return {name: root / name for name in SIZES}


def test_the_home_recipe_is_valid_and_costs_what_was_reckoned(
    folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    # Rows that are full of one sample each, of which all but the first token is learnt from.
    texts = [{"text": letter * 5000} for letter in "abcdefghijklmnopq"]
    flags = [
        *("--config", str(RECIPE), "--data.eval_samples=1"),
        f"--data.train={write_jsonl(tmp_path / 'train.jsonl', texts)}",
        *(f"--{name}.name_or_path={folder}" for name, folder in folders.items()),
    ]
    assert main(["validate", *flags]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nvalid\n")
    parameters = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) parameters", out)]
    assert parameters == [1_720_574_976, 8_190_735_360]
    assert f"vocabulary: {TOKENS:,} shared tokens" in out
    assert out.count("151,936 vocabulary rows") == 2
    # facts: 28.1 GFLOP a token, 4.4 GB for the loss at a chunk of 2,048, 28 to 31 GB for student
    # and AdamW, 16.4 GB for the teacher, two times 9.96 GB for whole logits.
    number = r"([\d,.]+)"
    found = {
        name: float(re.search(pattern.replace("N", number), out)[1])
        for name, pattern in {
            "state": r"gradients and AdamW N GiB",
            "teacher": r"; teacher N GiB",
            "loss": r"the loss N GiB",
            "logits": r"whole logits of both models: N GiB",
            "operations": r"N GFLOP a token",
        }.items()
    }
    gb = {name: value * 1.073741824 for name, value in found.items()}
    assert gb["loss"] == pytest.approx(4.35, abs=0.01)
    assert gb["state"] == pytest.approx(18 * 1.720574976, abs=0.01)
    assert gb["teacher"] == pytest.approx(2 * 8.19073536, abs=0.01)
    assert gb["logits"] == pytest.approx(2 * 9.94, abs=0.01)
    assert found["operations"] == pytest.approx(28.1, abs=0.05)
    assert (
        "16 rows of 4,096 tokens, 100.00% full; a step sees 8 of them (4 a rank x 1 ranks x 2 "
        "accumulated); 2 steps, 1.00 epochs" in out
    )


def test_the_vocabulary_of_qwen25_would_cut_the_thinking_tokens(folders, tmp_path, capsys):
    thought = "<think>\nso\n</think>\n\nyes"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": thought}]
    flags = [
        *("--config", str(RECIPE), "--data.eval_samples=null", "--eval.every_steps=null"),
        f"--data.train={write_jsonl(tmp_path / 'train.jsonl', [{'messages': chat}])}",
        *(f"--{name}.name_or_path={folder}" for name, folder in folders.items()),
    ]
    assert main(["validate", *flags, "--loss.vocab_size=151665"]) == 3
    assert "holds token 151667, but the models share the first 151665 only" in (
        capsys.readouterr().out
    )
    assert main(["validate", *flags]) == 0
