"""`pixelrag eval --samples`: what student and teacher write is what the models themselves write."""

import html
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pixelrag.cli import main
from tests.train import nursery
from tests.train.material import command, merged, write_jsonl

CHATS = [
    {"messages": [
        {"role": "user", "content": f"{'over the lazy dog ' * times}the quick {word}"},
        {"role": "assistant", "content": f"jumps over the lazy {word}"},
    ]}
    for times, word in enumerate(("fox", "dog", "engine"))
] + [{"text": "the brown fox jumps over the lazy dog and the quick documents"}]  # fmt: skip


@pytest.fixture
def sheet(tmp_path, lesson):
    """Runs the evaluation on four samples; returns the texts of each side, by sample."""
    held_out = write_jsonl(tmp_path / "held_out.jsonl", CHATS)

    def _run(*overrides: dict, nproc: int = 0) -> dict[str, list[str]]:
        data = {"data": {"eval": held_out, "eval_samples": None}, "loss": {"chunk_size": 64}}
        words = command(tmp_path, merged(lesson, data, *overrides), "eval")
        words += ["--samples", str(tmp_path / "sheet.html")]
        if nproc:
            nursery.run(words, nproc=nproc).check()
        else:
            assert main(words) == 0
        return texts_of((tmp_path / "sheet.html").read_text())

    return _run


def texts_of(page: str) -> dict[str, list[str]]:
    found = {"prompt": re.findall('<div class="prompt">(.*?)</div>', page, re.DOTALL)}
    for side in ("reference", "student", "teacher"):
        pattern = f'>{side}</span><span class="text">(.*?)</span>'
        found[side] = re.findall(pattern, page, re.DOTALL)
    return {side: [html.unescape(text) for text in texts] for side, texts in found.items()}


def written_by(folder: Path, prompts: list[list[int]], ends: list[int], most: int) -> list[str]:
    """By transformers itself, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + most:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in ends:
                    break
        texts.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip("\n"))
    return [text or "(nothing)" for text in texts]


def test_both_write_what_the_models_write(sheet, classroom):
    found = sheet()
    assert [len(texts) for texts in found.values()] == [4] * 4
    assert found["reference"][0] == "jumps over the lazy fox"
    assert found["prompt"][0].endswith("the quick fox\nassistant")
    assert found["prompt"][3] + found["reference"][3] == CHATS[3]["text"]
    tokenizer = AutoTokenizer.from_pretrained(classroom / "tied")
    prompts = [
        tokenizer.apply_chat_template(
            chat["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for chat in CHATS[:3]
    ]
    longest = max(len(tokenizer(text)["input_ids"]) for text in found["reference"])
    most = 2 * (longest + 1) + 8  # its end counts
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    for side, name in (("student", "tied"), ("teacher", "teacher")):
        assert found[side][:3] == written_by(classroom / name, prompts, ends, most), side
    assert found["student"] != found["teacher"]


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_sharded_models_write_the_same(engine, sheet):
    sharded = {"engine": {"name": engine}, "teacher": {"placement": "sharded"}}
    assert sheet(sharded, nproc=2) == sheet()


def test_it_is_for_students(tmp_path, capsys):
    retriever = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": "m"},
        "data": {"train": "t.jsonl", "eval": "t.jsonl"},
    }
    assert main([*command(tmp_path, retriever, "eval"), "--samples", "x.html"]) == 2
    assert "--samples: only a student writes samples" in capsys.readouterr().err
