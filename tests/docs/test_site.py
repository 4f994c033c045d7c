"""The site builds without a warning, and its reference has every option and command."""

import subprocess
import sys
from pathlib import Path

import pytest

from pixelrag.cli import COMMANDS
from pixelrag.config.jobs import JOBS, config_class
from pixelrag.config.problems import options_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the site's generator is in the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html",
         "-d", folder / "cache", ROOT / "docs", folder / "html"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_option_has_a_row(site: Path):
    for job in JOBS:
        page = (site / "reference" / f"{job}.html").read_text("utf-8")
        options = options_of(config_class(job))
        assert [name for name in options if f">{name}<" not in page] == []
        assert page.index(f">{next(iter(options))}<") < page.index(">engine.name<")


def test_every_command_has_an_entry(site: Path):
    page = (site / "reference" / "commands.html").read_text("utf-8")
    assert [name for name in COMMANDS if f'<span class="pre">{name}</span>' not in page] == []


def test_the_public_api_is_there(site: Path):
    page = (site / "reference" / "api.html").read_text("utf-8")
    for name in ("pixelrag.config.base.load", "pixelrag.engine.base.Engine.backward",
                 "pixelrag.gradcache.step.gradcache_step", "pixelrag.losses.kd.distill_loss",
                 "pixelrag.train.contrastive.train"):  # fmt: skip
        assert f'id="{name}"' in page, name
