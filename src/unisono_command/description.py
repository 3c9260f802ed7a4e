"""Commands as text: as much of them as completion needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

FILE = Path(__file__).with_name("commands.json")


def described(group: click.Group) -> str:
    """Returns a group with all its commands and their options as JSON."""
    return json.dumps(_described(group), indent=1) + "\n"


def restored(text: str) -> click.Group:
    """Returns a group that completes as the described one does, and runs nothing."""
    group = _restored(None, json.loads(text))
    assert isinstance(group, click.Group)
    return group


def _described(command: click.Command) -> dict[str, Any]:
    description: dict[str, Any] = {
        "help": command.get_short_help_str(),
        "parameters": [_described_parameter(one) for one in command.params],
    }
    if isinstance(command, click.Group):
        inner = sorted(command.commands.items())
        description["commands"] = {name: _described(one) for name, one in inner}
    return description


def _described_parameter(parameter: click.Parameter) -> dict[str, Any]:
    description: dict[str, Any] = {"names": [*parameter.opts, *parameter.secondary_opts]}
    if isinstance(parameter, click.Option):
        description["help"] = parameter.help
        description["is_flag"] = parameter.is_flag
        description["is_repeatable"] = parameter.multiple
    else:
        description["count"] = parameter.nargs
    if isinstance(parameter.type, click.Choice):
        description["choices"] = list(parameter.type.choices)
    if isinstance(parameter.type, click.Path):
        description["path"] = "file" if parameter.type.file_okay else "folder"
    return description


def _restored(name: str | None, description: dict[str, Any]) -> click.Command:
    options: dict[str, Any] = {
        "short_help": description["help"],
        "params": [_restored_parameter(one) for one in description["parameters"]],
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    if "commands" not in description:
        return click.Command(name, **options)
    inner = {name: _restored(name, one) for name, one in description["commands"].items()}
    return click.Group(name, inner, **options)


def _restored_parameter(description: dict[str, Any]) -> click.Parameter:
    names, kind = description["names"], _restored_type(description)
    if "count" in description:
        return click.Argument(names, type=kind, nargs=description["count"])
    return click.Option(
        names,
        type=kind,
        help=description["help"],
        is_flag=description["is_flag"],
        multiple=description["is_repeatable"],
    )


def _restored_type(description: dict[str, Any]) -> click.Choice[str] | click.Path | None:
    if "choices" in description:
        return click.Choice(description["choices"])
    if "path" in description:
        is_file = description["path"] == "file"
        return click.Path(file_okay=is_file, dir_okay=not is_file)
    return None
