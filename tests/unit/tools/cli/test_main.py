"""The manners of `unisono`: help, version, suggestions and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import unisono as uo
from unisono_tools.cli import main
from unisono_tools.cli.extras import quiet_torch
from unisono_tools.cli.parameters import parse_bytes


def commands(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of all commands, groups too."""
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, *path, name)


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_command_and_option_has_help_that_fits_80_columns(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"], terminal_width=80)

    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.help
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="unisono")

    assert result.output == f"unisono, version {uo.__version__}\n"


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(main, ["completoin"])

    assert result.exit_code == 2
    assert "Did you mean 'completion'?" in result.output


def test_a_file_that_cannot_be_written_is_named_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.mkdir()
    with uo.tracing.record(tmp_path):
        pass

    result = CliRunner().invoke(main, ["trace", str(tmp_path)])

    assert result.exit_code == 1
    assert f"Error: {path} cannot be read or written: Is a directory." in result.output


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("trace .", 1),
        ("info --topology nowhere.json", 2),
        ("plan --hosts 2 --gpus 8", 2),
        ("plan --hosts 2 --gpus 8 --model-bytes 28G --plot plan.png", 3),
    ],
)
def test_the_exit_status_is_that_of_the_table(
    words: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    result = CliRunner().invoke(main, words.split())

    assert result.exit_code == status, result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_what_it_needs_to_complete(shell: str) -> None:
    runner = CliRunner()

    script = runner.invoke(main, ["completion", shell])
    variables = {"_UNISONO_COMPLETE": f"{shell}_complete", "COMP_WORDS": "unisono bench all"}
    word = "all" if shell == "fish" else "2"
    answer = runner.invoke(main, prog_name="unisono", env=variables | {"COMP_CWORD": word})

    assert script.exit_code == 0
    assert f"_UNISONO_COMPLETE={shell}_complete" in script.output
    assert "all-reduce" in answer.output


@pytest.mark.parametrize(
    ("words", "status", "answer"),
    [
        ("--version", 0, "unisono, version"),
        ("--help", 0, "Commands:"),
        ("launch --help", 0, "--nproc-per-node"),
        ("completoin", 2, "Did you mean 'completion'?"),
        ("launch nowhere.py", 2, "does not exist"),
    ],
)
def test_a_quick_question_is_answered_without_torch(words: str, status: int, answer: str) -> None:
    command = [sys.executable, "-c", COMPLETES, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert ran.returncode == status
    assert answer in ran.stdout + ran.stderr
    assert ran.stderr.endswith("False\n"), "torch was imported, which takes seconds"


def test_torch_is_quiet_unless_the_user_wants_to_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with quiet_torch():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL"
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ

    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    with quiet_torch():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


COMPLETES = """
import sys
from unisono_tools.cli import main
try:
    main(prog_name="unisono")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "line",
    [
        "unisono ",
        "unisono bench all-reduce --quick --r",
        "unisono bench step --sec",
        "unisono completion z",
        "unisono info --topology ",
        "unisono plan --no",
        "unisono trace ",
    ],
)
def test_a_shell_is_answered_as_by_the_commands_but_without_torch(line: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    variables = words | {"_UNISONO_COMPLETE": "bash_complete"}

    slow = CliRunner().invoke(main, prog_name="unisono", env=variables)
    fast = subprocess.run(
        [sys.executable, "-c", COMPLETES],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert slow.output.strip()
    assert fast.stdout == slow.output
    assert (fast.returncode, fast.stderr) == (slow.exit_code, "False\n")


def test_the_script_for_a_shell_is_printed_without_torch() -> None:
    command = [sys.executable, "-c", COMPLETES, "completion", "bash"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stderr) == (0, "False\n")
    assert ran.stdout == CliRunner().invoke(main, ["completion", "bash"]).output


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("64", 64),
        ("64B", 64),
        ("4K", 4096),
        ("4k", 4096),
        ("4KB", 4096),
        ("256M", 2**28),
        ("1MiB", 2**20),
        ("2G", 2**31),
        ("28g", 28 * 2**30),
        ("1.5K", 1536),
        ("1T", 2**40),
        ("28e9", 28 * 10**9),
        ("2.8E10", 28 * 10**9),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "K", "B", "-4", "4.5", "0.001K", "4P", "4Ki", "4 K", "1e999", "four"]
)
def test_what_is_not_a_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "words",
    [
        "--ranks 2 4 8",
        "--ranks 2 --ranks 4 8",
        "--bind --ranks 2 4 8 --seconds 1",
        "--ranks 2,4,8",
        "--ranks=2,4 8 --bind",
        "--ranks 2, 4, 8",
    ],
)
def test_an_option_that_may_be_repeated_takes_several_values(words: str) -> None:
    bench = main.commands["bench"]
    assert isinstance(bench, click.Group)

    context = bench.commands["all-reduce"].make_context("all-reduce", words.split())

    assert context.params["ranks"] == (2, 4, 8)


def test_an_option_that_may_be_repeated_needs_a_value() -> None:
    result = CliRunner().invoke(main, ["bench", "all-reduce", "--bind", "--ranks"])

    assert result.exit_code == 2
    assert "'--ranks' requires an argument" in result.output


def test_a_value_of_an_option_that_may_not_be_repeated_stays_alone() -> None:
    result = CliRunner().invoke(main, ["bench", "step", "--seconds", "1", "2"])

    assert result.exit_code == 2
    assert "unexpected extra argument" in result.output
