"""Every Python block of the documentation runs, and every link in it leads somewhere."""

from __future__ import annotations

import gc
import re
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

blocks = [
    pytest.param(
        page, match, id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 2}"
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


def end_replica_threads() -> None:
    """The threads of a strategy end when nobody has it any more; a program need not close it."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("unisono-replica"):
            thread.join(timeout=10)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]

    assert not missing


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_documented_reduction_is_short() -> None:
    first = BLOCK.search((ROOT / "docs" / "your_own_reduction.md").read_text())

    assert first is not None
    assert len(first[1].splitlines()) < 40
