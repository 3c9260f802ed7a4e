"""Kinds of steps, arguments, results and operators that a capture must not get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import unisono as uo
from unisono.errors import CaptureError
from unit.functions.program_parts import recordings, replicas


class Scaling:
    """A step that is a method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @uo.function(strict=True)
    def step(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_method_is_a_step_of_each_object() -> None:
    first, second = Scaling(2.0), Scaling(3.0)
    assert first.step(torch.ones(())).item() == 2
    with replicas("cpu", 1) as strategy:
        for i in range(6):
            x = torch.tensor(float(i))
            assert strategy.run(first.step, args=(x,)).item() == 2 * i
            assert strategy.run(second.step, args=(x,)).item() == 3 * i
        first.factor = 5.0
        assert strategy.run(first.step, args=(x,)).item() == 25
        assert len(recordings(strategy)) == 2
    step: Any = Scaling.step
    assert step(first, x).item() == 25


@dataclass
class Unhashable:
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_step_may_be_an_object_without_a_hash() -> None:
    steps = [uo.function(Unhashable(2.0), strict=True) for _ in range(2)]
    with replicas("cpu", 1) as strategy:
        for i in range(5):
            for step in steps:
                assert strategy.run(step, args=(torch.tensor(float(i)),)).item() == 2 * i
        assert len(recordings(strategy)) == 2


class Result:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("made", [Result, lambda loss: lambda: loss])
def test_an_object_that_holds_results_is_another_in_every_call(
    made: Callable[[Tensor], Any], number: int
) -> None:
    with replicas("cpu", number) as strategy:
        step = uo.function(lambda x: made(x * 2), strict=True)
        x = uo.PerReplica([torch.ones(2)] * number)
        with pytest.raises(CaptureError, match="returns another object or number"):
            for _ in range(4):
                strategy.run(step, args=(x,))


def test_an_object_that_stays_the_same_may_be_returned() -> None:
    same = object()
    with replicas("cpu", 1) as strategy:
        step = uo.function(lambda x: (x * 2, same, None, 3, {"a": "b"}), strict=True)
        for _ in range(5):
            found = strategy.run(step, args=(torch.ones(()),))
            assert found[1:] == (same, None, 3, {"a": "b"})


class Image(Tensor):
    """A tensor of a class of the program."""


def test_a_tensor_that_is_more_than_its_values_stays_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kind(x: Tensor) -> Tensor:
        return x * (2 if isinstance(x, Image) else getattr(x, "factor", 1))

    with replicas("cpu", 1) as strategy:
        as_class, as_attribute = uo.function(kind), uo.function(lambda x: kind(x))
        for i in range(6):
            image = torch.ones(()).as_subclass(Image)
            assert strategy.run(as_class, args=(image,)).item() == 2
            x: Any = torch.ones(())
            x.factor = i
            assert strategy.run(as_attribute, args=(x,)).item() == i
    assert "an argument is of the class Image" in caplog.text
    assert "an argument has the attribute 'factor'" in caplog.text


def test_zeros_of_both_signs_are_two_numbers() -> None:
    with replicas("cpu", 1) as strategy:
        step = uo.function(lambda x, factor: x * factor, strict=True)
        for factor in [0.0] * 5 + [-0.0, math.nan] * 5:
            found = strategy.run(step, args=(torch.ones(()), factor)).item()
            assert repr(found) == repr(factor)
        assert len(recordings(strategy)) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_lengths_in_packed_sequences_are_those_of_the_call(number: int) -> None:
    with replicas("cpu", number) as strategy:
        with strategy.scope():
            layer = nn.LSTM(2, 3, batch_first=True)
        step = uo.function(lambda packed: layer(packed)[0].data.detach())
        for lengths in [[4, 4, 1]] * 5 + [[4, 3, 2]] * 2:
            packed = pack_padded_sequence(
                torch.randn(3, 4, 2), torch.tensor(lengths), batch_first=True
            )
            found = strategy.run(step, args=(packed,))
            wanted = strategy.run(step.fn, args=(packed,))
            for one, other in zip(
                strategy.experimental_local_results(found),
                strategy.experimental_local_results(wanted),
                strict=True,
            ):
                assert torch.equal(one, other)


def split(x: Tensor, places: Tensor) -> Any:
    return [part.sum() for part in torch.tensor_split(x, places)]


def test_places_at_which_a_tensor_is_split_are_those_of_the_call() -> None:
    x = torch.arange(6.0)
    with replicas("cpu", 1) as strategy:
        step = uo.function(split)
        for place in (2, 2, 2, 2, 4, 4):
            places = torch.tensor([place])
            assert strategy.run(step, args=(x, places)) == split(x, places)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whether_a_mask_is_left_aligned_is_a_value() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with replicas("cpu", 1) as strategy:
        with strategy.scope():
            model = nn.TransformerEncoder(layer, 1).eval()

        @uo.function
        def step(x: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = model(x, src_key_padding_mask=mask)
                return found

        for first in (True, True, True, True, False, False):
            mask = torch.tensor([[first, False, not first], [False] * 3])
            x = torch.randn(2, 3, 8)
            found = strategy.run(step, args=(x, mask))
            assert torch.equal(found, strategy.run(step.fn, args=(x, mask)))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.linalg.inv(x),
        lambda x: torch.linalg.cholesky(x),
        lambda x: (torch._assert_async(x.sum() > 0), x * 2)[1],
    ],
)
def test_checks_without_a_result_are_made_in_replays(fn: Callable[..., Any], number: int) -> None:
    with replicas("cpu", number) as strategy:
        step = uo.function(fn, strict=True)
        for value in (1.0, 1.0, 1.0, 1.0, 0.0, 1.0):
            with suppress(RuntimeError):
                strategy.run(step, args=(uo.PerReplica([torch.eye(3) * value] * number),))
                assert value == 1
        assert recordings(strategy)
        with pytest.raises(RuntimeError):
            strategy.run(step, args=(uo.PerReplica([torch.eye(3) * 0] * number),))


@pytest.mark.parametrize("number", [1, 2])
def test_a_parameter_that_is_frozen_for_a_part_of_a_step(number: int) -> None:
    with replicas("cpu", number) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)

        def step(x: Tensor, ends_frozen: bool) -> Any:
            model.requires_grad_(requires_grad=False)
            loss = model(x).sum()
            model.requires_grad_(requires_grad=not ends_frozen)
            return loss.detach()

        x = uo.PerReplica([torch.ones(1, 2)] * number)
        for _ in range(4):
            strategy.run(uo.function(step, strict=True), args=(x, False))
        assert recordings(strategy)
        with pytest.raises(CaptureError, match="sets a parameter, or `requires_grad` of one, of L"):
            for _ in range(4):
                model.requires_grad_(requires_grad=True)
                strategy.run(uo.function(step, strict=True), args=(x, True))
