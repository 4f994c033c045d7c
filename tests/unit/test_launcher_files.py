"""The launchers' files: what can be known of them without their clusters."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "launchers"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])


@pytest.fixture
def recorded(tmp_path):
    """Runs a script with stand-ins for the commands that it ends in; gives their command line."""

    def _recorded(script: str, *arguments: str, **variables: str) -> str:
        for name in ("torchrun", "deepspeed", "srun", "scontrol"):
            stand_in = tmp_path / name
            body = "echo node7" if name == "scontrol" else f'echo {name} "$@"; env'
            stand_in.write_text(f'#!/bin/sh\n[ "$1" = requeue ] && echo requeued $2\n{body}\n')
            stand_in.chmod(0o755)
        kept = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", str(FOLDER / script), *arguments]
        ended = subprocess.run(
            command, env=kept | variables, capture_output=True, text=True, check=False
        )
        return ended.stdout + ended.stderr

    return _recorded


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_well_formed(script):
    assert os.access(script, os.X_OK)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_one_node(recorded):
    told = recorded("torchrun_one_node.sh", "rag", "--config", "a b.yaml", PROCESSES="3")
    assert "torchrun --standalone --nproc_per_node 3 --max_restarts 0 -m pixelrag rag" in told
    assert "OMP_NUM_THREADS=1" in told
    assert "OMP_NUM_THREADS=5" in recorded("torchrun_one_node.sh", "rag", OMP_NUM_THREADS="5")


def test_many_nodes_want_to_know_where_to_meet(recorded):
    assert "HEAD: address of the host where the ranks meet" in recorded("torchrun_many_nodes.sh")
    told = recorded("torchrun_many_nodes.sh", "rag", HEAD="h", NODES="1:4", PORT="5")
    assert "--nnodes 1:4" in told
    assert "--rdzv_endpoint h:5" in told


def test_deepspeed_in_each_of_its_ways(recorded, tmp_path):
    assert "deepspeed --module pixelrag rag" in recorded("deepspeed.sh", "rag")
    (tmp_path / "f").write_text("# ours\n\nnode7 slots=8\nnode8 slots=8\n")
    file = str(tmp_path / "f")
    meet = f"deepspeed --hostfile {file} --master_addr node7 --master_port 29500"
    told = recorded("deepspeed.sh", "rag", HOSTFILE=file)
    assert f"{meet} --launcher pdsh --module" in told
    told = recorded("deepspeed.sh", "rag", HOSTFILE=file, LAUNCHER="openmpi", MPIRUN_OPTIONS="-v")
    carried = "MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS -x TOKENIZERS_PARALLELISM"
    assert f"{meet} --launcher openmpi --launcher_args -x {carried} -v --module" in told
    assert "MASTER_ADDR=node7" in told
    assert "MASTER_PORT=29500" in told
    told = recorded("deepspeed.sh", "rag", HOSTFILE=file, NODE_RANK="1", HEAD="h", PORT="5")
    assert "--master_addr h --master_port 5 --no_ssh --node_rank 1 --module" in told


HOSTILE = [
    "a b.yaml",
    "$(touch no).yaml",
    "`id`",
    "'; id; '",
    'say "x"',
    "*",
    "a\nb",
    "%h",
    "~",
    "-n",
]


def test_paths_reach_the_command_as_they_are_and_no_shell(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b $(id)").write_text("node7 slots=8\n")
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "60123"}
    local = {"HOSTFILE": "a=b $(id)", "NODE_RANK": "0"}
    for script, variables in (
        ("torchrun_one_node.sh", {}),
        ("torchrun_many_nodes.sh", {"HEAD": "h", "NODES": "2"}),
        ("deepspeed.sh", local),
        ("deepspeed.sh", {}),
        ("slurm.sbatch", slurm),
    ):
        told = recorded(script, "rag", *HOSTILE, **variables)
        assert f"pixelrag rag {' '.join(HOSTILE)}\n" in told, script
    assert "--master_addr node7" in recorded("deepspeed.sh", "rag", **local)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("word", HOSTILE[1:-1])
def test_pdsh_gets_nothing_that_a_shell_would_read(recorded, tmp_path, word):
    (tmp_path / "f").write_text("node7 slots=8\n")
    told = recorded("deepspeed.sh", "rag", "--config", word, HOSTFILE=str(tmp_path / "f"))
    assert "pdsh would have a shell read it" in told
    assert "deepspeed --hostfile" not in told
    told = recorded("deepspeed.sh", "rag", "--config", "a b.yaml", HOSTFILE=str(tmp_path / "f"))
    assert "--config a b.yaml" in told


def test_slurm_names_a_place_to_meet_and_requeues_what_was_preempted(recorded, tmp_path):
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "60123",
    }
    flags = ("distill", "--output_dir", str(tmp_path))
    told = recorded("slurm.sbatch", *flags, **slurm)
    assert f"srun --kill-on-bad-exit=1 python -m pixelrag distill --output_dir {tmp_path}" in told
    assert "MASTER_ADDR=node7" in told
    assert "MASTER_PORT=20123" in told
    assert "requeued" not in told
    (tmp_path / "PREEMPTED").touch()
    assert "requeued 60123" in recorded("slurm.sbatch", *flags, **slurm)
    assert "requeued 60123" in recorded(
        "slurm.sbatch", "distill", f"--output_dir={tmp_path}", **slurm
    )


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_a_manifest_starts_pixelrag(name):
    manifest = yaml.safe_load((FOLDER / name).read_text())
    assert "pixelrag" in yaml.safe_dump(manifest)
    if name == "kubernetes.yaml":
        worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        assert worker["containers"][0]["name"] == "pytorch"
        assert worker["terminationGracePeriodSeconds"] >= 60
