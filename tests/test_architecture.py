"""The import rule: a package imports only itself and lower ones. And the length of files.

`unisono` is what a training program imports. `unisono_tools` imports it, never the other way round.
"""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import every

from unisono.cluster import detection
from unisono.strategies.mirrored import LAUNCHED

SRC = Path(__file__).parents[1] / "src"
ROOT = SRC / "unisono"
TOOLS = SRC / "unisono_tools"
MAX_LINES = 400
MAX_LINES_OF_A_TRANSPORT = 150
TRANSPORTS = ["mesh", "connection", "gloo_transport", "gloo_peer", "gloo_memory", "mpi_transport"]

# Bottom first. Packages on one line do not see each other.
LAYERS = [
    ["errors", "sharing", "torch_private"],
    ["arguments", "system"],
    ["options", "tracing", "_native"],
    ["devices", "kernels"],
    ["values", "packing", "algorithms"],
    ["reductions"],
    ["contexts"],
    ["engines", "modules", "input"],
    ["gradients"],
    ["strategies"],
    ["costs", "functions", "variables"],
    ["communicators"],
    ["cluster", "groups"],
    ["hooks"],
    ["workers"],
    ["checkpoints", "backend"],
    ["contrib", "testing", "experimental", "cluster_resolver"],
]
# What a program on one host does not load, by what it is for. All else is the core.
GROUPS = {
    "many workers": ["costs", "communicators", "cluster", "groups", "hooks", "workers"],
    "captured steps": ["functions"],
    "other interfaces": [
        "variables",
        "checkpoints",
        "backend",
        "contrib",
        "testing",
        "experimental",
        "cluster_resolver",
    ],
}
# The packages of `unisono_tools`, in the same way. They all see `unisono`.
TOOL_LAYERS = [
    ["tables", "traces", "namespaces", "frozen", "processes", "pricing"],
    ["benchmarks", "demo", "launching"],
    ["hosts", "tuning", "elastic_demo"],
    ["planning"],
    ["cli"],
]
LEVELS = {package: level for level, line in enumerate(LAYERS) for package in line}
TOOL_LEVELS = {package: level for level, line in enumerate(TOOL_LAYERS) for package in line}
# `python -m unisono`, which nothing imports.
COMMANDS = {ROOT / "__main__.py", ROOT / "cli.py"}
# Where `unisono` names the tools. Recording loads them when a program asks what a trace tells.
TOOL_DOORS = {*COMMANDS, ROOT / "tracing" / "recording.py"}
# Where the core names packages above it, which it loads when a program needs them.
DOORS = {
    "reductions/nccl.py": {"communicators"},
    "strategies/mirrored.py": {"cluster", "costs"},
    "strategies/strategy.py": {"contrib"},
    "strategies/worker.py": {"workers"},
}
CORE = {package for line in LAYERS for package in line} - {*itertools.chain(*GROUPS.values())}
# What the program of the README may load.
MAX_LINES_OF_A_PROGRAM = 17_500

# The package itself only collects the public names, so it sees all others.
SOURCES = sorted({*ROOT.rglob("*.py")} - {ROOT / "__init__.py", *COMMANDS})
TOOL_SOURCES = sorted(path for path in TOOLS.rglob("*.py") if path != TOOLS / "__init__.py")

# The walks of the page on the architecture: what each is called, and its files in order.
PAGE = (SRC.parent / "docs" / "architecture.md").read_text()
_SECTION = PAGE.partition("## Four walks")[2].partition("\n## ")[0]
WALKS = {
    text.splitlines()[0]: re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)
    for text in _SECTION.split("\n### ")[1:]
}

each_source = every("path", SOURCES)
each_tool = every("path", TOOL_SOURCES)


@each_source
def test_imports_point_down(path: Path) -> None:
    file = path.relative_to(ROOT)
    package = file.parts[0].removesuffix(".py")

    assert forbidden_imports(package, path.read_text()) == DOORS.get(file.as_posix(), set())


@each_source
def test_packages_below_the_strategies_use_nothing_of_a_strategy(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if LEVELS[package] < LEVELS["strategies"]:
        assert uses_of_a_strategy(path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "context.strategy.extended.mirrors",
        "self._strategy.num_replicas_in_sync",
        "strategy.extended",
        "get_strategy().reduce(op, value)",
        "extended = getattr(context.strategy, name)",
    ],
)
def test_a_use_of_a_strategy_is_found(source: str) -> None:
    assert uses_of_a_strategy(source)


