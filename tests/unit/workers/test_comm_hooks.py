"""Communication hooks in training: torch's own, ours, and a user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
)
from torch.utils.data import DataLoader, TensorDataset
from worker_threads import on_strategies

import unisono as uo
from unisono.testing import virtual_gpus

Register = Callable[[uo.Strategy], None]
SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN


def hooked(hook: Any, state: object = None) -> Register:
    return lambda strategy: strategy.register_comm_hook(state, hook)


class Model(nn.Module):
    """Dense and sparse gradients, two dtypes, and a parameter that one replica alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.hidden = nn.Linear(4, 8)
        self.wide = nn.Linear(8, 3).double()
        self.seldom = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.hidden(self.words(words).sum(1)).relu() * self.scale
        scores: Tensor = self.wide(hidden.double()).float()
        context = uo.get_replica_context()
        assert context is not None
        is_last = context.replica_id_in_sync_group + 1 == context.num_replicas_in_sync
        return scores * self.seldom if is_last else scores


def train(
    strategy: uo.Strategy, register: Register, start: dict[str, Tensor], data: TensorDataset
) -> dict[str, Tensor]:
    """Trains with accumulation, clipping and an uneven last batch; returns what was learnt."""
    register(strategy)
    with strategy.scope():
        model = Model()
        model.load_state_dict(start)
        dense = [p for name, p in model.named_parameters() if name != "words.weight"]
        optimizers = [
            torch.optim.SGD(model.words.parameters(), lr=0.1),
            torch.optim.SGD(dense, lr=0.1, momentum=0.9),
        ]

    def step(words: Tensor, labels: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

        def backward() -> None:
            loss = nn.functional.cross_entropy(model(words), labels, reduction="sum")
            (loss / max(1, len(labels))).backward()

        with strategy.no_sync():
            backward()
        # The second adds to what is reduced already.
        backward()
        backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()

    for batch in strategy.experimental_distribute_dataset(DataLoader(data, batch_size=8)):
        strategy.run(step, args=batch)
    assert model.never.grad is None
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(
    layout: tuple[int, int], register: Register, op: uo.ReduceOp = MEAN, **options: Any
) -> dict[str, Tensor]:
    """What all workers have learnt, which must be the same on each."""
    num_workers, num_replicas = layout
    # Drawn here, because threads would draw from one generator.
    torch.manual_seed(3)
    start = Model().state_dict()
    data = TensorDataset(torch.randint(20, (27, 5)), torch.randint(3, (27,)))
    first, *others = on_strategies(
        num_workers,
        lambda strategy: train(strategy, register, start, data),
        num_replicas=num_replicas,
        reduce_gradients=op,
        options=uo.experimental.CommunicationOptions(**options),
    )
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    return first


@cache
def trained_without_hook(layout: tuple[int, int], op: uo.ReduceOp = MEAN) -> dict[str, Tensor]:
    return trained(layout, lambda strategy: None, op)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Workers, and replicas of each.
@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("op", [MEAN, SUM])
def test_a_hook_that_averages_gives_the_bits_of_no_hook(
    layout: tuple[int, int], op: uo.ReduceOp
) -> None:
    expected = trained_without_hook(layout, op)

    found = trained(layout, hooked(default_hooks.allreduce_hook), op, bytes_per_pack=64)

    assert difference(found, expected) == 0.0


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    "make_hook",
    [
        lambda: uo.hooks.Compress(torch.bfloat16),
        lambda: uo.hooks.Compress(torch.float16, error_feedback=True),
        lambda: default_hooks.bf16_compress_hook,
        lambda: default_hooks.fp16_compress_hook,
        lambda: default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ],
    ids=["bf16", "fp16 with feedback", "torch bf16", "torch fp16", "torch wrapper"],
)
def test_compression_trains_nearly_as_none_does(layout: tuple[int, int], make_hook: Any) -> None:
    expected = trained_without_hook(layout)

    # A hook with a state of its own belongs to one worker.
    found = trained(layout, lambda strategy: strategy.register_comm_hook(None, make_hook()))

    assert 0.0 < difference(found, expected) < 0.01


