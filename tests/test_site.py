"""The documentation as a site: it builds strictly, alone, and leaves nothing out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_architecture import LAYERS

import unisono as uo
from unisono_tools.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PICTURES = sorted(path.stem for path in (DOCS / "pictures").glob("*.svg"))
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
MODULES = [uo, *(module for key in uo.__all__ if inspect.ismodule(module := getattr(uo, key)))]
ERRORS = [
    name
    for name, thing in vars(uo.errors).items()
    if inspect.isclass(thing) and issubclass(thing, uo.errors.UnisonoError)
]

# What each of the five API pages defines: its class, members and arguments. Each has a place of its
# own in the first column of a table.
TENSORFLOW_MEMBERS = {
    "tf.distribute.CrossDeviceOps": """
        CrossDeviceOps reduce reduce_implementation batch_reduce batch_reduce_implementation
        broadcast broadcast_implementation reduce_op per_replica_value destinations options tensor
        value_destination_pairs""",
    "tf.distribute.ReductionToOneDevice": """
        ReductionToOneDevice reduce_to_device accumulation_fn reduce batch_reduce broadcast
        reduce_op per_replica_value destinations options value_destination_pairs tensor""",
    "tf.contrib.distribute.AllReduceCrossDeviceOps": """
        AllReduceCrossDeviceOps all_reduce_alg num_packs agg_small_grads_max_bytes
        agg_small_grads_max_group reduce batch_reduce broadcast reduce_op per_replica_value
        destinations value_destination_pairs tensor PerReplica Mirrored""",
    "tf.contrib.distribute.CrossTowerOps": """
        CrossTowerOps reduce batch_reduce broadcast aggregation per_device_value destinations
        value_destination_pairs tensor PerDevice""",
    "tf.contrib.distribute.CollectiveAllReduceStrategy": """
        CollectiveAllReduceStrategy num_gpus_per_worker extended num_replicas_in_sync __deepcopy__
        memo configure cluster_spec experimental_finalize experimental_initialize experimental_run
        fn input_iterator make_dataset_iterator dataset make_input_fn_iterator input_fn
        replication_mode initialize get_next num_input_pipelines input_pipeline_id reduce reduce_op
        value scope update_config_proto config_proto replica_id_in_sync_group PerReplica Mirrored
        Tensor""",
}

# What they refer to; it is anywhere in the section.
TENSORFLOW_REFERENCES = {
    "tf.distribute.CrossDeviceOps": """
        tf.distribute.experimental.CommunicationOptions tf.Tensor tf.Variable
        tf.distribute.DistributedValues tf.distribute.ReduceOp tf.distribute.Strategy
        tf.distribute.MirroredStrategy tf.distribute.ReductionToOneDevice
        tf.distribute.NcclAllReduce tf.distribute.HierarchicalCopyAllReduce
        tf.distribute.StrategyExtended.reduce_to tf.distribute.StrategyExtended.batch_reduce_to
        tf.compat.v1.distribute.CrossDeviceOps ValueError""",
    "tf.distribute.ReductionToOneDevice": """
        tf.math.add_n tf.distribute.MirroredStrategy tf.distribute.NcclAllReduce
        tf.distribute.HierarchicalCopyAllReduce StrategyExtended.reduce_to
        StrategyExtended.batch_reduce_to CrossDeviceOps""",
    "tf.contrib.distribute.AllReduceCrossDeviceOps": """
        tf.distribute.ReduceOp.SUM tf.distribute.ReduceOp.MEAN CrossDeviceOps ValueError""",
    "tf.contrib.distribute.CrossTowerOps": """
        tf.VariableAggregation.SUM tf.VariableAggregation.MEAN Mirrored ValueError""",
    "tf.contrib.distribute.CollectiveAllReduceStrategy": """
        tf.distribute.Strategy tf.distribute.StrategyExtended tf.distribute.InputContext
        tf.distribute.InputIterator tf.distribute.InputReplicationMode.PER_WORKER
        tf.distribute.ReduceOp tf.distribute.get_replica_context tf.data.Dataset tf.ConfigProto
        tf.nest call_for_each_replica""",
}


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `pip install .[docs]` installs it")
    # Not `--quiet`, which hides the warnings that strict mode counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]

    built = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert built.returncode == 0, built.stderr
    html = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(html) > 20
    loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="(https?:[^"]*)', "".join(html))
    assert loaded == []
    # On a phone, the cells of a wide table stand below each other and name their columns.
    assert 'data-label="uneven last batch"' in (tmp_path / "when_to_use_it/index.html").read_text()


def test_shell_commands_can_be_read(tmp_path: Path) -> None:
    script = tmp_path / "all.sh"
    script.write_text("\n".join(shell_blocks()))

    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_every_command_of_ours_has_known_options(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in shell_blocks() for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("unisono ")]

    assert commands
    for _, name, *arguments in commands:
        for file in (Path(word) for word in arguments if re.fullmatch(r"\w[\w/]*\.\w+", word)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        for folder in (Path(word) for word in arguments if re.fullmatch(r"[a-z_]+", word)):
            folder.mkdir(exist_ok=True)
        # Reads the arguments up to a pipe, and raises if it cannot; starts nothing.
        main.commands[name].make_context(
            name, list(takewhile(lambda w: w not in "|>&;", arguments))
        )


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    names = [key for key in module.__all__ if not inspect.ismodule(getattr(module, key))]

    listed = re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", REFERENCE, re.MULTILINE)

    # A name is listed by a line such as `::: unisono.MirroredStrategy` in docs/reference.
    assert sorted(listed) == sorted(names)


def test_every_error_has_a_section() -> None:
    sections = re.findall(r"^### (\w+)$", page_text("errors.md"), re.MULTILINE)

    assert set(ERRORS) - {"UnisonoError"} - set(sections) == set()


def test_every_message_on_the_page_of_errors_is_one() -> None:
    tables = re.findall(
        r"^\| message \|.*\n\|-.*\n((?:\|.*\n)+)", page_text("errors.md"), re.MULTILINE
    )
    cells = [
        row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.split("\n")
    ]
    pieces = [piece.strip() for cell in cells for piece in re.split(r";|\.\.\.", cell)]
    messages = "\n".join(texts_of_the_sources())

    assert len(pieces) > 60
    # Write `...` for what differs from case to case.
    assert [piece for piece in pieces if piece not in messages] == []


@pytest.mark.parametrize("page", TENSORFLOW_MEMBERS)
def test_every_member_of_a_tensorflow_page_has_a_row(page: str) -> None:
    rows = re.findall(r"^\|(.*?)\|", tensorflow_section(page), re.MULTILINE)
    code = " ".join(re.findall(r"`([^`\n]+)`", " ".join(rows)))

    # A part of another name, such as that of `extended` in `strategy.extended`, does not count.
    assert [
        name
        for name in TENSORFLOW_MEMBERS[page].split()
        if not re.search(rf"(?<![\w.]){name}(?![\w.])", code)
    ] == []


@pytest.mark.parametrize("page", TENSORFLOW_REFERENCES)
def test_every_reference_of_a_tensorflow_page_is_explained(page: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", tensorflow_section(page)))

    assert [
        name
        for name in TENSORFLOW_REFERENCES[page].split()
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)
    ] == []


@pytest.mark.parametrize("page", TENSORFLOW_MEMBERS)
def test_every_row_of_a_tensorflow_page_says_what_it_is_here(page: str) -> None:
    rows = re.findall(r"^\| `.*", tensorflow_section(page), re.MULTILINE)

    assert rows
    assert [
        row for row in rows if len(cells := row.split(" | ")) != 3 or not cells[1].strip()
    ] == []


def test_the_tensorflow_program_of_the_page_is_that_of_the_example() -> None:
    example = (ROOT / "examples" / "from_tensorflow.py").read_text()
    known = {line.strip() for line in re.findall(r"# tf\|(.*)", example)}

    (program,) = other_programs("coming_from_tensorflow.md")

    assert [line for line in program.splitlines() if line and line.strip() not in known] == []
    ast.parse(program)


def test_ddp_and_its_port_save_the_same_weights(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    (program,) = other_programs("coming_from_ddp.md")
    port = re.findall(r"^```python\n(.*?)^```", page_text("coming_from_ddp.md"), re.M | re.S)[0]

    exec(compile(program, "ddp", "exec"), {})
    theirs = torch.load("model.pt")
    exec(compile(port, "port", "exec"), {})
    ours = torch.load("model.pt")

    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_what_its_script_says(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    draw = importlib.import_module("draw")

    drawn = draw.draw(name, tmp_path)

    # Run `python docs/pictures/draw.py` if they differ.
    assert words(DOCS / "pictures" / f"{name}.svg") == words(drawn)
    # Versions of matplotlib differ by a point.
    assert shapes(drawn) == [
        pytest.approx(path, abs=1.5) for path in shapes(DOCS / "pictures" / f"{name}.svg")
    ]


def test_every_picture_is_drawn_and_shown(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    draw = importlib.import_module("draw")
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))

    shown = set(re.findall(r"\(pictures/(\w+)\.svg\)", pages))

    assert shown == set(PICTURES) == set(draw.PICTURES)


def test_the_picture_of_the_layers_has_every_package() -> None:
    packages = [package for line in LAYERS for package in line]

    assert words(DOCS / "pictures" / "layers.svg")[: len(packages)] == packages


def test_the_page_on_architecture_has_every_package() -> None:
    page = page_text("architecture.md")

    assert [name for line in LAYERS for name in line if f"`{name}`" not in page] == []


def test_the_program_of_the_readme_is_short() -> None:
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)

    assert program is not None
    assert len([line for line in program[1].splitlines() if line]) <= 15


def shell_blocks() -> list[str]:
    """What the pages ask the reader to type."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def texts_of_the_sources() -> Iterator[str]:
    """All texts in the Python sources, with nothing in the place of what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "\0".join(str(getattr(part, "value", "")) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def tensorflow_section(page: str) -> str:
    """What is said of one of TensorFlow's pages."""
    _, section = page_text("coming_from_tensorflow.md").split(f"### `{page}`")
    return section.partition("\n##")[0]


def page_text(page: str) -> str:
    return (DOCS / page).read_text()


def other_programs(page: str) -> list[str]:
    """The programs of a page that are for other libraries: blocks called `py`, not `python`."""
    return re.findall(r"^```py\n(.*?)^```", page_text(page), re.MULTILINE | re.DOTALL)


def words(picture: Path) -> list[str]:
    """The texts of a picture, in the order in which they were drawn."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text(), re.DOTALL)


def shapes(picture: Path) -> list[list[float]]:
    """The boxes, bars and arrows of a picture: where each is, in points."""
    paths = re.findall(r'<g id="patch_\d+">\s*<path d="(.*?)"', picture.read_text(), re.DOTALL)
    return [[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in paths]
