"""No reader runs what it reads: code that could is found in the source, whoever writes it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pixelrag"
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval"}


def offences(source: str) -> Iterator[str]:
    """What in a source could run code that a file brings along, or hand a path to a shell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_CODE:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in SHELLS or given.get("shell", "False") != "False":
                yield f"{name}, a shell"
            if name == "torch.load" and given.get("weights_only") != "True":
                yield "torch.load without weights_only"
            if name == "np.load" and given.get("allow_pickle", "False") != "False":
                yield "np.load of pickles"
            if given.get("trust_remote_code", "") == "True":
                yield "trust_remote_code without being asked"
            if name == "yaml.load" and ast.unparse(node.args[1]) != "_Loader":
                yield "yaml.load with another loader"
            if name.endswith((".extract", ".extractall")):
                yield f"{name}: archives are read in place"


def test_the_package_runs_no_code_from_files():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = {file.name: list(offences(file.read_text(encoding="utf-8"))) for file in files}
    assert {name: what for name, what in found.items() if what} == {}


def test_one_file_alone_listens_for_others():
    """Whoever adds another place must say who may talk to it; see docs/security.md."""
    listens = re.compile(r"\.bind\(|\.listen\(|create_server\(|serve_forever|HTTPServer|Listener\(")
    found = {path.name for path in PACKAGE.rglob("*.py") if listens.search(path.read_text("utf-8"))}
    assert found == {"wire.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(path, shell=True)",
        "os.system(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "yaml.load(text, yaml.Loader)",
        "tarfile.open(path).extractall()",
    ],
)
def test_each_offence_would_be_found(source):
    assert list(offences(source))


def test_the_yaml_loader_builds_plain_data_only(tmp_path):
    from pixelrag.config.yaml_file import read_yaml

    path = tmp_path / "a.yaml"
    path.write_text(f"output_dir: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert "constructor" in str(read_yaml(path).problems[0])
    assert not (tmp_path / "made").exists()


def test_a_training_state_that_would_run_code_is_refused(tmp_path):
    import torch

    from pixelrag.errors import ModelError
    from pixelrag.models.training_state import load_training_state

    class Mischief:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "made",)

    torch.save({"step": 1, "model_state_dict": Mischief()}, tmp_path / "training_state.pt")
    with pytest.raises(ModelError, match="cannot be read"):
        load_training_state(str(tmp_path), None)
    assert not (tmp_path / "made").exists()
