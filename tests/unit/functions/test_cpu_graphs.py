"""What replicas on CPUs do, noted and done again without Python."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn import functional

from unisono.functions.captured import without_garbage
from unisono.functions.cpu_graphs import CpuGraphs, difference


def call_each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Captured:
    """A function of tensors that is captured in its first call."""

    def __init__(self, fn: Callable[..., Any], *args: Tensor) -> None:
        self.rooms = [one.clone() for one in args]
        self.graphs = CpuGraphs([None], call_each)
        self.graphs.begin()
        with without_garbage(), self.graphs.on_replica(0):
            self.first = fn(*self.rooms)
        outputs = self.first if isinstance(self.first, (list, tuple)) else [self.first]
        outputs = [one for one in outputs if one is not None]
        self.kept = [self.graphs.kept(one) for one in outputs]
        self.part = self.graphs.finish([])
        self.reason = self.graphs.reason

    def __call__(self, *args: Tensor) -> list[Tensor]:
        for room, given in zip(self.rooms, args, strict=True):
            room.copy_(given)
        assert self.part is not None
        self.part.replay()
        return [one.clone() for one in self.kept]


def in_place_through_views(x: Tensor) -> Any:
    y = x * 2
    y.view(-1)[1:].add_(1)
    y[0].mul_(3)
    return y, y.t()


def with_other_shapes(x: Tensor) -> Any:
    y = (x + 1).unsqueeze_(0)
    y.squeeze_(0).t_()
    return y.contiguous().resize_(2, 2)


def with_lists(x: Tensor) -> Any:
    first, second = x.split(2)
    return [torch.cat([second, first]), *x.unbind(1), torch.stack(x.chunk(2)).sum(0)]


def with_kinds(x: Tensor) -> Any:
    return (
        x.to(torch.float64),
        x.to(torch.bfloat16).float(),
        (x > 0).sum(),
        torch.zeros_like(x, dtype=torch.complex64) + x,
        torch.full((2,), 3.5, device="cpu"),
        x[None, :, :, None].contiguous(memory_format=torch.channels_last) + 1,
        torch.arange(4, dtype=torch.int32) * 2,
        torch.tensor([1.0, 2.0]) + x[0, 0],
    )


def with_numbers(x: Tensor) -> Any:
    return (
        x + 1,
        2 - x,
        x / 3,
        x**2,
        x.clamp(-0.5, 0.5),
        torch.where(x > 0, x, 0.25),
        x.mul(2.0),
    )


def with_indices(x: Tensor) -> Any:
    rows = torch.tensor([2, 0])
    return x[rows], x[:, rows % x.shape[1]], x.index_add(0, rows, x[:2]), x.gather(0, rows[:, None])


def with_a_pass(x: Tensor) -> Any:
    weight = torch.ones(3, x.shape[1], requires_grad=True)
    functional.gelu(x @ weight.T).square().sum().backward()
    return weight.grad, x


def with_many_layers(x: Tensor) -> Any:
    images = x.reshape(1, 1, 4, 3).repeat(2, 3, 2, 2)
    y = functional.max_pool2d(functional.conv2d(images, torch.ones(4, 3, 2, 2)), 2)
    y = functional.layer_norm(y, y.shape[1:])
    q = y.flatten(2)
    return functional.scaled_dot_product_attention(q, q, q), functional.log_softmax(q, -1)


def with_an_lstm(x: Tensor) -> Any:
    layer = nn.LSTM(3, 2)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    y, _ = layer(x.view(2, 2, 3))
    return torch.autograd.grad(y.square().sum(), list(layer.parameters()))


FOR_INFERENCE = nn.Linear(2, 4, dtype=torch.float64)


def in_inference_mode(x: Tensor) -> Any:
    # Without a mode, torch folds this product into one of two dimensions, which has other bits.
    y = x.double().exp().view(2, 3, 2).transpose(0, 1)
    with torch.inference_mode():
        return FOR_INFERENCE(y).clone()


def with_a_subclass(x: Tensor) -> Any:
    total: Any = masked_tensor(x, x > 0).sum()
    return total.get_data()


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(
    "fn",
    [
        in_place_through_views,
        with_other_shapes,
        with_lists,
        with_kinds,
        with_numbers,
        with_indices,
        with_a_pass,
        with_many_layers,
        with_an_lstm,
        in_inference_mode,
        with_a_subclass,
    ],
)
def test_it_gives_the_same_bits_for_other_values(fn: Callable[..., Any]) -> None:
    made = torch.Generator().manual_seed(0)
    captured = Captured(fn, torch.randn(4, 3, generator=made))
    assert captured.reason == ""
    for _ in range(3):
        x = torch.randn(4, 3, generator=made)
        expected = fn(x.clone())
        expected = expected if isinstance(expected, (list, tuple)) else [expected]
        for one, other in zip(captured(x), expected, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.complex128),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2)])
def test_every_dtype_and_odd_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def fn(x: Tensor) -> Any:
        y = x.clone()
        y.copy_(torch.ones_like(x))
        return torch.stack([x, y]).flip(0), y.expand(2, *y.shape).contiguous()

    made = torch.Generator().manual_seed(0)
    for values in (torch.randn(shape, generator=made) * 3 for _ in range(2)):
        x = values.to(dtype)
        captured = Captured(fn, torch.zeros_like(x))
        assert captured.reason == ""
        assert all(map(torch.equal, captured(x), fn(x)))


def test_random_numbers_go_on_from_replay_to_replay() -> None:
    def fn(x: Tensor) -> Any:
        return (
            functional.dropout(x, 0.5),
            torch.rand(2),
            torch.randn_like(x),
            torch.randint(9, (3,)),
            torch.randperm(5),
            x.clone().normal_(),
            torch.multinomial(torch.ones(4), 2),
        )

    x = torch.ones(4, 3)
    torch.manual_seed(3)
    captured = Captured(fn, x)
    assert captured.reason == ""
    found = [captured(x) for _ in range(2)]
    torch.manual_seed(3)
    fn(x)
    for own in found:
        assert all(map(torch.equal, own, fn(x)))


def test_memory_that_others_know_is_written_and_other_memory_is_replaced() -> None:
    holder: dict[str, Tensor] = {}
    x = torch.ones(3000)
    graphs = CpuGraphs([None], call_each)
    graphs.begin()
    with graphs.on_replica(0):
        holder["alone"] = x * 2
        holder["shared"] = x * 3
        holder["view"] = holder["shared"][:2]
        holder["small"] = x[:3] * 4
    part = graphs.finish()
    assert part is not None
    addresses = {name: one.data_ptr() for name, one in holder.items()}
    x.fill_(10)
    part.replay()
    assert {name: one[0].item() for name, one in holder.items()} == {
        "alone": 20.0,
        "shared": 30.0,
        "view": 30.0,
        "small": 40.0,
    }
    moved = {name for name, one in holder.items() if one.data_ptr() != addresses[name]}
    # Another address of the memory that the test has not seen before may be the same by chance.
    assert moved <= {"alone"}


def test_results_of_the_first_call_stay_as_they_are() -> None:
    captured = Captured(lambda x: x * 2, torch.ones(2))
    captured(torch.full((2,), 5.0))
    assert captured.first.tolist() == [2.0, 2.0]


def test_what_comes_to_nothing_is_left_out() -> None:
    def fn(x: Tensor) -> Tensor:
        (x * 2).exp()
        return x + 1

    captured = Captured(fn, torch.ones(2))
    assert captured(torch.zeros(2))[0].tolist() == [1.0, 1.0]
    assert Captured(lambda x: None, torch.ones(2)).part is None


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x * x.sum().item(), "the values of a tensor"),
        (lambda x: x if x.sum() > 0 else -x, "the values of a tensor"),
        (lambda x: x * float(x.numpy().sum()), "the values of a tensor"),
        (lambda x: x * np.asarray(x).sum().item(), "the values of a tensor"),
        (lambda x: x * x.tolist()[0][0], "the values of a tensor"),
        (lambda x: x * len(repr(x)), "the values of a tensor"),
        (lambda x: x * len(f"{x.sum():.1f}"), "the values of a tensor"),
        (lambda x: x * x.data_ptr(), "the values of a tensor"),
        (lambda x: x[x > 0], "the values of a tensor"),
        (lambda x: x.nonzero(), "the values of a tensor"),
        (lambda x: x.to_sparse().to_dense(), "sparse_coo tensor"),
        (lambda x: torch.view_as_complex(x.repeat(1, 2).view(4, 3, 2)).conj() * 2, "conjugate"),
        (lambda x: x.to("meta"), "on meta"),
        (lambda x: x.unsqueeze_(0), "another shape in place"),
        (lambda x: x.view(torch.int32) + 1, "TorchScript cannot call `aten.view.dtype`"),
        (lambda x: x + torch.rand(3, generator=torch.Generator()), "generator of the program"),
        (lambda x: (torch.manual_seed(12345), x + torch.rand(3))[1], "seeds a random generator"),
    ],
)
def test_what_cannot_be_done_again_has_a_reason(fn: Callable[..., Any], reason: str) -> None:
    found = Captured(fn, torch.ones(4, 3))
    # The line that it names has the expected reason, too.
    assert reason in found.reason.partition(__file__)[0]
    assert found.part is None


@pytest.mark.parametrize(
    "name", ["Graph", "_create_function_from_graph", "_set_graph_executor_optimize"]
)
def test_a_torch_without_torchscript_is_a_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, name)
    found = Captured(lambda x: x * 2, torch.ones(2))
    assert f"TorchScript of torch {torch.__version__} fails: " in found.reason
    assert name in found.reason
    assert found.part is None
    assert found.first.tolist() == [2.0, 2.0]


def test_a_run_that_is_refused_ends_as_if_nobody_had_looked() -> None:
    x = torch.ones(3)
    state = torch.get_rng_state()
    other = torch.Generator().manual_seed(5).get_state()

    def fn() -> Tensor:
        x.mul_(2)
        torch.set_rng_state(other)
        return x + torch.rand(3)

    graphs = CpuGraphs([None], call_each)
    graphs.begin()
    with graphs.on_replica(0):
        found = fn()
    after = torch.get_rng_state()
    assert graphs.finish([found]) is None
    assert "does not show" in graphs.reason
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(5)
    assert torch.equal(found, x + torch.rand(3))
    torch.set_rng_state(state)


def test_numbers_that_another_thread_draws_meanwhile_do_not_count() -> None:
    x = torch.ones(3)
    graphs = CpuGraphs([None], call_each)
    graphs.begin()
    with graphs.on_replica(0):
        found = x * 2
    # As another thread may do at any moment.
    torch.rand(3)
    after = torch.get_rng_state()
    part = graphs.finish([found])
    assert part is not None, graphs.reason
    assert torch.equal(torch.get_rng_state(), after)
    x.fill_(4)
    part.replay()
    assert found.tolist() == [8.0, 8.0, 8.0]


def ended_at(number: int) -> str:
    """Ends a capture when a line of our code, counted from 0, begins; returns why it has ended."""
    graphs = CpuGraphs([None, None], call_each)
    lines = itertools.count()

    def end(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and next(lines) == number:
            graphs.refuse("another replica reads values")
        return end

    graphs.begin()
    before = sys.gettrace()
    with graphs.on_replica(0):
        sys.settrace(end)
        try:
            found = torch.ones(()) + 1
        finally:
            sys.settrace(before)
    assert found.item() == 2
    return graphs.reason


def test_another_replica_may_end_the_capture_at_any_moment() -> None:
    assert ended_at(0) != ""
    last = next(number for number in itertools.count() if not ended_at(number))
    assert last > 50


def test_two_runs_that_differ_are_told_apart() -> None:
    def logs(fn: Callable[[Tensor], Any]) -> Any:
        return Captured(fn, torch.ones(2)).graphs.logs

    numbers = random.Random(0)
    first, second = (logs(lambda x: x * numbers.random()) for _ in range(2))
    assert "it does not do the same every time: aten.mul" in difference(first, second)
    assert difference(first, first) == ""
    longer = logs(lambda x: x.exp().exp())
    assert "then nothing" in difference(longer, logs(lambda x: x.exp()))


def test_layers_with_state() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU(), nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU(), nn.Linear(4, 2))
    other.load_state_dict(layers.state_dict())
    x = torch.randn(4, 3)
    captured = Captured(layers, x)
    other(x)
    assert captured.reason == ""
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(captured(x)[0], other(x))
    for name, value in layers.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
