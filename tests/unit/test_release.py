"""What a release is: the wheel and the source distribution are built, and the wheel is used.

The fresh environment sees the installed dependencies, so that nothing is fetched; pixelrag itself
is the wheel's.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from pixelrag import __version__
from tests.train.material import text_rows, write_jsonl

ROOT = Path(__file__).parents[2]
FILES = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "pixelrag").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="what builds a release is in the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel."""
    home = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", str(home))
    python = home / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps",
        "--no-compile", "--disable-pip-version-check", "-q", str(wheel),
    )  # fmt: skip
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def run(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"pixelrag_trainer-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    info = f"pixelrag_trainer-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == FILES
    assert "pixelrag/py.typed" in names
    assert f"{info}licenses/LICENSE" in names


def test_the_source_distribution_can_be_tested_and_built(dist: Path):
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile",
              "constraints-cpu.txt", "tests/conftest.py", "docs/conf.py",
              "recipes/rag_cpu.yaml", "ds_configs/zero3.json"}  # fmt: skip
    assert wanted | FILES <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "docs/_build"))]


def test_the_installed_command_runs(installed: Path, tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", text_rows(8))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(command: str, *words: str) -> str:
        return run(str(installed / command), *words, cwd=tmp_path, env=clean)

    where = said("python", "-c", "import pixelrag; print(pixelrag.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "pixelrag COMMAND" in said("pixelrag", "--help")
    assert __version__ in said("pixelrag", "--version")
    recipe = ROOT / "recipes" / "text_minilm_cpu.yaml"
    words = ("--config", str(recipe), "--data.train", "train.jsonl")
    assert "train.jsonl: 8 rows" in said("pixelrag", "validate", *words)
