"""What a replay depends on that no GPU is needed for: calls made again, and several memories."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.kernels import native_core
from unisono.modules import Contents
from unisono.modules.leaves import with_own_gradients
from unisono.testing import separate_memories


@pytest.fixture
def strategy() -> Iterator[uo.Strategy]:
    made = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


class Again:
    """Records the calls that Python makes at every replay."""

    generators = None
    is_capturing = is_apart = is_on_host = False
    call_each = None

    @staticmethod
    def on_replica(replica_id: int) -> AbstractContextManager[None]:
        return nullcontext()

    def __init__(self) -> None:
        self.streams: Sequence[Any] = ()
        self.calls: dict[str, Callable[[], Any]] = {}
        self.reasons: list[str] = []

    def call(self, what: str, work: Callable[[], Any], settings: Any = None) -> Any:
        self.calls[what] = work
        return work()

    def refuse(self, reason: str) -> None:
        self.reasons.append(reason)

    def replay(self, strategy: uo.Strategy, what: str) -> None:
        mirrors = strategy.extended.mirrors
        mirrors.watch.stamp()
        mirrors.fronts.put_up()
        try:
            next(work for name, work in self.calls.items() if what in name)()
        finally:
            mirrors.fronts.take_down()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.zeros(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        self.table += x
        return self.table.sum()


def uncounted(part: Tensor, value: float) -> None:
    """Writes as a replayed graph does: torch counts nothing."""
    before = part._version
    part.data.fill_(value)
    assert part._version == before


def loose(strategy: uo.Strategy) -> Any:
    (one,) = strategy.extended.mirrors.buffers._loose.values()
    return one


def recorded(strategy: uo.Strategy, step: Callable[..., Any], *args: Any) -> Again:
    recorder = Again()
    strategy.extended.run_eagerly(step, args, {}, [1.0, 1.0], recorder)
    assert recorder.reasons == []
    return recorder


def test_once_sees_what_a_replay_has_written_to_large_buffers(strategy: uo.Strategy) -> None:
    with strategy.scope():
        model = Table()
    seen: list[float] = []

    def step(x: Tensor) -> None:
        model(x)
        uo.once(lambda: seen.append(model.table.mean().item()))

    x = uo.PerReplica([torch.ones(()), torch.full((), 3.0)])
    recorder = recorded(strategy, step, x)
    uncounted(loose(strategy).parts[0], 5.0)
    uncounted(loose(strategy).parts[1], 9.0)
    recorder.replay(strategy, "once")

    assert seen == [2.0, 7.0]


def test_a_run_after_a_replay_begins_with_the_buffers_of_the_model(
    strategy: uo.Strategy,
) -> None:
    with strategy.scope():
        model = Table()
    strategy.run(lambda: model(torch.ones(())))
    uncounted(loose(strategy).parts[1], 9.0)
    strategy.extended.mirrors.buffers.note_replay()

    totals = strategy.run(lambda: model(torch.ones(())))

    assert [total.item() for total in totals.values] == [80_000.0] * 2


def test_gradients_written_by_hand_keep_an_update_out_of_a_graph(strategy: uo.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found: list[bool] = []

    class Looking(Again):
        def call(self, what: str, work: Callable[[], Any], settings: Any = None) -> Any:
            if settings is not None:
                found.append(bool(with_own_gradients(settings._owners)))
                assert not settings.can_be_captured
            return work()

    def step() -> None:
        model.weight.grad = torch.ones(1, 2)
        optimizer.step()

    strategy.extended.run_eagerly(step, (), {}, [1.0, 1.0], Looking())

    assert found == [True]


@pytest.mark.parametrize("ops", [uo.HierarchicalCopyAllReduce, uo.NcclAllReduce])
def test_an_update_reaches_each_memory_in_one_copy(ops: Callable[[], Any]) -> None:
    with separate_memories():
        strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(3)], cross_device_ops=ops())
        with strategy.scope():
            model = nn.Sequential(
                nn.Linear(4, 12),
                nn.Unflatten(1, (3, 2, 2)),
                nn.Conv2d(3, 4, 2),
                nn.Flatten(),
                nn.Linear(4, 300),
                nn.Linear(300, 300),
            )
            convolution: Any = model[2]
            last = convolution.weight.detach().contiguous(memory_format=torch.channels_last)
            convolution.weight = nn.Parameter(last)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        x = uo.PerReplica([torch.full((2, 4), float(i)) for i in range(3)])
        strategy.run(step, args=(x,))
        owners = strategy.extended.mirrors.all_leaves
        before = [leaf._version for one in owners for leaf in one.others]
        grads = [leaf.grad for one in owners for leaf in one.leaves]
        strategy.run(step, args=(x,))
        after = [leaf._version for one in owners for leaf in one.others]
        now = [leaf.grad for one in owners for leaf in one.leaves]

        assert [new - old for new, old in zip(after, before, strict=True)] == [1] * len(before)
        # Gradients are reduced where they are, so a graph that adds to them finds them there.
        assert all(new is old for new, old in zip(now, grads, strict=True))
        for one in owners:
            assert all(torch.equal(leaf, one.primary) for leaf in one.leaves)
    strategy.close()


@pytest.mark.parametrize("is_native", [False, True])
def test_contents_are_compared_by_identity(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = native_core()
    if is_native and core.hold_same is None:
        pytest.skip("there is no native core")
    if not is_native:
        plain = core._replace(hold_same=None)
        monkeypatch.setattr("unisono.modules.attributes.native_core", lambda: plain)
    first, second = object(), object()
    table = {"a": first, "b": None}
    row = [first, second]
    names = {"x": 1}
    contents = Contents()
    ordered = OrderedDict(p=None, q=None)
    contents.note([table, row, names.keys(), {second}, {}, ordered])
    assert contents.are_same()

    changes: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: table.update(b=second), lambda: table.update(b=None)),
        (lambda: row.append(None), row.pop),
        (lambda: row.reverse(), lambda: row.reverse()),
        (lambda: table.update(c=None), lambda: table.pop("c")),
        (lambda: names.update(y=1), lambda: names.pop("y")),
        (lambda: table.update(c=table.pop("b")), lambda: table.update(b=table.pop("c"))),
        (lambda: ordered.move_to_end("p"), lambda: ordered.move_to_end("q")),
    ]
    for change, back in changes:
        change()
        assert not contents.are_same()
        back()
        assert contents.are_same()