def test_a_strategy_may_be_compared_named_and_handed_on() -> None:
    source = "context.strategy is other and fn(context.strategy, f'{context.strategy!r}')"

    assert uses_of_a_strategy(source) == set()


@each_tool
def test_imports_of_the_tools_point_down(path: Path) -> None:
    package = path.relative_to(TOOLS).parts[0].removesuffix(".py")

    assert forbidden_imports(package, path.read_text(), "unisono_tools") == set()


def test_the_core_imports_the_tools_at_its_doors_alone() -> None:
    found = {
        path
        for path in ROOT.rglob("*.py")
        if any(imports_of(ast.parse(path.read_text()), "unisono_tools"))
    }

    assert found == TOOL_DOORS


def test_importing_the_core_loads_neither_the_tools_nor_what_they_need() -> None:
    # Strategies, and with them most of the core, are loaded when a name of theirs is used.
    others = ("unisono_tools", "click", "rich", "matplotlib", "sklearn", "unisono.strategies")
    script = f"import sys, unisono; print([name for name in {others} if name in sys.modules])"

    assert printed(script) == "[]"


def test_a_program_on_one_host_loads_the_core_alone() -> None:
    readme = (SRC.parent / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert program is not None
    show = "import sys; print(*(getattr(one, '__file__', None) for one in sys.modules.values()))"

    loaded = {Path(file) for file in printed(f"{program[1]}\n{show}").split()}

    files = [path.relative_to(ROOT) for path in {*ROOT.rglob("*.py")} & loaded]
    assert {file.parts[0].removesuffix(".py") for file in files} - {"__init__"} <= CORE
    assert ROOT / "strategies" / "strategy.py" in loaded
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert lines <= MAX_LINES_OF_A_PROGRAM


def test_the_core_asks_whether_a_launcher_has_set_something() -> None:
    variables = {name for *_, any_of, needed in detection._ORDER for name in any_of | needed}
    # They come with others, and say nothing by themselves.
    read = variables - {"SLURM_STEP_ID", "UNISONO_NUM_WORKERS"} | {"WORLD_SIZE", "SLURM_NTASKS"}

    assert read == {*LAUNCHED}


@every("path", [*SOURCES, *TOOL_SOURCES])
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_there_are_four_walks_through_the_sources() -> None:
    names = ["A training step", "A batch", "An all-reduce between hosts", "A benchmark"]

    assert list(WALKS) == names


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short_and_leads_down(name: str) -> None:
    levels = [level_of(file) for file in WALKS[name]]

    assert 1 < len(levels) <= 7
    assert len({*WALKS[name]}) == len(levels)
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_is_small(name: str) -> None:
    path = ROOT / "communicators" / f"{name}.py"

    assert len(path.read_text().splitlines()) <= MAX_LINES_OF_A_TRANSPORT


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


def printed(program: str) -> str:
    """What a program prints in a new process."""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout.strip()


def level_of(file: str) -> tuple[bool, int]:
    """How high the file of a walk lies; the tools are above the core."""
    is_tool = file.startswith(f"{TOOLS.name}/")
    path = Path(file).relative_to(TOOLS.name) if is_tool else Path(file)
    assert ((TOOLS if is_tool else ROOT) / path).is_file(), f"{file} is not there"
    return is_tool, (TOOL_LEVELS if is_tool else LEVELS)[path.parts[0].removesuffix(".py")]


def forbidden_imports(package: str, source: str, root: str = "unisono") -> set[str]:
    """The packages of `root` that a file of `package` imports when it runs, and may not."""
    levels = LEVELS if root == "unisono" else TOOL_LEVELS
    level = levels[package]
    imported = {name.split(".")[1] for name in imports_of(ast.parse(source), root) if "." in name}
    return {name for name in imported - {package} if levels.get(name, level) >= level}


def uses_of_a_strategy(source: str) -> set[str]:
    """The expressions that look into a strategy. What lower packages need is in `Replicas`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        looked_into = None
        if isinstance(node, ast.Attribute):
            looked_into = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            looked_into = node.args[0]
        if looked_into is not None and is_a_strategy(looked_into):
            found.add(ast.unparse(node))
    return found


def is_a_strategy(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
    return name in {"strategy", "_strategy", "get_strategy", "extended", "_extended"}


def imports_of(node: ast.AST, root: str) -> Iterator[str]:
    """The dotted names under `root` that are imported at or below `node`."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name.split(".")[0] == root)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, root)
