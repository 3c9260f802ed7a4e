"""Every row of the tables on the page for those who come from TensorFlow is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorflow_rows import checks, made

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_tensorflow.md"


def rows() -> Iterator[tuple[str, str]]:
    """The section and the first cell of every row."""
    section, is_body = "", False
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        is_table = line.startswith("|")
        if is_table and is_body:
            yield section, re.split(r" \| ", line[2:])[0]
        is_body = is_table and (is_body or line.startswith("|---"))


ROWS = list(rows())


def matching(section: str, cell: str) -> list[tuple[str, str]]:
    return [key for key in checks if key[0] == section and cell.startswith(key[1])]


def test_the_page_has_its_tables() -> None:
    assert len(ROWS) > 120
    assert len({section for section, _ in ROWS}) == 10


@pytest.mark.parametrize(("section", "cell"), ROWS)
def test_the_row_is_true(section: str, cell: str) -> None:
    (key,) = matching(section, cell)
    try:
        checks[key]()
    finally:
        while made:
            made.pop().close()


def test_no_check_is_of_a_row_that_is_gone() -> None:
    used = {key for row in ROWS for key in matching(*row)}

    assert set(checks) - used == set()
