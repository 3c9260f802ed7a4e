"""What travels with the package is true: its stub, its version, its citation."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import unisono as uo

ROOT = Path(__file__).parents[1]
STUB = ROOT / "src" / "unisono" / "_native.pyi"


def test_the_stub_of_the_native_core_is_that_of_the_module() -> None:
    native = pytest.importorskip("unisono._native")

    assert stub_members(ast.parse(STUB.read_text())) == module_members(native)


def test_a_stub_that_differs_is_noticed() -> None:
    module: Any = ModuleType("other")
    module.trim = pytest.importorskip("unisono._native").trim

    assert module_members(module) == {"trim": []}
    assert stub_members(ast.parse("def trim(now): ...\nclass Bell:\n  def ring(self): ...")) == {
        "trim": ["now"],
        "Bell.ring": ["self"],
    }


def test_the_installation_shows_what_it_does_and_is_done_once(tmp_path: Path) -> None:
    script, python = tmp_path / "scripts" / "install", tmp_path / ".venv" / "bin" / "python"
    for path in (script, python, tmp_path / "native" / "core.cc"):
        path.parent.mkdir(parents=True)
        path.touch()
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).touch()
    script.write_text((ROOT / "scripts" / "install").read_text())
    # Speaks as pip does.
    python.write_text("#!/bin/sh\necho Collecting torch\necho Requirement already satisfied: x\n")
    python.chmod(0o755)

    first, second = (
        subprocess.run(["bash", script], capture_output=True, text=True, timeout=60)
        for _ in range(2)
    )

    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.count("Collecting torch") == 2
    assert "already satisfied" not in first.stdout
    assert second.stdout == "== Unisono is already installed in .venv\n"


def stub_members(tree: ast.Module) -> dict[str, list[str] | None]:
    """The functions and methods with the names of their arguments; a property has None."""
    members: dict[str, list[str] | None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = argument_names(node)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    is_property = any(ast.unparse(d) == "property" for d in method.decorator_list)
                    names = None if is_property else argument_names(method)
                    members[f"{node.name}.{method.name}"] = names
    return members


def module_members(module: ModuleType) -> dict[str, list[str] | None]:
    """The same of a module that nanobind made, which keeps signatures as text."""
    members: dict[str, list[str] | None] = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type):
            for key, member in vars(thing).items():
                if key == "__init__" or not key.startswith("_"):
                    members[f"{name}.{key}"] = signature(member)
        elif not name.startswith("_"):
            members[name] = signature(thing)
    return members


def signature(thing: Any) -> list[str] | None:
    if isinstance(thing, property):
        return None
    (overload,) = thing.__nb_signature__
    (node,) = ast.parse(f"{overload[0]}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return argument_names(node)


def argument_names(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in node.args.args]


def test_the_version_is_semantic() -> None:
    number = r"(0|[1-9]\d*)"

    assert re.fullmatch(rf"{number}\.{number}\.{number}(-[0-9A-Za-z.-]+)?", uo.__version__)


def test_the_changelog_begins_with_what_comes_next_or_with_this_version() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] in ("Unreleased", uo.__version__)


def test_what_pypi_shows_has_no_link_that_leads_nowhere_there() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    (name,) = re.findall(r'^readme = "(.*)"', settings, re.MULTILINE)

    shown = (ROOT / name).read_text()

    # Markdown links and pictures, and those of HTML.
    links = re.findall(r"\]\(([^)]*)\)", shown) + re.findall(r'(?:href|src)="([^"]*)', shown)
    assert [link for link in links if not link.startswith("https://")] == []


def test_pypi_and_the_readme_begin_alike() -> None:
    pages = [(ROOT / name).read_text() for name in ("PYPI.md", "README.md")]

    shown, read = (page.partition("\n## ")[0].strip() for page in pages)

    # The title, what it is, the program, and what it computes.
    assert shown.startswith(read)


def test_the_citation_is_whole_and_names_this_version() -> None:
    yaml = pytest.importorskip("yaml")

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    # What the format requires, and what a reader needs.
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"].startswith("Unisono")
    assert citation["authors"] == [{"name": "The Unisono developers"}]
    assert citation["version"] == uo.__version__
    assert citation["license"] == "Apache-2.0"
