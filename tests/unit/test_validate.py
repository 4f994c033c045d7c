"""`pixelrag validate`: each bad row by file, line and reason, and exit code 3."""

import json
import logging
from pathlib import Path

import pytest
from PIL import Image
from transformers import BertModel

from pixelrag.cli import main

RUN = ["validate", "--model.name_or_path=model", "--optim.max_steps=1"]


@pytest.fixture
def rows(tmp_path, monkeypatch, tiny_models):
    """Writes a JSONL file of rows (text stands for a broken line) beside a model and two images."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(tiny_models["qwen3_vl"])
    Path("bert").symlink_to(tiny_models["bert"])
    Image.new("RGB", (8, 8), "white").save("page.png")
    whole = Path("page.png").read_bytes()
    Path("torn.png").write_bytes(whole[: len(whole) // 2])

    def _rows(name: str, *items: object) -> str:
        lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
        Path(name).write_text("\n".join(lines) + "\n", "utf-8")
        return name

    return _rows


def test_good_rows(rows, capsys):
    rows(
        "t.jsonl",
        {"query": "a", "passage": "b"},
        {"query": "c", "chunk_path": "page.png", "source_dataset": "x"},
    )
    rows("e.jsonl", {"query": "d", "passage": "e", "neg_passages": ["f"]})
    assert main([*RUN, "--data.train=t.jsonl", "--data.eval=e.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "t.jsonl: 2 rows, 2 distinct documents, 0 bad rows",
        "e.jsonl: 1 rows, 2 distinct documents, 0 bad rows",
    ]
    assert lines[-1] == "valid"


def test_each_bad_row_is_named_once(rows, capsys, caplog):
    good = {"query": "a", "passage": "b"}
    rows(
        "t.jsonl", good, "{", {"query": " ", "passage": "b"}, {"query": "x", "chunk_path": "no.png"}
    )
    rows("e.jsonl", {"query": "x", "chunk_path": "torn.png"})
    assert main([*RUN, "--data.train=t.jsonl,gone.jsonl", "--data.eval=e.jsonl"]) == 3
    out = capsys.readouterr().out
    for place in ("t.jsonl:2: ", "t.jsonl:3: ", "t.jsonl:4: ", "e.jsonl:1: "):
        assert sum(line.startswith(place) for line in out.splitlines()) == 1, place
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "no.png" in out
    assert "gone.jsonl" in out
    assert "t.jsonl: 4 rows, 1 distinct documents, 3 bad rows" in out
    assert out.endswith("not valid\n")


def test_bad_rows_that_training_would_skip_are_named_and_valid(rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"}, "{")
    rows("bad.jsonl", "{")
    skip = "--data.bad_rows=skip"
    assert main([*RUN, "--data.train=t.jsonl", skip]) == 0
    assert "t.jsonl:2: " in capsys.readouterr().out
    assert main([*RUN, "--data.train=bad.jsonl", skip]) == 3


def test_images_are_no_rows_of_text(rows, capsys):
    text, image = {"query": "a", "passage": "b"}, {"query": "c", "chunk_path": "page.png"}
    rows("t.jsonl", text, image)
    flags = ["--data.train=t.jsonl", "--data.text=t.jsonl", "--data.text_mix_ratio=0.5"]
    assert main([*RUN, *flags, "--data.bad_rows=skip"]) == 3
    out = capsys.readouterr().out
    assert out.count("t.jsonl:2: document") == 1
    assert "page.png is an image, and data.text is for rows of text" in out
    rows("t.jsonl", text)
    assert main([*RUN, *flags]) == 0


def test_the_corpus_is_read_too(rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"})
    rows("c.jsonl", {"id": "1", "text": "b"}, {"id": "1", "text": "c"})
    flags = ["--data.train=t.jsonl", "--data.eval=t.jsonl", "--eval.corpus=c.jsonl"]
    assert main([*RUN, *flags]) == 3
    assert "c.jsonl" in capsys.readouterr().out
    rows("c.jsonl", {"id": "1", "text": "b"}, {"id": "2", "text": "c"})
    assert main([*RUN, *flags]) == 0
    assert "c.jsonl: 2 distinct documents to search" in capsys.readouterr().out


def test_a_wrong_configuration_comes_first(rows, capsys):
    rows("t.jsonl", "{")
    assert main([*RUN, "--data.train=t.jsonl", "--batch.chunk_size=0"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "batch.chunk_size" in shown.err


def test_the_run_in_figures(rows, capsys):
    """24 rows with a document and two negatives each, on two processes of four rows."""
    rows("t.jsonl", *({"query": f"a{i}", "passage": f"b{i}", "neg_passages": [f"c{i}", f"d{i}"]}
                      for i in range(24)))  # fmt: skip
    flags = [
        "--data.train=t.jsonl", "--model.name_or_path=bert", "--world_size=2",
        "--batch.per_device_batch_size=4", "--batch.gradient_accumulation_steps=2",
        "--batch.chunk_size=3", "--optim.max_steps=null", "--optim.num_epochs=2",
        "--model.document_max_length=3",
    ]  # fmt: skip
    assert main([*RUN, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "a step: 4 a rank x 2 ranks x 2 accumulated = 16 rows, through the model in chunks of 3",
        "a query is told from about 23 negatives: the documents of 8 rows of all processes, 3.00 "
        "each, without its own positives",
        "24 rows, 1.5 steps an epoch; 3 steps, 2.00 epochs",
    ]
    (queries,) = (line for line in lines if line.startswith("queries"))
    (documents,) = (line for line in lines if line.startswith("documents of text"))
    # [CLS], the letter, the number's digits, [SEP].
    assert queries.startswith("queries (24): half have at most 5 tokens, 99 % at most 5, ")
    assert documents.startswith("documents of text (72): half")
    assert documents.endswith("; 100.0% are longer than model.document_max_length 3")
    assert any(line.startswith("time: at least ") and "on 2 x cpu" in line for line in lines)
    # Two a parameter of the layers and token, four passes (one is GradCache's), 3 steps of 16 rows
    # with a query of 4 or 5 tokens and three documents of 3.
    layers = BertModel.from_pretrained("bert").encoder.layer
    body, tokens = sum(p.numel() for p in layers.parameters()), (10 * 4 + 14 * 5) / 24 + 3 * 3
    (time,) = (line for line in lines if line.startswith("time: at least "))
    assert f": {2 * 4 * body * tokens * 16 * 3 / 1e12:,.3g} TFLOP at " in time
    assert main([*RUN, *flags, "--device=h200"]) == 0
    told = capsys.readouterr().out
    assert "on 2 x h200, a bound of the planner's by " in told
    assert "at 40% MFU" in told
    assert main([*RUN, *flags, "--device=abacus"]) == 2
    assert "--device: got 'abacus', expected one of " in capsys.readouterr().err
    assert main([*RUN, *flags, "--world_size=none"]) == 2
    assert "--world_size: got 'none', expected a number of processes" in capsys.readouterr().err


def test_the_time_is_unknown_where_it_cannot_be_known(rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"})
    assert main([*RUN, "--data.train=t.jsonl", "--engine.device=cuda"]) == 0
    assert "time: unknown; engine.device is cuda, and there is none here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--lora.enabled=true", "--lora.vision=all"], 4, "lora.vision is all, but BertModel has"),
        (["--lora.enabled=true", "--lora.merger=true"], 4, "lora.merger is true, but BertModel"),
        (["--lora.enabled=true", "--lora.target_modules=nope"], 4, "'nope' matches no linear"),
        (["--model.unfrozen=vision"], 4, "model.unfrozen names vision, which the model lacks"),
        (["--model.name_or_path=gone/gone/gone"], 4, "there is no such folder"),
        (["--loss.mask_guide=gone/gone/gone"], 4, "there is no such folder"),
        (["--data.train=p.jsonl"], 3, "p.jsonl:1: document"),
    ],
)
def test_what_the_model_lacks_is_found_without_weights(flags, code, told, rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"})
    rows("p.jsonl", {"query": "a", "chunk_path": "page.png"})
    assert main([*RUN, "--model.name_or_path=bert", "--data.train=t.jsonl", *flags]) == code
    out = capsys.readouterr().out
    assert told in out
    assert ".jsonl: 1 rows" in out
    assert out.endswith("not valid\n")


def test_a_histogram_is_a_count():
    from pixelrag.validate.histogram import histogram

    lengths = [*range(1, 17)] * 10 + [500]
    lines = histogram("texts", lengths, 100, "limit", num_all=2000)
    assert lines[0] == (
        "texts (161 of 2,000): half have at most 9 tokens, 99 % at most 16, the longest 500; 0.6% "
        "are longer than limit 100"
    )
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["1", "-", "2"],
        ["3", "-", "4"],
        ["5", "-", "6"],
    ]
    assert [line.count("#") for line in lines[1:]] == [40] * 8 + [2]
    assert lines[-1].split()[0] == "more"
    assert sum(float(line.rsplit(maxsplit=1)[1][:-1]) for line in lines[1:]) == pytest.approx(
        100, abs=0.5
    )
    assert histogram("one", [7], 8, "limit")[1].split() == ["7", "#" * 40, "100.0%"]
