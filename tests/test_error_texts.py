"""Every error text of the sources is short and plain: read from the code, without raising any."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parents[1] / "src"
MAX_SENTENCES = 3
# What errors are made with, besides classes that end in `Error`.
MAKERS = ("UsageError", "ClickException", "Unavailable", "BadParameter", "_refuse")
# Errors that carry a piece of a message to code of ours, which makes a sentence of it.
INNER = (
    *("ConnectionError", "StrangeError", "RefusedError", "BrokenConnectionError", "OSError"),
    *("DistStoreError", "DistNetworkError"),
)
# Habits of prose that newcomers stumble over, each with a better way to say it.
HABITS = {
    r"\banew\b": "again",
    r"\bof (its|their|one's|his) own\b": "its own ...",
    r"\bnobody\b": "name who acts",
    r"\bas many\b": "the same number",
    r"\bdealt\b": "split",
    r"\b(dear|mended|whoever|thereby|thereof)\b": "a usual word",
    r"\ba text\b": "a string",
    r"\b(step|batch|replica|worker|GPU|rank|host)s? a (step|batch|replica|worker)\b": ("per"),
    r"(?<!There )\bis no (?!longer|more)\w+": "is not a ...",
    r"\bWrite such as\b": "for example",
}

ORDERS = (
    "add|allocate|ask|assign|bring|call|change|check|clear|compute|convert|distribute|do|drop|encrypt|enter|expand|"
    "flatten|fork|gather|give|import|"
    "install|iterate|keep|leave|let|list|load|look|lower|make|measure|mirror|move|name|override|pass|raise|"
    "read|record|reduce|register|remove|report|restore|resume|return|run|save|seed|send|set|split|start|take|train|try|"
    "unset|update|use|wait|wrap|write"
)


class ErrorText(NamedTuple):
    """A message, with `{}` in the place of what is filled in."""

    place: str
    text: str


def error_texts() -> Iterator[ErrorText]:
    """The texts that errors of ours are made with."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            is_error = name.endswith("Error") and name not in INNER
            text = spelled(node.args[0])
            # A single word is no message: a name, or a key.
            if (is_error or name in MAKERS) and text is not None and " " in text:
                yield ErrorText(f"{path.relative_to(SOURCES)}:{node.lineno}", text)


def spelled(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(spelled(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(spelled(side) or "{}" for side in (node.left, node.right))
    return None


def sentences(text: str) -> list[str]:
    """The sentences of a text: each ends with a full stop before a new beginning."""
    return re.split(r"(?<=[.!?]) +(?=[A-Z`'{])", text.strip())


@cache
def texts() -> list[ErrorText]:
    return list(error_texts())


def test_there_are_texts_of_all_kinds() -> None:
    assert len(texts()) > 300
    packages = {text.place.split("/")[1] for text in texts()}
    assert packages >= {"cluster", "input", "strategies", "values", "variables"}


def test_no_text_has_more_than_three_sentences() -> None:
    assert [text for text in texts() if len(sentences(text.text)) > MAX_SENTENCES] == []


def test_no_text_is_very_long() -> None:
    assert [text for text in texts() if len(text.text.split()) > 70] == []


def test_texts_say_what_to_do() -> None:
    # Either what must be, or an order: at the beginning of a sentence, or after a comma or colon.
    remedy = re.compile(
        rf"\b(?:must|got|found)\b|(?:^|[.:,;}}] |\n|}})(?:Please )?(?:{ORDERS})\b", re.I
    )
    whole = [text for text in texts() if text.text.endswith(".")]

    assert len(whole) > 300
    assert [text for text in whole if not remedy.search(text.text)] == []


@pytest.mark.parametrize("habit", HABITS)
def test_texts_are_in_plain_english(habit: str) -> None:
    found = [text for text in texts() if re.search(habit, text.text)]

    assert found == [], f"Better: {HABITS[habit]}."


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("One.", 1),
        ("`x` must be 1.5 or more, got {}. Write 2.", 2),
        ("A device such as cuda:0. `x` is none. Give one.", 3),
    ],
)
def test_sentences_are_counted(text: str, number: int) -> None:
    assert len(sentences(text)) == number
