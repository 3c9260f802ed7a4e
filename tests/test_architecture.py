"""The import rule, a package imports only itself and lower ones, and the length of files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import every

ROOT = Path(__file__).parents[1] / "src" / "unisono"
MAX_LINES = 400

# Bottom first. Packages on one line do not see each other.
LAYERS = [
    ["errors", "sharing"],
    ["arguments"],
    ["options", "tracing", "_native"],
    ["devices", "kernels"],
    ["values", "packing", "algorithms"],
    ["costs"],
    ["communicators"],
    ["reductions", "cluster", "backend", "hooks"],
    ["contexts"],
    ["engines", "variables", "input"],
    ["gradients"],
    ["functions"],
    ["strategies"],
    ["contrib", "testing", "experimental", "cluster_resolver"],
    ["benchmarks", "demo"],
    ["cli"],
]
LEVELS = {package: level for level, line in enumerate(LAYERS) for package in line}

# The package itself only collects the public names, so it sees all others.
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")

each_source = every("path", SOURCES)


@each_source
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")

    assert forbidden_imports(package, path.read_text()) == set()


@each_source
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("values", "from unisono import reductions", {"reductions"}),
        ("values", "from unisono.reductions.nccl import NcclAllReduce", {"reductions"}),
        ("values", "import unisono.strategies", {"strategies"}),
        ("values", "def late():\n    from unisono.contrib import PerDevice", {"contrib"}),
        ("values", "if True:\n    import unisono.packing, unisono.cluster", {"packing", "cluster"}),
        ("kernels", "from unisono.devices import Device", {"devices"}),
        ("devices", "from unisono.kernels import tree_reduce", {"kernels"}),
        ("errors", "from unisono import nowhere", {"nowhere"}),
    ],
)
def test_an_import_that_points_up_or_aside_is_found(
    package: str, source: str, found: set[str]
) -> None:
    assert forbidden_imports(package, source) == found


@pytest.mark.parametrize(
    "source",
    [
        "from unisono.values.sparse import concatenate",
        "from unisono.devices import Device\nfrom unisono import kernels, options",
        "import torch\nfrom collections import Counter",
        "if TYPE_CHECKING:\n    from unisono.strategies import Strategy",
        "import typing\nif typing.TYPE_CHECKING:\n    import unisono.contrib",
    ],
)
def test_an_import_that_points_down_or_is_for_types_is_let_through(source: str) -> None:
    assert forbidden_imports("values", source) == set()


def forbidden_imports(package: str, source: str) -> set[str]:
    """The packages of ours that a file of `package` imports when it runs, and may not."""
    level = LEVELS[package]
    imported = {name.split(".")[1] for name in imports_of(ast.parse(source)) if "." in name}
    return {name for name in imported - {package} if LEVELS.get(name, level) >= level}


def imports_of(node: ast.AST) -> Iterator[str]:
    """The dotted names under `unisono` that are imported at or below `node`."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name.split(".")[0] == "unisono")
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)
