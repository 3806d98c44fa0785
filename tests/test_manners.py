"""Who may import whom, and that a user's files with our folders' names do no harm."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("autoplan", "cost_models", "search")
# What only the compatibility module touches.
INTERNALS = ("jax._src", "jaxlib")
COMPATIBILITY = ROOT / "autoplan" / "compat.py"


def sources(part: str) -> list[Path]:
    found = sorted((ROOT / part).rglob("*.py"))
    assert found, f"no Python files in {ROOT / part}"
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of everything that a file imports, also inside functions.

    `from a import b` counts as `a.b`, since b may be a module. Folders are named as they are installed.
    """
    part, *inner = path.relative_to(ROOT).with_suffix("").parts
    package = ["autoplan"] if part == "autoplan" else ["autoplan", part]
    package += inner[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from ((node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def broken(part: str, *forbidden: str, but: str = "autoplan.nothing") -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(part)
        for line, module in imports(path)
        if inside(module, *forbidden) and not inside(module, but)
    ]


@pytest.mark.parametrize("part", ["cost_models", "search"])
def test_lower_folders_import_neither_jax_nor_the_others(part: str) -> None:
    others = [other for other in PARTS if other != part]
    assert not broken(part, "jax", "jaxlib", "flax", "autoplan", *others, but=f"autoplan.{part}")


def test_internals_of_jax_only_in_the_compatibility_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for part in PARTS
        for path in sources(part)
        if path != COMPATIBILITY
        for line, module in imports(path)
        if inside(module, *INTERNALS)
    ]
    found += [
        f"{path.relative_to(ROOT)}:{node.lineno} reads {ast.unparse(node)}"
        for part in PARTS
        for path in sources(part)
        if path != COMPATIBILITY
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and inside(ast.unparse(node), *INTERNALS)
    ]
    assert not found


def test_our_folders_are_imported_by_their_installed_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for folder in (*PARTS, "tests", "examples")
        for path in sources(folder)
        for line, module in imports(path)
        if inside(module, "cost_models", "search")
    ]
    assert not found, "write autoplan.cost_models and autoplan.search"


USER_SCRIPT = """
import sys
import search, cost_models
import autoplan, autoplan.search, autoplan.cost_models, autoplan.cli
assert search.MINE == cost_models.MINE == "the user's", (search, cost_models)
assert autoplan.search.__name__ == "autoplan.search" and autoplan.search is not search

import jax, jax.numpy as jnp

@autoplan.parallelize(cluster="cpu:2")
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

plan = step.plan(jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32"))
assert plan.mesh.num_devices == 2
print("planned")
"""


def test_a_users_own_search_and_cost_models_do_no_harm(tmp_path: Path) -> None:
    for name in ("search.py", "cost_models.py"):
        (tmp_path / name).write_text('MINE = "the user\'s"\n')
    script = tmp_path / "train.py"
    script.write_text(USER_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout == "planned\n", done.stdout + done.stderr


def test_importing_autoplan_starts_no_backend(tmp_path: Path) -> None:
    code = (
        "import autoplan, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # refused once there is a backend\n"
        "assert len(jax.devices('cpu')) == 3, jax.devices()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
