"""Tensors, scalars and random generators come back exactly; damaged files are named."""

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
from pixelrag.train.state import RngState, capture_rng, load_tensors, restore_rng, save_tensors


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


def test_random_generators_go_on_where_they_were(tmp_path):
    for first in range(2):  # with and without a spare Gaussian in Python's and NumPy's state
        random.seed(first)
        np.random.seed(first)
        torch.manual_seed(first)
        for _ in range(first):
            random.gauss(0, 1)
            np.random.randn()
        state = capture_rng()
        save_tensors(tmp_path / "rng", state.tensors, state.scalars)
        expected = draw()
        assert draw() != expected
        restore_rng(RngState(*load_tensors(tmp_path / "rng")))
        assert draw() == expected


def test_capturing_disturbs_nothing():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    capture_rng()
    assert torch.equal(torch.rand(4), expected)


def test_another_number_of_devices_warns(caplog):
    state = capture_rng(devices=[])
    restore_rng(
        RngState({**state.tensors, "cuda.0": torch.zeros(16, dtype=torch.uint8)}, state.scalars),
        devices=[],
    )
    assert "random state of 1 CUDA devices a process, this run uses 0" in caplog.text


@pytest.mark.parametrize("missing", ["python", "numpy", "torch"])
def test_an_incomplete_state_is_an_error(missing):
    state = capture_rng()
    del state.tensors[missing]
    with pytest.raises(CheckpointError, match="incomplete or malformed"):
        restore_rng(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_generator(tmp_path):
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    state = capture_rng()
    save_tensors(tmp_path / "rng", state.tensors, state.scalars)
    expected = torch.rand(5, device="cuda")
    restore_rng(RngState(*load_tensors(tmp_path / "rng")))
    assert torch.equal(torch.rand(5, device="cuda"), expected)
