"""Makes pages readable on a phone: long names in code can break, and wide rows stack (site.css)."""

from __future__ import annotations

import re
from html import escape
from itertools import count
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>\s*<td.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
CODE = re.compile(r"<code>[^<]*</code>")
# After a dot, a bracket and the like, and before the next word of a CamelCase name.
END_OF_WORD = re.compile(r"(?<=\w[._(=/,])(?=\w)|(?<=[a-z])(?=[A-Z][a-z])")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with the body of every page."""
    html = CODE.sub(lambda code: END_OF_WORD.sub("<wbr>", code[0]), html)
    return TABLE.sub(stacking, html)


def stacking(table: re.Match[str]) -> str:
    """The table, with labeled cells if it has many columns of words."""
    text = table[0]
    heads = [TAG.sub("", head).strip() for head in HEAD.findall(text)]
    if len(heads) < 4 or max(len(TAG.sub("", cell)) for cell in CELL.findall(text)) < 50:
        return text
    text = ROW.sub(lambda row: labeled(row[0], heads), text)
    return text.replace("<table>", "<table data-stacks>", 1)


def labeled(row: str, heads: list[str]) -> str:
    """The row, where each cell but the first says what its column is called."""
    numbers = count()

    def label(cell: re.Match[str]) -> str:
        number = next(numbers)
        name = f' data-label="{escape(heads[number])}"' if number else ""
        return f"<td{name}>{cell[1]}</td>"

    return CELL.sub(label, row)
