"""Tensors and scalars come back exactly; damaged files are named; steps draw what is theirs."""

import itertools
import math
import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from pixelrag.errors import CheckpointError
from pixelrag.train.run_state import seed_step
from pixelrag.train.state import load_tensors, save_tensors


def test_round_trip_is_exact(tmp_path):
    base = torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7
    tied = torch.nn.Parameter(torch.randn(5))
    tensors = {
        "bf16": torch.randn(3, 2).to(torch.bfloat16),
        "scalar": torch.tensor(math.pi, dtype=torch.float64),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "whole": base,
        "row": base[1],
        "transposed": base.T,
        "tied.a": tied,
        "tied.b": tied,
        "nan": torch.tensor([math.nan, -math.inf]),
    }
    scalars = {"lr": 0.1 + 0.2, "big": 2**70, "list": [1, None, True], "text": "ü"}
    save_tensors(tmp_path / "rank-0", tensors, scalars)
    assert sorted(os.listdir(tmp_path)) == ["rank-0.json", "rank-0.safetensors"]
    got, got_scalars = load_tensors(tmp_path / "rank-0")
    assert got_scalars == scalars
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].nan_to_num(5), tensor.detach().nan_to_num(5)), name


def test_a_dotted_name_keeps_its_dots_and_no_scalars_is_fine(tmp_path):
    save_tensors(tmp_path / "optimizer.0", {})
    assert load_tensors(tmp_path / "optimizer.0") == ({}, {})
    assert sorted(os.listdir(tmp_path)) == ["optimizer.0.json", "optimizer.0.safetensors"]


@pytest.mark.parametrize("scalars", [{"a": math.nan}, {"a": torch.ones(1)}])
def test_scalars_that_are_no_json_are_refused_before_writing(tmp_path, scalars):
    with pytest.raises(CheckpointError, match=r"x\.json: the scalars do not fit JSON"):
        save_tensors(tmp_path / "x", {"a": torch.ones(1)}, scalars)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("x.safetensors", "remove", r"x\.safetensors: missing"),
        ("x.json", "remove", r"x\.json: missing"),
        ("x.safetensors", "truncate", r"x\.safetensors: cannot be read"),
        ("x.json", "truncate", r"x\.json: cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, file, damage, message):
    save_tensors(tmp_path / "x", {"a": torch.ones(100)}, {"step": 1})
    if damage == "remove":
        (tmp_path / file).unlink()
    else:
        os.truncate(tmp_path / file, (tmp_path / file).stat().st_size - 3)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(tmp_path / "x")


def test_a_list_is_no_state(tmp_path):
    save_tensors(tmp_path / "x", {})
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="got list, expected an object"):
        load_tensors(tmp_path / "x")


@pytest.mark.parametrize("where", ["missing folder", "full"])
def test_a_state_that_cannot_be_written(tmp_path, where):
    if where == "missing folder":
        with pytest.raises(CheckpointError, match="the state could not be written"):
            save_tensors(tmp_path / "none" / "x", {"a": torch.ones(1)})
        return
    script = f"""
        import resource, torch
        from pathlib import Path
        from pixelrag.errors import CheckpointError
        from pixelrag.train.state import save_tensors
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            save_tensors(Path({str(tmp_path)!r}) / "x", {{"a": torch.ones(100_000)}})
        except CheckpointError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert "x: the state could not be written" in done.stdout, done.stderr
    assert "File too large" in done.stdout


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
    )


def test_what_a_step_draws_depends_on_seed_step_and_rank_alone():
    places = [(0, 3, 1), (0, 3, 0), (0, 4, 1), (1, 3, 1)]
    drawn = []
    for place in places:
        seed_step(*place)
        drawn.append(draw())
    for one, other in itertools.combinations(drawn, 2):
        assert all(a != b for a, b in zip(one, other, strict=True))
    seed_step(*places[0])
    assert draw() == drawn[0]