def test_packs_do_not_change_what_is_rounded() -> None:
    def register(strategy: uo.Strategy) -> None:
        strategy.register_comm_hook(None, uo.hooks.Compress())

    assert difference(trained((2, 2), register, bytes_per_pack=1), trained((2, 2), register)) == 0.0


def gradient_of(
    layout: tuple[int, int], factors: Tensor, make_hook: Callable[[], Any] = uo.hooks.Compress
) -> Tensor:
    """The gradient of a parameter, of which replica i alone gives `factors[i]`."""

    def backward(strategy: uo.Strategy) -> Tensor:
        strategy.register_comm_hook(None, make_hook())
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.zeros(factors.shape[1]))])

        def step() -> None:
            context = uo.get_replica_context()
            assert context is not None
            (model[0] * factors[context.replica_id_in_sync_group]).sum().backward()

        strategy.run(step)
        grad: Tensor | None = model[0].grad
        assert grad is not None
        return grad.clone()

    num_workers, num_replicas = layout
    return on_strategies(num_workers, backward, num_replicas=num_replicas)[0]


FOUR = [(1, 4), (2, 2), (4, 1)]


def test_layouts_agree_where_the_shares_of_workers_need_no_rounding() -> None:
    factors = torch.arange(-8.0, 8.0).view(4, 4)

    for layout in FOUR:
        assert torch.equal(gradient_of(layout, factors), factors.mean(0))


def test_layouts_differ_by_no_more_than_one_rounding_of_each_share_and_of_the_mean() -> None:
    factors = torch.randn(4, 1000)
    bound = torch.finfo(torch.bfloat16).eps * factors.abs().mean(0)

    found = [gradient_of(layout, factors) for layout in FOUR]

    for one in found:
        assert ((one - factors.mean(0)).abs() <= bound).all()
    # So the docs may not promise the same bits at every layout.
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_hook_sees_the_mean_of_its_worker_pack_by_pack() -> None:
    seen: list[Any] = []

    def look(state: list[Any], bucket: Any) -> Tensor:
        shapes = [tuple(p.shape) for p in bucket.parameters()]
        assert [tuple(g.shape) for g in bucket.gradients()] == shapes
        state.append((bucket.index(), bucket.is_last(), shapes, bucket.buffer().tolist()))
        result: Tensor = 10 * bucket.buffer()
        return result

    def backward(strategy: uo.Strategy) -> list[Any]:
        strategy.register_comm_hook(seen, look)
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in (2, ())])

        def step() -> None:
            context = uo.get_replica_context()
            assert context is not None
            (sum(p.sum() for p in model) * context.replica_id_in_sync_group).backward()

        for _ in range(2):
            strategy.run(step)
            model.zero_grad()
        strategy.run(step)
        return [parameter.grad.tolist() for parameter in model if parameter.grad is not None]

    options = uo.experimental.CommunicationOptions(bytes_per_pack=1)
    (found,) = on_strategies(1, backward, num_replicas=2, options=options)

    assert seen == [(0, False, [()], [0.5]), (1, True, [(2,)], [0.5, 0.5])] * 3
    assert found == [[5.0, 5.0], 5.0]


