"""What `pixelrag bench` measures is what it says; at sizes that measure nothing."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pixelrag import cli
from pixelrag.bench import cases
from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.machine import known_device, roofline
from pixelrag.bench.report import report_sections
from pixelrag.bench.rows import Row, Run, from_json, read_rows, to_csv, to_json, write_rows
from pixelrag.bench.suite import SUITES, chosen, file_of, load_plan
from pixelrag.bench.timing import Spread, Taken, interleaved, ratios
from pixelrag.config.bench import KDChunkConfig
from pixelrag.errors import ConfigError, DataError
from pixelrag.plan.hardware import DEVICES
from tests.unit.bench_cases import ONCE, TINY

CPU = torch.device("cpu")
PROFILES = ("cpu-smoke", "h200", "b200")


def run_of(**changes) -> Run:
    values = {
        "profile": "cpu-smoke", "command": "pixelrag bench x", "config_hash": "abc",
        "device": "cpu", "hardware": "a processor", "threads": 1, "versions": {"torch": "2"},
        "commit": None, "date": "2026-01-01", "load_average": 0.0,
    }  # fmt: skip
    return Run(**values | changes)


def test_candidates_take_turns_and_the_warm_up_is_left_out():
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    taken = interleaved(candidates, rounds=2, warmup=1)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert [len(t.wall) for t in taken.values()] == [2, 2, 2]


def test_percentiles_and_ratios():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Spread(2.0, 3.5, 5.0)
    values = [0.3, 7.0, 2.5, 1.25, 0.01, 3.0, 4.0]
    assert Spread.of(values) == Spread(*np.quantile(values, [0.2, 0.5, 0.8]).round(4).tolist())
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    # Of the ratios within a round, not the ratio of the medians.
    assert ratios([1.0, 4.0], [2.0, 2.0]).p50 == 1.25


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", SUITES)
def test_every_profile_of_every_suite_is_valid_and_has_cases(name: str, profile: str):
    plan = load_plan(name, profile, [])
    groups = plan.groups()
    names = [json.dumps(case) for group in groups for case in group]
    assert len(names) == len(set(names)) > 1
    other = load_plan(name, profile, ["--run.rounds=77", "--run.threads=3"])
    assert plan.config_hash != other.config_hash
    again = load_plan(name, profile, ["--run.rounds=77"])
    assert plan.config_hash == again.config_hash  # how often is not what


def test_a_case_that_does_not_fit_or_cannot_run_is_skipped_with_the_reason():
    def full() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 7 GiB. More words.")

    def prepare(config, of, device):
        return [Ready(lambda: None, 10), Ready(full), Skipped("no kernel")]

    config = KDChunkConfig(run={"device": "cpu", "memory": False, "rounds": 3})
    rows = list(measure_in_turns("x", prepare, config, [{"n": 1}, {"n": 2}, {"n": 3}]))
    assert [bool(row.skipped) for row in rows] == [False, True, True]
    assert rows[0].repeats == 3
    assert "Tried to allocate 7 GiB" in rows[1].skipped
    assert "More words" not in rows[1].skipped
    assert rows[2].skipped == "no kernel"


def test_devices_are_known_by_their_own_names_or_not_at_all():
    names = {
        "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s", "NVIDIA H100 PCIe": None,
        "NVIDIA H100 NVL": None, "NVIDIA A1000": None, "NVIDIA L40": None, "AMD EPYC": None,
    }  # fmt: skip
    for said, name in names.items():
        found = known_device(said)
        assert (None if found is None else found.name) == name, said


def test_shares_of_the_peak_and_bounds_need_a_known_device(monkeypatch: pytest.MonkeyPatch):
    h200 = DEVICES["h200"]
    assert roofline(None, 1.0, 1.0, "bf16") == (None, "")
    assert roofline(h200, None, 1.0, "bf16") == (None, "")
    assert roofline(h200, h200.bf16, h200.bandwidth / 2, "bf16") == (1.0, "compute")
    assert roofline(h200, h200.bf16, h200.bandwidth * 2, "bf16") == (2.0, "memory")
    made = Ready(lambda: None, 100, 50, flops=h200.bf16 / 10, moved=0.0, precision="bf16")
    taken = Taken([0.4, 0.5, 0.9], [0.4, 0.4, 0.4])
    unknown = cases.row_of("x", {}, made, taken, CPU)
    assert (unknown.mfu, unknown.bound_seconds, unknown.bound_by) == (None, None, "")
    monkeypatch.setattr(cases, "known_device", lambda name: h200)
    known = cases.row_of("x", {}, made, taken, CPU)
    assert known.mfu == 0.2
    assert (known.bound_seconds, known.bound_by) == (0.1, "compute")
    assert (known.tokens_per_second, known.supervised_tokens_per_second) == (200.0, 100.0)


def test_rows_survive_their_files(tmp_path: Path):
    row = Row(
        "kd-chunk", {"chunk": 256, "loss": "fused"}, run_of(), Spread(1.0, 2.0, 3.0), repeats=5,
        tokens=10, figures={"chunk_size": 256.0},
    )  # fmt: skip
    skipped = Row("kd-chunk", {"chunk": "auto"}, run_of(), skipped="why")
    write_rows(tmp_path, "a", [row, skipped])
    assert read_rows([tmp_path]) == [row, skipped]
    head, first, second = to_csv([row, skipped]).splitlines()
    assert {"case.chunk", "seconds.p50", "figures.chunk_size", "run.hardware"} <= set(
        head.split(",")
    )
    columns = dict(zip(head.split(","), first.split(","), strict=True))
    assert (columns["case.chunk"], columns["seconds.p50"]) == ("256", "2.0")
    assert "why" in second
    (tmp_path / "a.jsonl").write_text(to_json(row) + '\n{"suite": "x", "cas": {}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 2: no row of a benchmark: unknown .* cas"):
        read_rows([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no results"):
        read_rows([tmp_path / "empty"])
    assert from_json(to_json(row), "here") == row
    with pytest.raises(DataError, match="a row of the suite packing lacks 'way'"):
        report_sections([replace(row, suite="packing")])


def test_mistakes_in_a_suite_are_told_with_file_and_line(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "suite: kd-chunk\nwork:\n  tokens: 8\nprofiles:\n  mine:\n    run: {rounds: 2}\n"
        "    work:\n      chunk_size: 4\n      tokens: -1\n"
    )
    assert load_plan(str(own), None, []).config.work.tokens == 8
    with pytest.raises(ConfigError) as error:
        load_plan(str(own), "mine", [])
    assert "work.chunk_size (" in str(error.value)
    assert "own.yaml line 8)" in str(error.value)
    assert "did you mean work.chunk_sizes?" in str(error.value)
    assert "own.yaml line 9)" in str(error.value)
    with pytest.raises(ConfigError, match=r"--profile.*\n.*got 'his', .*own.yaml has mine"):
        load_plan(str(own), "his", [])
    own.write_text("suite: kd-chnk\n")
    with pytest.raises(
        ConfigError, match=r"suite \(.*own.yaml line 1\)\n.*expected one of packing"
    ):
        load_plan(str(own), None, [])
    named = "suite: kd-chunk\n"
    wrongs = ["suite: [kd-chunk]", "suite: {a: 1}", "work: {}", "- a", "a: ["]
    wrongs += [f"{named}profiles: {value}" for value in ("3", "{mine: 3}", "[mine]", "{his: {}}")]
    wrongs += [f"{named}work: 3", f"{named}wrok: {{}}"]
    for wrong in wrongs:
        own.write_text(wrong)
        with pytest.raises(ConfigError):
            load_plan(str(own), "mine", [])
    with pytest.raises(ConfigError, match=r"got missing.yaml, expected a readable YAML file"):
        load_plan("missing.yaml", None, [])
    with pytest.raises(ConfigError, match="did you mean packing"):
        file_of("paking")
    with pytest.raises(ConfigError, match=r"work.tokns \(--work.tokns\)\n.*work.tokens"):
        load_plan("kd-chunk", "h200", ["--work.tokns=3"])


def test_only_picks_cases_and_refuses_what_none_has():
    groups = [[{"a": 1, "b": "x"}, {"a": 2, "b": "x"}], [{"a": 1, "b": "y"}]]
    assert chosen(groups, []) == groups
    assert chosen(groups, ["a=1"]) == [[groups[0][0]], groups[1]]
    assert chosen(groups, ["a=1", "a=2", "b=x"]) == [groups[0]]
    with pytest.raises(ConfigError, match="got 'a=3', expected one of 1, 2"):
        chosen(groups, ["a=3"])
    with pytest.raises(ConfigError, match=r"got 'c=3', expected KEY=VALUE of \['a', 'b'\]"):
        chosen(groups, ["c=3"])
    with pytest.raises(ConfigError, match="no case is a=2 b=y"):
        chosen(groups, ["a=2", "b=y"])


def test_the_command_measures_and_reports(tmp_path: Path, capsys):
    flags = ["kd-chunk", "--profile", "cpu-smoke", *TINY["kd-chunk"], *ONCE, "--output"]
    for name in ("before", "now"):
        assert cli.main(["bench", *flags, str(tmp_path / name), "--only", "loss=fused"]) == 0
    assert "loss=fused chunk=auto" in capsys.readouterr().out
    rows = read_rows([tmp_path / "now"])
    assert [row.name.split("loss=")[1] for row in rows] == ["fused chunk=4", "fused chunk=auto"]
    report = ["bench", "--report", str(tmp_path / "now"), "--previous", str(tmp_path / "before")]
    assert cli.main([*report, "--output", str(tmp_path)]) == 0
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert ">auto</text>" in page  # the chosen size is marked
    assert "kd-chunk vocab=40 dtype=fp32 loss=fused chunk=4" in text
    assert "now / before" in text
    other = [replace(row, run=replace(row.run, hardware="another")) for row in rows]
    write_rows(tmp_path / "other", "kd-chunk", other)
    capsys.readouterr()
    assert cli.main([*report, str(tmp_path / "other")]) == DataError.exit_code
    said = capsys.readouterr().err
    assert "unlike hardware" in said
    assert "another" in said
    assert rows[0].run.hardware in said
    assert cli.main(["bench", "all", "--profile", "b200", "--dry-run"]) == 0
    assert "vocab=151936 dtype=bf16 loss=fused chunk=8192" in capsys.readouterr().out
    assert cli.main(["bench", "kd-chunk", "--help"]) == 0
    assert "--work.chunk_sizes" in capsys.readouterr().out


def test_threads_are_those_of_the_suite():
    seen: list[int] = []

    def prepare(config, of, device):
        return [Ready(lambda: seen.append(torch.get_num_threads()))]

    before = torch.get_num_threads()
    try:
        config = KDChunkConfig(run={"device": "cpu", "memory": False, "rounds": 1, "threads": 2})
        list(measure_in_turns("x", prepare, config, [{"n": 1}]))
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {2}
