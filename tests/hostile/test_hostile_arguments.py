"""Hostile arguments over all public names: each call returns, or raises an error of ours, in time.

The calls are generated from fixed seeds, one for each name, so they are the same in every run.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

import unisono as uo
from hostile.judging import complaint
from hostile.targets import Target, targets
from hostile.values import FITTING, HOSTILE, failing

NUM_CALLS = 3000
NUM_BATCHES = 6
# Far more than any of them takes, also on a busy machine.
DEADLINE_S = 30.0
# Of a callable that fits nothing else, the error would be its own.
CALLED = ("fn", "hook", "initial_value")


class TooLate(BaseException):
    """A call that has not ended in time."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `TooLate` in the block, which must be in the main thread, after so many seconds."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def end(*_: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def strategies() -> Iterator[dict[str, uo.Strategy]]:
    made = {
        "mirrored": uo.MirroredStrategy(["cpu:0", "cpu:1"]),
        "one": uo.OneDeviceStrategy("cpu:0"),
        "alone": uo.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
    }
    yield {**made, "default": uo.get_strategy()}
    for strategy in made.values():
        strategy.close()


def arguments(target: Target, dice: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the arguments of a call, at least one of them hostile, and what they are called."""
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = [one for one in target.signature.parameters.values() if one.kind not in variadic]
    chosen = dice.choice(parameters).name if parameters else None
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for parameter in parameters:
        is_required = parameter.default is parameter.empty
        is_hostile = parameter.name == chosen or dice.random() < 0.15
        if not is_hostile and not is_required and dice.random() < 0.8:
            continue
        if not is_hostile and parameter.name in FITTING:
            given[parameter.name], names[parameter.name] = FITTING[parameter.name](), "fitting"
            continue
        name = dice.choice(list(HOSTILE))
        value = HOSTILE[name]()
        is_other_function = callable(value) and parameter.name.endswith(CALLED)
        given[parameter.name] = failing if is_other_function else value
        names[parameter.name] = name
    return given, names


def use(result: Any) -> None:
    """Goes on as a program would: draws the first input, enters the block."""
    if type(result).__module__.startswith("unisono.input") and hasattr(result, "__iter__"):
        next(iter(result), None)
    elif type(result).__name__ == "_GeneratorContextManager":
        with result:
            pass


def outcome(target: Target, given: dict[str, Any]) -> str | None:
    """Makes a call, and returns what is wrong with how it ends."""
    try:
        with deadline(DEADLINE_S):
            # In one frame, so that the depth shows a call that does not fit the signature.
            result = target.call(**given)
    except TooLate:
        return f"has not ended after {DEADLINE_S} s"
    except BaseException as error:
        return complaint(error)
    try:
        with deadline(DEADLINE_S):
            use(result)
    except TooLate:
        return f"its result could not be used within {DEADLINE_S} s"
    except BaseException as error:
        return complaint(error)
    return None


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_hostile_arguments_end_in_a_result_or_an_error_that_says_what_to_do(
    batch: int, strategies: dict[str, uo.Strategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    every = list(targets(strategies))
    calls_per_target = math.ceil(NUM_CALLS / len(every))
    complaints: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target in every[batch::NUM_BATCHES]:
            dice = random.Random(zlib.crc32(target.name.encode()))
            for _ in range(calls_per_target):
                given, names = arguments(target, dice)
                wrong = outcome(target, given)
                if wrong is not None:
                    complaints.append(f"{target.name}({names}): {wrong}")

    assert complaints == [], "\n".join([f"{len(complaints)} calls:", *complaints])
