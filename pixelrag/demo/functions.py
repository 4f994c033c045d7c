"""The functions of this Python's standard library: what each says it does, and its code.

Every Python installation carries some thousands of functions with docstrings, written by people who
meant them. That makes a retrieval task of real text without a download.
"""

import ast
import functools
import inspect
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pixelrag.errors import DataError

# Tests and vendored programs: not what a user of the library would look for.
_SKIPPED = frozenset({"site-packages", "dist-packages", "idlelib", "turtledemo", "lib2to3"})
_TESTS = frozenset({"test", "tests"})
_MIN_SUMMARY, _MAX_SUMMARY = 25, 250
_MIN_BODY = 60
_MAX_CODE = 900
# A sentence ends at a full stop before a capital, a quote or a line's end: not after "e.g.".
_SENTENCE_END = re.compile(
    r"(?<=[.!?])\s+(?=[A-Z\"'`(\[*-])|\n[ \t]*\n|\n(?=[ \t]*(?:>>>|[-*=~]{3}))"
)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the library.

    Attributes:
        file: path below the library's root, with "/" ("json/decoder.py").
        name: qualified name ("JSONDecoder.decode").
        summary: first sentence of the docstring, on one line.
        code: the function as the syntax tree prints it, without docstrings and comments, cut at a
            line's end to at most 900 characters.
        source: its lines as they stand in the file, without docstrings and decorators, moved to
            the left margin.
        docstring: all of it, without its indentation.
        kind: "function", "method" or "coroutine".
    """

    file: str
    name: str
    summary: str
    code: str
    source: str
    kind: str
    docstring: str

    @property
    def module(self) -> str:
        """Dotted name of the module ("json.decoder", "json")."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True, slots=True)
class Library:
    """Distinct functions in the order of their files, and the files that could not be read."""

    functions: list[Function]
    unreadable: list[str]


def read_library(root: Path | None = None, *, mask_names: bool = False) -> Library:
    """Collect the functions of a tree of Python files.

    No two functions share a summary, code (whatever it is called) or source, so that a query has
    one answer and nothing of one file stands in another under another name.

    Args:
        root: the tree (default: this interpreter's standard library).
        mask_names: call every function `f` in its own code, as search by name is easy.

    Raises:
        DataError: there is no Python source below `root`.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_python_files(root))
    if not files:
        raise DataError(
            f"No Python source below {root}: this interpreter carries its standard library "
            "compiled or zipped, or not at all. Run the demo with an ordinary Python installation"
        )
    functions: list[Function] = []
    unreadable: list[str] = []
    seen: set[str] = set()
    for file in files:
        try:
            with tokenize.open(root / file) as handle:
                text = handle.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):
            unreadable.append(file)  # for the manifest; a library has files for other versions
            continue
        for function, marks in _functions_of(tree, text, file, mask_names):
            if seen.isdisjoint(marks):
                seen |= marks
                functions.append(function)
    return Library(functions, unreadable)


def held_out_files(functions: list[Function], fraction: float, seed: int) -> frozenset[str]:
    """The files to keep out of training: `fraction` of all, those whose salted hash is lowest.

    A file's rank hardly moves when others come or go, unlike its place in a shuffle.
    """
    files = {function.file for function in functions}
    ranked = sorted(files, key=functools.partial(salted, seed=seed))
    return frozenset(ranked[: round(fraction * len(ranked))])


def salted(text: str, seed: int) -> bytes:
    """A hash to sort by, the same in every process and release."""
    return blake2b(text.encode(), digest_size=16, key=seed.to_bytes(8, "big")).digest()


def _python_files(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] not in _SKIPPED and _TESTS.isdisjoint(parts[:-1]):
            yield "/".join(parts)


def _functions_of(
    tree: ast.Module, text: str, file: str, mask_names: bool
) -> Iterator[tuple[Function, frozenset[str]]]:
    """Functions of a module, each with what marks it: equal marks mean a duplicate."""
    lines = text.splitlines(keepends=True)
    for path, node in _walk(tree, ()):
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        summary = _summary(docstring)
        if len(summary) < _MIN_SUMMARY or summary.startswith(">>>"):
            continue
        source = _source_without_docstrings(node, lines)
        bare = _Bare(node.name if mask_names else None).visit(node)
        body = "\n".join(map(ast.unparse, bare.body))
        if len(body) < _MIN_BODY:
            continue
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        signature = f"({ast.unparse(bare.args)}):"
        indented = "\n".join(f"    {line}" for line in body.split("\n"))
        code = _cut(f"{prefix}def {bare.name}{signature}\n{indented}")
        kind = "coroutine" if prefix else "method" if path[:-1] else "function"
        marks = {
            "summary " + re.sub(r"\W+", " ", summary).casefold().strip(),
            "body " + _cut(f"{signature}\n{indented}"),
            "code " + code,
        }
        name = ".".join(path)
        function = Function(file, name, summary, code, source, kind, inspect.cleandoc(docstring))
        yield function, frozenset(marks)


def _walk(
    node: ast.AST, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of a module and of its classes; a function inside a function is part of that."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTION):
            yield (*path, child.name), child
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, (*path, child.name))
        else:
            yield from _walk(child, path)  # below "if" and "try"


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class _Bare(ast.NodeTransformer):
    """Drop docstrings; where `name` is given, call the function by that name `f`."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def _definition(self, node: Definition) -> ast.AST:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if self.name is not None and getattr(node, "name", None) == self.name:
            node.name = "f"
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.name:
            node.id = "f"
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == self.name:
            node.attr = "f"
        return node


def _summary(docstring: str) -> str:
    return " ".join(_SENTENCE_END.split(docstring, maxsplit=1)[0].split())[:_MAX_SUMMARY].strip()


def _cut(code: str) -> str:
    """At most `_MAX_CODE` characters, up to a line's end where there is one."""
    if len(code) <= _MAX_CODE:
        return code
    return code[: code.rfind("\n", 0, _MAX_CODE + 1) if "\n" in code[:_MAX_CODE] else _MAX_CODE]


def _end(node: ast.stmt) -> int:
    """Its last line; only trees that were not parsed have none."""
    return node.end_lineno or node.lineno


def _source_without_docstrings(node: ast.stmt, lines: list[str]) -> str:
    """The lines of a definition, less those of docstrings, from the left margin."""
    dropped: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, (*_FUNCTION, ast.ClassDef)) and ast.get_docstring(inner) is not None:
            said = inner.body[0]
            dropped |= set(range(said.lineno, _end(said) + 1))
    dropped.discard(node.lineno)  # "def f(): 'docstring'" on one line
    margin = node.col_offset
    kept: list[str] = []
    for number in range(node.lineno, _end(node) + 1):
        if number in dropped:
            continue
        line = lines[number - 1].rstrip().expandtabs(8)
        # A string over several lines may reach into the margin, and is left where it is.
        kept.append(line[margin:] if not line[:margin].strip() else line)
    while len(kept) > 1 and not kept[1]:
        del kept[1]  # the gap that the docstring left
    return "\n".join(kept)
