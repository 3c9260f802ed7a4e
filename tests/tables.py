"""Tables of small cases that one test goes through: pytest takes longer for a test than they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unisono.errors import add_note

Test = Callable[..., None]


def every(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Runs a test once for each case, with the arguments of `pytest.mark.parametrize`.

    All cases together are one test, which names the case in which it has failed. Every case begins
    with the same random numbers. Fixtures are shared.
    """
    keys = (names,) if isinstance(names, str) else names
    table = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert table, f"there is no case of {names}"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            for case in table:
                torch.manual_seed(0)
                arguments = dict(zip(keys, case, strict=True))
                try:
                    test(*args, **fixtures, **arguments)
                except BaseException as error:
                    add_note(error, ", ".join(f"{key} = {one!r}" for key, one in arguments.items()))
                    raise

        signature = inspect.signature(test)
        fixtures = [one for key, one in signature.parameters.items() if key not in keys]
        vars(run)["__signature__"] = signature.replace(parameters=fixtures)
        return run

    return decorate