@pytest.mark.parametrize("bytes_per_pack", [1, 1 << 20])
@pytest.mark.parametrize("layout", [{}, {"threads_per_replica": 1}], ids=["worker", "replicas"])
def test_no_gradient_of_an_earlier_pass_goes_through_a_hook_again(
    bytes_per_pack: int, layout: dict[str, Any]
) -> None:
    def half(_: Any, bucket: Any) -> Tensor:
        # A bucket with nothing new is left out; what is not new in it is zero.
        assert bucket.buffer().count_nonzero() == 1
        result: Tensor = bucket.buffer() / 2
        return result

    def backward(strategy: uo.Strategy) -> list[Any]:
        strategy.register_comm_hook(None, half)
        with strategy.scope():
            models = [nn.Linear(1, 1, bias=False) for _ in range(2)]

        def step() -> list[Tensor]:
            for model, factor in zip(models, (4.0, 6.0), strict=True):
                model(torch.full((1, 1), factor)).sum().backward()
            found = [model.weight.grad for model in models]
            return [grad.clone() for grad in found if grad is not None]

        results = [strategy.run(step) for _ in range(2)]
        return [[one.values for one in found] for found in results]

    options = uo.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    (found,) = on_strategies(1, backward, num_replicas=2, options=options, **layout)

    # The second run adds to the gradients of the first, and the hook gets the sum.
    first, second = ([[one.item() for one in values] for values in run] for run in found)
    assert first == [[2.0, 2.0], [3.0, 3.0]]
    assert second == [[3.0, 3.0], [4.5, 4.5]]


def give_own_id(model: nn.Module) -> None:
    """A step in which the gradient of each replica is its id."""
    context = uo.get_replica_context()
    assert context is not None
    (model(torch.ones(1)) * context.replica_id_in_sync_group).backward()


class Highest(uo.CrossDeviceOps):
    """Takes the highest for the mean."""

    def reduce_implementation(
        self, reduce_op: uo.ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        highest = torch.stack(per_replica_value.values).amax(0)
        return self.broadcast_implementation(highest, destinations)


def test_a_reduction_of_ones_own_counts_between_the_replicas_of_a_worker(
    mirrored: Callable[..., uo.MirroredStrategy], memories: str
) -> None:
    strategy = mirrored(3, cross_device_ops=Highest())
    strategy.register_comm_hook(None, default_hooks.allreduce_hook)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    for _ in range(2):
        model.zero_grad()
        strategy.run(give_own_id, args=(model,))
        assert model.weight.grad == 2.0


def test_a_hook_that_sends_nothing_leaves_each_worker_its_own_mean() -> None:
    def backward(strategy: uo.Strategy) -> Any:
        strategy.register_comm_hook(None, debugging_hooks.noop_hook)
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        strategy.run(give_own_id, args=(model,))
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert on_strategies(2, backward, num_replicas=2) == [0.5, 2.5]


def test_a_scaler_sees_what_overflows_on_the_wire() -> None:
    def scales(strategy: uo.Strategy) -> list[float]:
        strategy.register_comm_hook(None, uo.hooks.Compress(torch.float16, error_feedback=True))
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1))).sum().backward()
            scaler.step(optimizer)
            scaler.update()

        found = []
        for _ in range(4):
            strategy.run(step)
            found += [scaler.get_scale(), model.weight.item()]
        return found

    for found in on_strategies(2, scales):
        assert found == [2.0**16, 1.0, 2.0**15, 1.0, 2.0**15, 0.75, 2.0**15, 0.5]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hook",
    [uo.hooks.Compress(error_feedback=True), default_hooks.bf16_compress_hook],
    ids=["ours", "torch"],
)
def test_a_bucket_is_on_the_gpu_of_the_first_replica(hook: Any) -> None:
    places = []

    def watched(state: Any, bucket: Any) -> Any:
        places.append(bucket.buffer().device)
        return hook(state, bucket)

    with virtual_gpus(2), torch.cuda.stream(torch.cuda.Stream()):
        strategy = uo.MirroredStrategy(["cuda:0", "cuda:1"])
        strategy.register_comm_hook(None, watched)
        with strategy.scope():
            model = nn.Linear(1000, 1000)

        def step() -> None:
            context = uo.get_replica_context()
            assert context is not None
            factor = context.replica_id_in_sync_group + 1.0
            model.zero_grad()
            (model(torch.ones(8, 1000, device="cuda")) * factor).sum().backward()

        for _ in range(2):
            strategy.run(step)
            assert model.weight.grad is not None
            assert (model.weight.grad == 12.0).all()
        strategy.close()
    assert set(places) == {torch.device("cuda", 0)}
