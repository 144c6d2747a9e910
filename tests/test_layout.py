"""The shape of the source: what `__all__` lists, and the sizes of modules and functions."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "nemo_specrl"
READERS = ("nemo_specrl", "tests", "benchmarks", "scripts")
MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
UNLISTED = {"nemo_specrl.speculation._suffix"}
"""Names that others import and no `__all__` has: the extension module, which is no Python file."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def listed_names(path: Path) -> set[str] | None:
    """What the module's `__all__` has, or None without one."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def names_used_elsewhere(modules: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Of each module, the names that others import or read as attributes, with one who does."""
    used: dict[str, dict[str, str]] = defaultdict(dict)
    for folder in READERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            reader = str(path.relative_to(REPOSITORY))
            nodes = list(ast.walk(parsed(path)))
            attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module in modules:
                    for alias in node.names:
                        target = f"{node.module}.{alias.name}"
                        if target in modules:  # a module: whose names are read as attributes
                            for name in attributes & (listed_names(modules[target]) or set()):
                                used[target].setdefault(name, reader)
                        else:
                            used[node.module].setdefault(alias.name, reader)
    return used


def names_in_strings() -> str:
    """The texts in which a name may stand as a string: entry points, code for another process."""
    paths = [p for folder in READERS for p in sorted((REPOSITORY / folder).rglob("*.py"))]
    return "\n".join(p.read_text() for p in (REPOSITORY / "pyproject.toml", *paths))


def test_all_lists_what_is_imported_from_a_module():
    modules = package_modules()
    used = names_used_elsewhere(modules)
    strings = names_in_strings()
    wrong = []
    for module, path in modules.items():
        where = path.relative_to(REPOSITORY)
        listed = listed_names(path) or set()
        readers = {n: r for n, r in used[module].items() if not n.startswith("__")}
        readers = {n: r for n, r in readers.items() if f"{module}.{n}" not in UNLISTED}
        for name in sorted(readers.keys() - listed):
            if not name.startswith("_"):
                wrong.append(f"{where}: add {name} to __all__: {readers[name]} imports it")
            elif not readers[name].startswith("tests/"):
                wrong.append(f"{where}: rename {name} to a public name: {readers[name]} imports it")
        if path.name == "__init__.py":
            continue  # what a package exports is for users
        for name in sorted(listed - readers.keys()):
            by_string = rf"\b{module.split('.')[-1]}([.:]| import .*\b){name}\b"
            if not re.search(by_string, strings):
                wrong.append(f"{where}: remove {name} from __all__: nothing else imports it")
    assert not wrong, "`__all__` is not what others import:\n" + "\n".join(wrong)


def test_modules_and_functions_are_short():
    lengths = {}
    for path in package_modules().values():
        where = str(path.relative_to(REPOSITORY))
        if (lines := len(path.read_text().splitlines())) > MOST_MODULE_LINES:
            lengths[where] = lines
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    lengths[f"{where}: {node.name}"] = lines
    wrong = [f"{what} has {n} lines" for what, n in lengths.items()]
    most = f"{MOST_MODULE_LINES} lines for a module, {MOST_FUNCTION_LINES} for a function"
    assert not wrong, f"Split these by subject (at most {most}):\n" + "\n".join(wrong)
