"""Every private name of torch that the core uses is there.

torch may change such a name in any version. Then this says which one is gone and who used it,
before a hundred other tests fail.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SRC = Path(__file__).parents[1] / "src"


def test_every_private_name_of_torch_that_is_used_is_there() -> None:
    users: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        for name in private_names(ast.parse(path.read_text())):
            users.setdefault(name, set()).add(str(path.relative_to(SRC)))

    if torch.version.cuda is None:
        # A build for CPUs lacks them.
        users = {name: files for name, files in users.items() if "._cuda" not in name}
    gone = {name: sorted(files) for name, files in users.items() if not is_there(name)}

    assert len(users) > 20
    assert gone == {}, f"torch {torch.__version__} lacks names that the core uses"


def test_every_private_name_of_torch_is_used_in_one_module() -> None:
    users: dict[str, set[str]] = {}
    for path in (SRC / "unisono").rglob("*.py"):
        for name in private_names(ast.parse(path.read_text())):
            # `torch.distributed` has these, too, but without types.
            if not hasattr(torch.distributed, name.rpartition(".")[2]):
                users.setdefault(name, set()).add(str(path.relative_to(SRC)))

    shared = {name: sorted(files) for name, files in users.items() if len(files) > 1}

    assert shared == {}, "Put them into `torch_private.py`, which the others import."


def test_a_name_that_is_gone_is_noticed() -> None:
    source = "import torch\nfrom torch._x import y\ntorch._C._gone(1).real\ntorch.zeros(1)"

    assert set(private_names(ast.parse(source))) == {"torch._x.y", "torch._C._gone"}
    assert not is_there("torch._C._gone")
    assert not is_there("torch._x.y")
    assert is_there("torch._C._len_torch_function_stack")


def private_names(node: ast.AST) -> Iterator[str]:
    """The dotted names under torch at or below `node` that have a part with an underscore."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    found: list[str] = []
    if isinstance(node, ast.ImportFrom) and node.module:
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute) and is_dotted(node):
        found = [ast.unparse(node)]
    for name in found:
        parts = name.split(".")
        # What is behind a private name may be of an object that is made later.
        private = [i for i, part in enumerate(parts) if part[0] == "_" and part[:2] != "__"]
        if parts[0] == "torch" and private:
            # All that is in `torch._C` is private, whatever its name.
            end = private[-1] + 1 + (parts[private[-1]] == "_C")
            yield ".".join(parts[:end]) if isinstance(node, ast.Attribute) else name
    if not found:
        for child in ast.iter_child_nodes(node):
            yield from private_names(child)


def is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_dotted(node.value))


def is_there(name: str) -> bool:
    thing: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 1):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = importlib.import_module(".".join(parts[: i + 1]))
            except ImportError:
                return False
    return True
