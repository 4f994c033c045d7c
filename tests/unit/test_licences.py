"""What `pip install pixelrag-trainer` brings along may be used by anyone for anything."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
ALLOWED = re.compile(
    r"apache|bsd|\bmit\b|isc|mpl|mozilla|psf|python software|cnri|zlib|cc0|0bsd|bsl|unlicense|"
    r"public domain|hpnd|historical permission|academic free|dfsg|llvm-exception|blueoak",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"gpl|affero|general public|sspl|non-?commercial|proprietary", re.IGNORECASE)


def licence_of(name: str) -> list[str]:
    """What a package says of its licence; alternatives ("A OR B") are items of their own."""
    known = distribution(name).metadata
    if expression := known.get("License-Expression"):
        return re.split(r"\s+OR\s+", expression)
    classifiers = [c for c in known.get_all("Classifier") or [] if c.startswith("License ::")]
    named = [c.rpartition("::")[2].strip() for c in classifiers if c.count("::") > 1]
    return named or [(known.get("License") or "").split("\n")[0]]


def is_free(alternatives: list[str]) -> bool:
    """Whether one of the licences that may be chosen is on the list."""
    return any(ALLOWED.search(text) and not FORBIDDEN.search(text) for text in alternatives)


def closure() -> set[str]:
    """Names of everything installed that the package or one of its extras needs, without `dev`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    todo = [
        Requirement(text) for texts in (project["dependencies"], *extras.values()) for text in texts
    ]
    found: set[str] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another platform, or an extra that is not installed here
        found.add(name)
        todo += [Requirement(text) for text in needs]
    return found


def test_every_dependency_has_an_allowed_licence():
    packages = closure()
    assert {"torch", "transformers", "deepspeed", "faiss-cpu"} <= packages
    refused = {name: texts for name in sorted(packages) if not is_free(texts := licence_of(name))}
    assert not refused, f"not on the list of allowed licences: {refused}"


def test_the_list_would_refuse_others():
    for text in ("GPL-3.0-only", "GNU Affero General Public License v3", "LGPL-2.1 AND MIT", ""):
        assert not is_free([text]), text
