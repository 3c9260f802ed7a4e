import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import unisono as uo
from unisono.engines import ambient

Make = Callable[..., uo.MirroredStrategy]

user = contextvars.ContextVar("user", default="nobody")


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.empty(1).device.type,
        torch.empty(1).dtype,
    )


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_replicas_have_the_modes_of_the_caller(
    mirrored: Make, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    strategy = mirrored()
    outside = modes()

    for _ in range(2):
        with mode():
            inside = modes()
            on_replicas = strategy.experimental_local_results(strategy.run(lambda: [modes()]))
        assert on_replicas == ([inside], [inside])
        after = strategy.experimental_local_results(strategy.run(lambda: [modes()]))
        assert after == ([outside], [outside])


def test_replicas_have_the_default_dtype(mirrored: Make) -> None:
    strategy = mirrored()

    torch.set_default_dtype(torch.float64)
    try:
        dtype = strategy.run(lambda: torch.zeros(1).dtype)
    finally:
        torch.set_default_dtype(torch.float32)

    assert dtype is torch.float64


def test_replicas_have_the_default_device(mirrored: Make) -> None:
    strategy = mirrored()

    torch.set_default_device("meta")
    try:
        devices = strategy.run(lambda: torch.zeros(1).device.type)
    finally:
        torch.set_default_device(None)

    assert strategy.experimental_local_results(devices) == ("meta", "meta")


def test_replicas_have_the_context_variables_of_the_caller(mirrored: Make) -> None:
    strategy = mirrored()
    token = user.set("caller")

    seen = strategy.run(user.get)
    strategy.run(lambda: user.set("replica") and None)

    assert seen == "caller"
    assert user.get() == "caller"
    user.reset(token)
    assert strategy.run(user.get) == "nobody"


def test_modes_that_a_replica_leaves_set_do_not_last(mirrored: Make) -> None:
    strategy = mirrored()

    strategy.run(lambda: torch.set_grad_enabled(False) and None)

    assert strategy.run(torch.is_grad_enabled) is True
    assert torch.is_grad_enabled()


def test_autocast_is_used_in_a_step(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)

    def step() -> torch.dtype:
        dtype: torch.dtype = model(torch.ones(1, 2)).dtype
        return dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert strategy.run(step) is torch.bfloat16
    assert strategy.run(step) is torch.float32


def trained(strategy: uo.Strategy) -> Callable[[], None]:
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))

    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()

    strategy.run(step)
    return step


@pytest.mark.parametrize("serial", [False, True])
def test_flops_of_all_replicas_are_counted(mirrored: Make, *, serial: bool) -> None:
    found = []
    for num_replicas in (1, 3):
        strategy = mirrored(num_replicas, serial=serial)
        step = trained(strategy)
        with FlopCounterMode(display=False) as counter:
            for _ in range(3):
                strategy.run(step)
        found.append(counter.get_total_flops())

    assert found[0] > 0
    assert found[1] == 3 * found[0]


def test_two_modes_see_the_operators_of_all_replicas(mirrored: Make) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.num_products = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num_products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    strategy = mirrored(2)
    x = torch.ones(2, 2)
    outer, inner = Seen(), Seen()

    with outer, inner:
        strategy.run(lambda: x @ x)
        x @ x
    x @ x

    assert (outer.num_products, inner.num_products) == (3, 3)


def test_replicas_draw_the_same_under_a_mode(mirrored: Make) -> None:
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    strategy, given = mirrored(3), torch.Generator()

    def step() -> list[float]:
        drawn = torch.rand(2), torch.randn_like(torch.ones(2)), torch.randperm(9)
        dropped = (
            nn.functional.dropout(torch.ones(20)),
            torch.native_dropout(torch.ones(20), 0.5, True)[0],
        )
        return [
            x for one in (*drawn, *dropped, torch.rand(2, generator=given)) for x in one.tolist()
        ]

    def results(*, is_under_mode: bool) -> Any:
        torch.manual_seed(4)
        given.manual_seed(5)
        with Passes() if is_under_mode else nullcontext():  # type: ignore[no-untyped-call]
            return strategy.experimental_local_results(strategy.run(step))

    assert results(is_under_mode=True) == results(is_under_mode=False)


def test_a_mode_for_functions_sees_those_of_all_replicas(mirrored: Make) -> None:
    names: list[str] = []

    class Named(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    strategy = mirrored(3)
    with Named(), torch.device("cpu"):
        strategy.run(lambda: torch.sin(torch.ones(1)))

    assert names.count("sin") == 3


def test_saved_tensors_hooks_see_all_replicas(mirrored: Make) -> None:
    strategy = mirrored(3)
    step = trained(strategy)
    packed: list[int] = []
    unpacked: list[int] = []

    def count(numbers: list[int]) -> Callable[[Tensor], Tensor]:
        def hook(tensor: Tensor) -> Tensor:
            numbers.append(threading.get_ident())
            return tensor

        return hook

    with torch.autograd.graph.saved_tensors_hooks(count(packed), count(unpacked)):
        strategy.run(step)
    strategy.run(step)

    threads = set(packed)
    assert len(threads) == 3
    assert len({packed.count(thread) for thread in threads}) == 1
    assert set(unpacked) == threads


def test_an_operator_that_waits_for_others_does_not_stop_them(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ambient, "_PATIENCE_S", 0.05)

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.cos.default:
                context = uo.get_replica_context()
                assert context is not None
                context.merge_call(lambda _: None)
            return func(*args, **(kwargs or {}))

    strategy = mirrored(2)
    with Waits():  # type: ignore[no-untyped-call]
        values = strategy.run(lambda: torch.cos(torch.zeros(1))).values

    assert [value.item() for value in values] == [1, 1]


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_mode_for_operators_replicas_run_one_after_another(mirrored: Make) -> None:
    meeting, have_met = threading.Barrier(2), list[bool]()

    def step() -> None:
        try:
            meeting.wait(0.2)
        except threading.BrokenBarrierError:
            have_met.append(False)
        else:
            have_met.append(True)

    strategy = mirrored(2)
    with Sees():  # type: ignore[no-untyped-call]
        strategy.run(step)

    assert have_met == [False, False]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the CPU cannot flush")
def test_all_replicas_flush_denormal_numbers(mirrored: Make) -> None:
    strategy = mirrored(2)
    smallest = torch.tensor([1e-310], dtype=torch.float64)

    def flushed() -> list[bool]:
        found = strategy.run(lambda: (smallest * 1).eq(0))
        return list(map(bool, strategy.experimental_local_results(found)))

    assert flushed() == [False, False]
    torch.set_flush_denormal(True)
    try:
        assert flushed() == [True, True]
    finally:
        torch.set_flush_denormal(False)
    assert flushed() == [False, False]
