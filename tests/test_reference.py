"""The reference, which is made of docstrings: every argument and every error is explained."""

from __future__ import annotations

import ast
import builtins
import enum
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tables import every

import unisono as uo

PAGES = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))
SEE = re.compile(r"\b[Ss]ee\s+`([\w.]+)`")
MODULES = [uo, *(module for key in uo.__all__ if inspect.ismodule(module := getattr(uo, key)))]
# Classes and functions that pages show and docstrings refer to, by the last part of their names.
KNOWN = {key: getattr(module, key) for module in MODULES for key in module.__all__}


def shown() -> Iterator[tuple[str, Any, type | None]]:
    """Everything with arguments that a page shows: its name, itself, and the class it is of."""
    for page in PAGES:
        for name, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", page.read_text(), re.M):
            module, _, key = name.rpartition(".")
            thing = getattr(importlib.import_module(module), key)
            yield name, thing, None
            if not inspect.isclass(thing) or "members: false" in options:
                continue
            listed = re.search(r"members:\s*\[(.*?)\]", options, re.DOTALL)
            keys = re.findall(r"\w+", listed[1]) if listed else list(vars(thing))
            for key in keys:
                member = inspect.getattr_static(thing, key)
                member = getattr(member, "__func__", member)
                if key[0] != "_" and inspect.isfunction(member):
                    yield f"{name}.{key}", inspect.unwrap(member), thing


SHOWN = list(shown())

each_shown = every(("name", "thing", "owner"), SHOWN)


def test_the_pages_show_what_a_program_calls() -> None:
    names = {name for name, *_ in SHOWN}

    assert len(names) > 150
    assert {"unisono.Strategy.run", "unisono.CrossDeviceOps.batch_reduce"} <= names


def test_every_public_method_is_explained_by_its_class_or_by_a_base() -> None:
    found = {
        f"{cls.__module__}.{cls.__name__}.{key}": inspect.getdoc(getattr(cls, key))
        for module in modules_of("unisono")
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and cls.__name__[0] != "_"
        for key, value in vars(cls).items()
        if key[0] != "_" and isinstance(value, (FunctionType, property, classmethod, staticmethod))
    }

    assert len(found) > 800
    assert [name for name, text in found.items() if not text] == []


@each_shown
def test_every_argument_is_explained(name: str, thing: Any, owner: type | None) -> None:
    text = docstring(thing, owner)

    assert unexplained(argument_names(thing), text) == []


@each_shown
def test_no_argument_is_explained_that_is_not_there(
    name: str, thing: Any, owner: type | None
) -> None:
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", f"{inspect.getdoc(thing)}\n", re.MULTILINE)
    explained = re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE) if section else []

    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        assert [key for key in explained if key not in argument_names(thing)] == []


@each_shown
def test_every_error_is_explained(name: str, thing: Any, owner: type | None) -> None:
    if inspect.isfunction(thing):
        text = docstring(thing, owner)

        assert [error for error in raised(thing) if not is_named(error, text)] == []


def test_what_is_not_explained_is_noticed() -> None:
    def fails(first: int, second: int) -> None:
        """Adds `first` to something."""
        raise uo.errors.DeviceError("always")

    assert unexplained(argument_names(fails), docstring(fails, None)) == ["second"]
    assert raised(fails) == ["DeviceError"]
    assert not is_named("DeviceError", docstring(fails, None))
    assert is_named("DeviceError", "Raises:\n    ValueError: always")
    assert unexplained(["index"], "Args:\n    index: From 0.") == []


def argument_names(thing: Any) -> list[str]:
    """The arguments that a caller may give; nobody makes an error, or a member of an enum."""
    if inspect.isclass(thing) and issubclass(thing, (enum.Enum, BaseException)):
        return []
    if inspect.isclass(thing) and inspect.isfunction(thing.__init__):
        thing = thing.__init__
    parameters = inspect.signature(thing).parameters.values()
    return [one.name for one in parameters if one.name not in ("self", "cls")]


def modules_of(package: str) -> Iterator[ModuleType]:
    """All modules of a package, but for what starts the command line."""
    path = importlib.import_module(package).__path__
    names = [one.name for one in pkgutil.walk_packages(path, f"{package}.")]
    return map(importlib.import_module, (n for n in names if not n.endswith((".__main__", ".cli"))))


def docstring(thing: Any, owner: type | None) -> str:
    """The docstring, with those that it says to see."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing):
        text += "\n" + (inspect.getdoc(thing.__init__) or "")
    return "\n".join([text, *(referred(name, owner) for name in SEE.findall(text))])


def referred(name: str, owner: type | None) -> str:
    """The docstring of `Class.method`, or of a method of the same class; it must exist."""
    first, _, method = name.rpartition(".")
    home = KNOWN[first.rpartition(".")[2]] if first else owner
    thing: Callable[..., Any] = getattr(home, method) if home else KNOWN[method]
    return docstring(thing, home if inspect.isclass(home) else None)


def unexplained(names: list[str], text: str) -> list[str]:
    """The arguments that are neither in an `Args` section nor in backticks."""
    return [
        name
        for name in names
        if not re.search(rf"^\s*\*{{0,2}}{name}:", text, re.MULTILINE)
        and not re.search(rf"`[^`\n]*(?<!\w){name}(?!\w)[^`\n]*`", text)
    ]


def raised(function: Callable[..., Any]) -> list[str]:
    """The errors that the function itself raises, but for methods that must be overridden."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    return [name.rpartition(".")[2] for name in names if name != "NotImplementedError"]


def is_named(error: str, text: str) -> bool:
    """Whether the text names the error, or a class that it is one of."""
    kind = getattr(uo.errors, error, None) or getattr(builtins, error)
    # The last ones are `Exception`, `BaseException` and `object`, which say nothing.
    names = [one.__name__ for one in kind.__mro__[:-3]]
    return any(re.search(rf"\b{name}\b", text) for name in names)
