"""`pixelrag export` of a RAG checkpoint: `transformers` alone makes of every part what it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from pixelrag.cli import main
from tests.distributed import rag_runs
from tests.train import nursery

pytestmark = pytest.mark.distributed

QUESTIONS = ["what is the fox", "what color has the engine, and what the dog"]
ANSWERS = ["brown", "it is red"]
TOLERANCE = 1e-5
ADAPTERS = [
    "--encoder_lora.enabled=true",
    "--generator_lora.enabled=true",
    "--generator_lora.target_modules=q,v,wo",
]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    rag_runs.make_material(folder)
    return folder


def _trained(material: Path, run: Path, *flags: str) -> dict[str, Any]:
    """Train; return what the run's own models made of `QUESTIONS` at its end."""
    file = run.with_suffix(".pt")
    payload = {"file": str(file), "questions": QUESTIONS, "answers": ANSWERS}
    rates = ["--optim.max_steps=2", "--optim.learning_rate=1e-2"]
    nursery.run(
        ["rag", *rag_runs.flags(material, run), *rates, *flags],
        setup="tests.train.faults:answer_at_the_end", payload=payload,
    ).check()  # fmt: skip
    return torch.load(file, weights_only=True)


def _export(run: Path, output: Path, *flags: str) -> Path:
    words = ["export", str(run / "checkpoint-2"), "--to", "hf", "--output", str(output), *flags]
    assert main(words) == 0
    return output


def _embedded(folder: Path, texts: list[str]) -> torch.Tensor:
    """The mean of the last states, of length 1."""
    settings = json.loads((folder / "pixelrag.json").read_text())
    assert (settings["pooling"], settings["normalize"]) == ("mean", True)
    assert not settings["query_instruction"]
    assert not (folder / "adapter_config.json").exists()
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _differ(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max())


@pytest.mark.parametrize("adapted", [False, True])
def test_every_part_loads_and_does_what_it_did(material: Path, tmp_path: Path, adapted: bool):
    two = f"--document_encoder.name_or_path={material / 'passages'}"
    own = _trained(material, tmp_path / "run", two, *(ADAPTERS if adapted else []))
    folder = _export(tmp_path / "run", tmp_path / "out")
    there = sorted(path.name for path in folder.iterdir())
    assert there == ["document_encoder", "generator", "question_encoder"]
    before = {"query": "questions", "document": "passages"}
    for role, part in (("query", "question_encoder"), ("document", "document_encoder")):
        embedded = _embedded(folder / part, QUESTIONS)
        assert _differ(embedded, own[role]) <= TOLERANCE
        base = AutoModel.from_pretrained(material / before[role], add_pooling_layer=False)
        trained = load_file(folder / part / "model.safetensors")
        assert any(_differ(trained[name], w) > 1e-3 for name, w in base.state_dict().items())
        assert f"from `{material / before[role]}`" in (folder / part / "README.md").read_text()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "generator").eval()
    assert "AutoModelForSeq2SeqLM.from_pretrained" in (folder / "generator/README.md").read_text()
    inputs, targets = own["inputs"], own["inputs"]["target_ids"]
    asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**asked, labels=targets).logits
        written = model.generate(**asked, max_new_tokens=6, do_sample=False)
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    mask = inputs["target_mask"].bool()
    assert _differ(log_probs[mask], own["log_probs"][mask]) <= TOLERANCE
    tokenizer = AutoTokenizer.from_pretrained(folder / "generator")
    answers, expected = (
        tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for tokens in (written, own["written"])
    )
    assert answers == expected
    if not adapted:
        _options_count_for_every_part(tmp_path / "run", folder, tmp_path / "half")


def _options_count_for_every_part(run: Path, whole: Path, half: Path) -> None:
    _export(run, half, "--dtype", "bfloat16", "--max-shard-size", "8KB")
    for part in ("question_encoder", "document_encoder", "generator"):
        index = json.loads((half / part / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1
        found = {k: v for name in files for k, v in load_file(half / part / name).items()}
        expected = load_file(whole / part / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name].bfloat16()) for name in expected)
