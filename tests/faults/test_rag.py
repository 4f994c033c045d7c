"""A RAG run goes on where a refresh fails, and stops where its index or passages are damaged."""

import json
from pathlib import Path

import pytest

from tests.faults.jobs import arguments, make_material
from tests.faults.test_stored_state import flip
from tests.train import nursery

pytestmark = pytest.mark.distributed

REFRESH = "tests.faults.inject:refresh"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "rag"
    make_material(folder, "rag")
    return folder


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "ended with code -9"),
        ("hung", "the coordinator gave no sign of life; killed"),
        ("garbage", "of its length"),
    ],
)
def test_a_refresh_that_fails_ends_no_training(material, tmp_path, how, says):
    flags = ["--optim.max_steps=5", "--refresh.retries=0"]
    command = arguments(material, "rag", tmp_path / "run", *flags)
    payload = {"how": how, "step": 3}
    ended = nursery.run(command, nproc=2, setup=REFRESH, payload=payload).check()
    (told,) = [x for x in ended.outputs[0].splitlines() if "The training goes on with the" in x]
    assert says in told, ended.text
    state = json.loads((tmp_path / "run" / "checkpoint-5" / "state.json").read_text())
    events = [(e["step"], e["kind"]) for e in state["position"]["index"]["history"]]
    assert events == [(0, "start"), (0, "switch"), (3, "start"), (3, "failed")]
    assert [path.name for path in (tmp_path / "run" / "index").glob("gen-*")] == ["gen-000001"]


def test_without_a_first_index_there_is_no_run(material, tmp_path):
    flags = ["--optim.max_steps=1", "--refresh.retries=0"]
    command = arguments(material, "rag", tmp_path / "run", *flags)
    fault = {"setup": REFRESH, "payload": {"how": "garbage", "step": 0}}
    ended = nursery.run(command, nproc=2, **fault)
    assert ended.codes == [8, 8], ended.text
    assert ended.outputs[0].count("error: ") == 1
    assert "the first generation of the index cannot be made: " in ended.outputs[0]
    assert ended.outputs[1] == ""


def test_a_run_does_not_go_on_with_a_damaged_index(material, tmp_path):
    command = arguments(material, "rag", tmp_path / "run")
    nursery.run([*command, "--optim.max_steps=1"], nproc=2).check()
    vectors = tmp_path / "run" / "index" / "gen-000001" / "vectors.npy"
    whole = vectors.read_bytes()
    flip(vectors)
    ended = nursery.run([*command, "--optim.max_steps=2"], nproc=2)
    assert ended.codes == [8, 8], ended.text
    assert ended.outputs[0].count("error: ") == 1
    assert "gen-000001: vectors.npy is altered" in ended.outputs[0]
    assert ended.outputs[1] == ""
    vectors.write_bytes(whole)
    nursery.run([*command, "--optim.max_steps=2"], nproc=2).check()


def test_a_tile_that_goes_missing(material, tmp_path):
    """Every question finds it: all ranks stop, with its name."""
    (tile := tmp_path / "tile.png").write_bytes((material / "tile.png").read_bytes())
    passages = [{"id": str(i), "title": "", "chunk_path": "tile.png"} for i in range(3)]
    (tmp_path / "tiles.jsonl").write_text("".join(json.dumps(p) + "\n" for p in passages))
    questions = [{"question": f"what is {i}", "answers": ["red"]} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    flags = [
        f"--knowledge_base.source={tmp_path / 'tiles.jsonl'}",
        f"--data.train={tmp_path / 'train.jsonl'}",
        f"--data.eval={tmp_path / 'train.jsonl'}",
        f"--generator.name_or_path={material / 'vision'}",
        f"--question_encoder.name_or_path={material / 'vision'}",
        "--loss.retriever=adist",
        "--optim.max_steps=3",
    ]
    command = arguments(material, "rag", tmp_path / "run", *flags)
    fault = {"setup": "tests.faults.inject:lost_tile", "payload": {"path": str(tile)}}
    ended = nursery.run(command, nproc=2, **fault)
    assert ended.codes == [3, 3], ended.text
    assert ended.outputs[0].count("error: ") == 1
    assert str(tile) in ended.outputs[0]
    assert ended.outputs[1] == ""
