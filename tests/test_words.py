"""Pages, docstrings and comments have plain words: habits to avoid, and what to write instead."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tables import every

ROOT = Path(__file__).parents[1]
THIS = Path(__file__).name
FOLDERS = ("benchmarks", "docs", "examples", "native", "src", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
# Older entries of the changelog stay as they were written.
ROOT_PAGES = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
PAGES = [*ROOT_PAGES, *(path for path in FILES if path.suffix == ".md")]
# This file has the habits as examples.
SOURCES = [path for path in FILES if path.suffix in (".py", ".cc", ".h") and path.name != THIS]

CODE = re.compile(r"\S")

THINGS = (
    "replica|worker|host|GPU|device|rank|step|second|minute|core|process|thread|parameter|pack|"
    "layer|call|link|pass|run|destination|component|row|socket|sample|batch|message|file|task"
)
NUMBERS = "one|two|three|four|eight|once|twice|bytes|seconds|milliseconds"
SMALL_WORDS = (
    "of|in|on|if|to|for|from|by|with|at|as|is|than|and|or|over|has|had|makes|runs|ends|that|when|"
    "calls|before|after|into|until|while|where|because|within|between|but|waits|not|named|without"
)


class Habit(NamedTuple):
    """A habit, what to write instead, and a phrase that has it."""

    pattern: str
    instead: str
    example: str


HABITS = [
    Habit(
        rf"\b(?:{NUMBERS})(?: (?!(?:{SMALL_WORDS})\b)[\w-]+)? an? (?:{THINGS})\b",
        "per: one thread per replica",
        "one thread a replica",
    ),
    Habit(
        r"\bas many\b(?! (?:[\w-]+ ){1,4}as\b)",
        "the same number of devices",
        "all workers have as many",
    ),
    Habit(r"\bof (?:its|their|your|our|his|her) own\b(?! \w)", "its own copy", "a copy of its own"),
    Habit(r"\bone's own\b", "your own code", "code of one's own"),
    Habit(r"\bdear(?:er|est|ly)?\b", "expensive", "reading is dear"),
    Habit(r"\bmend(?:s|ed|ing)?\b", "fix", "a bug that is mended"),
    Habit(r"\bwho(?:m|so)?ever\b", "the caller, the rank that waits", "whoever waits"),
    Habit(r"\b(?:anew|afresh)\b", "again", "started anew"),
    Habit(
        r"\b(?:thereby|therein|thereof|thereupon|hereby|henceforth|whence|thence|whilst|amongst)\b",
        "a plain word, or a new sentence",
        "thereby it ends",
    ),
    Habit(r"\bseldom\b", "rarely", "it seldom fails"),
    Habit(r"\blikewise\b", "also, or the words again", "its arguments, likewise"),
    Habit(r"\babroad\b", "to other hosts", "ranks that send abroad"),
    Habit(r"\bfor ever\b", "forever", "waits for ever"),
    Habit(r"\bof no (?:more )?use\b", "no longer usable", "the strategy is of no more use"),
    Habit(r"\bgo(?:es)? by (?:the|its|that) name\b", "is called", "goes by its name"),
    Habit(r"\bsigns? of life\b", "heartbeat", "no sign of life for 10 s"),
    Habit(r"\brow of ranks\b", "ranks", "one row of ranks"),
    Habit(
        r"\bdeal(?:s|t)? (?:out|to|whole|step)\b|\b(?:is|are|be) dealt\b", "split", "is dealt to"
    ),
    Habit(r"\b(?:is|are|was|were) told\b", "learns, or name who says it", "a rank is told"),
    Habit(r"\b(?:is|are) noticed\b", "name who notices", "it is noticed"),
    Habit(r"\bat hand\b", "available", "only one was at hand"),
    Habit(r"\bfor a look\b", "for a quick run", "less of everything, for a look"),
]


@every("habit", HABITS)
def test_a_habit_is_found_and_is_not_in_what_to_write(habit: Habit) -> None:
    assert found([habit], habit.example)
    assert not found([habit], habit.instead)


def test_only_prose_is_read() -> None:
    module = '"""One thread\n\na replica."""\nx = "anew"  # one\n  # thread\n  # step anew\n'
    page = "`one's own` mended\n```python\nmended = 1\n```\nto be\nmended\n"

    assert found(HABITS, prose(Path("a.py"), module)) == [(1, "One thread a replica"), (6, "anew")]
    assert found(HABITS, prose(Path("a.cc"), "int anew;  // it is\n// told\n")) == [(1, "is told")]
    assert found(HABITS, prose(Path("a.md"), page)) == [(1, "mended"), (6, "mended")]


def test_pages_have_plain_words() -> None:
    assert complaints(PAGES) == []


def test_docstrings_and_comments_have_plain_words() -> None:
    assert complaints(SOURCES) == []


def test_the_spelling_checker_reads_all_prose_and_knows_our_words(tmp_path: Path) -> None:
    wrong = {"page.md": "a seperate page", "a.py": '"""To recieve."""', "b.py": "# normalised"}
    right = {"words.md": "COO, summarise, writeable, normalized"}
    for name, text in (wrong | right).items():
        (tmp_path / name).write_text(text)

    # As scripts/check runs it over the whole project.
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml")]
    found = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    named = {Path(line.partition(":")[0]).name for line in found.stdout.splitlines()}
    assert named == set(wrong), found.stderr
    assert "codespell" in (ROOT / "scripts" / "check").read_text()


def complaints(paths: Iterable[Path]) -> list[str]:
    """Says for each habit in these files where it is, and what to write instead."""
    return [
        f"{path.relative_to(ROOT)}:{line}: `{words}`; write instead: {instead(words)}"
        for path in paths
        for line, words in found(HABITS, prose(path, path.read_text()))
    ]


def found(habits: list[Habit], text: str) -> list[tuple[int, str]]:
    """The lines of a text that have one of these habits, with the words."""
    pattern = "|".join(f"(?:{habit.pattern})" for habit in habits).replace(" ", r"\s+")
    return [
        (1 + text.count("\n", 0, match.start()), " ".join(match[0].split()))
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def instead(words: str) -> str:
    return next(habit.instead for habit in HABITS if found([habit], words))


def prose(path: Path, text: str) -> str:
    """What people read in a file, at the lines where it is: no programs, no names of theirs."""
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", hidden, text, flags=re.MULTILINE | re.DOTALL)
    else:
        mark = "#" if path.suffix == ".py" else "//"
        parts = re.split(rf'("""|{mark}.*)', text)
        is_docstring = False
        for number, part in enumerate(parts):
            if part == '"""':
                is_docstring = not is_docstring
            elif not is_docstring:
                parts[number] = part.replace(mark, " ", 1) if number % 2 else CODE.sub(".", part)
        text = "".join(parts)
    return re.sub(r"`[^`\n]*`", hidden, text)


def hidden(match: re.Match[str]) -> str:
    return CODE.sub("_", match[0])
