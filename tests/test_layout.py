"""The shape of the source: what `__all__` lists, the maps of packages, and the tests' tree."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "nemo_specrl"
READERS = ("nemo_specrl", "tests", "benchmarks", "scripts")
MAP = re.compile(r"Modules,\s+each\s+of\s+which\s+imports\s+only\s+from\s+those\s+below\s+it::\n\n")
"""Comes before the map of a package; modules on one line may import each other."""
UNLISTED = {"nemo_specrl.drafting._suffix"}
"""Names that others import and no `__all__` has: the extension module, which is no Python file."""

TESTED_IN = {
    "cache/cluster/test_nodes.py": "cache.cluster.checkpoint",
    "cli/test_cache.py": "cache.inspection",
    "cli/test_main.py": "__main__ errors",
    "drafting/test_kernels.py": "drafting.device_arrays",
    "engine/test_exactness.py": "engine.proposer engine.request_seeds",
    "engine/test_plugin.py": "engine.core_patches engine.options engine.row engine.scheduler",
    "engine/test_processes.py": "engine.counts",
    "engine/v2/test_config.py": "engine.patches engine.step_costs engine.v2_config "
    "engine.v2_lengths engine.v2_patches",
    "engine/v2/test_exactness.py": "engine.speculator",
    "engine/v2/test_hybrids.py": "engine.v2_hybrids",
    "monitoring/test_report.py": "monitoring.comparison monitoring.comparison_plot "
    "monitoring.drawing monitoring.run_plot monitoring.run_steps",
    "nemo_rl/test_faults.py": "nemo_rl.job_state",
    "nemo_rl/test_jobs.py": "nemo_rl.generation nemo_rl.install nemo_rl.launcher "
    "nemo_rl.reuse_worker nemo_rl.single_controller",
    "nemo_rl/test_recipe_table.py": "nemo_rl.compat",
    "reuse/test_base.py": "reuse.async_llm reuse.llm reuse.metrics",
    "reuse/test_kv_window.py": "reuse.limits",
    "reuse/test_row.py": "reuse.noise reuse.sampling",
    "simulation/test_prediction.py": "simulation.recorded_run simulation.replays",
    "trainer/data/test_dataset.py": "trainer.data.sources trainer.data.text trainer.data_config",
    "trainer/policy/megatron/test_worker.py": "trainer.policy.megatron.cpu "
    "trainer.policy.megatron.model",
    "trainer/policy/test_architectures.py": "trainer.policy.torch.lora",
    "trainer/policy/torch/test_policy.py": "trainer.policy.base trainer.policy.factory "
    "trainer.policy.steps trainer.policy.torch.model trainer.policy.torch.value",
    "trainer/test_loop.py": "trainer.evaluation",
    "trainer/test_recipe.py": "trainer.policy_config trainer.vllm_kwargs",
    "trainer/test_start_checks.py": "engine.environment",
}
"""The modules that have no test file of their name, by the file that tests them."""


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
        listed = listed_names(path)
        if listed is None:  # as monitoring/names.py, whose names are all public
            continue
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


def map_of(package: Path) -> list[set[str]] | None:
    """The lines of the map in a package's docstring, each a set of modules; None without one."""
    text = ast.get_docstring(parsed(package / "__init__.py")) or ""
    if not MAP.search(text):
        return None
    lines = MAP.split(text)[1].strip("\n").split("\n\n")[0].splitlines()
    heads = [re.split(r"\s{2,}", line.strip())[0] for line in lines if re.match(r"    \S", line)]
    return [{name.strip().rstrip("/") for name in head.split(",")} for head in heads]


def imported(path: Path, package: str) -> set[str]:
    """The modules of a package that a file in it imports when it is itself imported."""
    found = set()
    later = {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If))
        for inner in ast.walk(node)
    }
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node not in later and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {
                n.removeprefix(package + ".").split(".")[0]
                for n in names
                if n.startswith(package + ".")
            }
    return found


def packages() -> list[Path]:
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("package", packages(), ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_the_map_of_a_package_names_its_modules_in_the_order_of_their_imports(package: Path):
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    levels = map_of(package)
    if package == PACKAGE:
        return  # its layers are the linter's
    assert levels is not None or len(modules) < 6, "its docstring has no map"
    if levels is None:
        return
    assert sorted(name for level in levels for name in level) == sorted(modules)
    place = {name: i for i, level in enumerate(levels) for name in level}
    for name in modules:
        folder = package / name
        for path in folder.rglob("*.py") if folder.is_dir() else [package / f"{name}.py"]:
            above = {
                other
                for other in imported(path, module_name(package))
                if other != name and other in place and place[other] < place[name]
            }
            assert not above, f"{path.relative_to(REPOSITORY)} imports {above} from above it"


def test_the_tests_mirror_the_package():
    """`a/b.py` is tested in `tests/a/test_b.py`, or `TESTED_IN` says where."""
    modules = {
        module_name(path).removeprefix("nemo_specrl.")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    own = {
        module
        for module in modules
        if (REPOSITORY / "tests" / module.replace(".", "/"))
        .with_name(f"test_{module.split('.')[-1]}.py")
        .exists()
    }
    assert not [file for file in TESTED_IN if not (REPOSITORY / "tests" / file).exists()]
    listed = " ".join(TESTED_IN.values()).split()
    assert sorted(listed) == sorted(modules - own)
