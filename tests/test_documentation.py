"""Every Python block of the documentation runs, and what pages link to or name is there."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from tables import every
from worker_threads import end_replica_threads

import unisono

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^[ >]*(?:```|~~~)(.*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
EXAMPLES = sorted(path for path in (ROOT / "src").rglob("*.py") if ">>> " in path.read_text())

each_page = every("page", PAGES)

blocks = [
    pytest.param(
        page,
        match,
        id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 2}",
        marks=pytest.mark.backend if "init_process_group(" in match[1] else (),
    )
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
]


@pytest.mark.parametrize(("page", "match"), blocks)
def test_the_block_runs(page: Path, match: re.Match[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = page.read_text()[: match.start(1)].count("\n")

    # Blank lines before the code make a traceback name the line of the page.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n" * line + match[1], str(page), "exec"), namespace)

    assert len(namespace) > 2
    namespace.clear()
    end_replica_threads()


@each_page
def test_a_page_begins_with_a_program_or_command(page: Path) -> None:
    beginning, fence, _ = page.read_text().partition("\n```")

    # The changelog and the list of examples are no pages to learn from.
    is_list = page.name == "CHANGELOG.md" or page.parent.name == "examples"
    assert is_list or (fence and len(beginning.split()) < 130)


@each_page
def test_no_block_is_passed_over(page: Path) -> None:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    kinds = [fence[1] for fence in fences[::2]]

    # What is written otherwise, or further in, would look like a program and never run.
    assert set(kinds) <= {"python", "py", "bash", "diff", "yaml", ""}
    assert kinds.count("python") == len(BLOCK.findall(text))
    assert "py" not in kinds or page.name in ("coming_from_ddp.md", "coming_from_tensorflow.md")
    for fence, end in zip(fences[::2], fences[1::2], strict=True):
        assert fence[1] or not is_python(text[fence.end() : end.start()])


def test_a_program_is_told_from_other_text() -> None:
    assert is_python("import unisono\nunisono.PerReplica([1])")
    assert not is_python("WorkerLostError: Rank 2 was in call 33")


def is_python(text: str) -> bool:
    try:
        compile(text, "text", "exec")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_a_docstring_hold(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)

    failed, tried = doctest.testmod(importlib.import_module(name))

    assert (failed, tried > 0) == (0, True)


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "benchmarks|examples|tests|scripts|native|src|docs"
    named = re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*\w)(?![{{\w])", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.filterwarnings("ignore:.*is an older name:DeprecationWarning")
@each_page
def test_names_of_ours_that_a_page_uses_exist(page: Path) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    named = re.findall(r"(?<![\w./'\"$])(?:uo|unisono)((?:\.[A-Za-z_]\w*)+)", code)

    # `X` stands for any name.
    assert [name for name in named if name[-2:] != ".X" and not exists(name.split(".")[1:])] == []


def exists(parts: list[str]) -> bool:
    """Whether `unisono` has this attribute, or a module that has it."""
    found: Any = unisono
    for number, part in enumerate(parts):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join(["unisono", *parts[: number + 1]]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]

    assert not missing


def test_the_readme_stays_short() -> None:
    text = (ROOT / "README.md").read_text()

    assert len(text.splitlines()) <= 150
    # The table of what it does, without its head.
    assert len(re.findall(r"^\|", text, re.MULTILINE)) - 2 <= 10


def test_the_documented_reduction_is_short() -> None:
    first = BLOCK.search((ROOT / "docs" / "your_own_reduction.md").read_text())

    assert first is not None
    assert len(first[1].splitlines()) < 40
