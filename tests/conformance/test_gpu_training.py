"""Training on a real GPU: streams, no waiting, mixed precision, compilers, graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.devices import Trail
from unisono.testing import virtual_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

GPUS = [f"cuda:{i}" for i in range(4)]
# A few milliseconds: long enough that code that does not wait is wrong.
SLEEP_CYCLES = 10_000_000

Strategies = Callable[..., uo.MirroredStrategy]


@pytest.fixture
def gpus() -> Iterator[Strategies]:
    made: list[uo.MirroredStrategy] = []

    def make(num_replicas: int, **options: Any) -> uo.MirroredStrategy:
        made.append(uo.MirroredStrategy(GPUS[:num_replicas], **options))
        return made[-1]

    with virtual_gpus(4):
        yield make
        for strategy in made:
            strategy.close()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def batches(num_replicas: int) -> tuple[uo.PerReplica, uo.PerReplica]:
    torch.manual_seed(1)
    devices = GPUS[:num_replicas]
    inputs = [torch.randn(6, 3, 8, 8, device="cuda") for _ in devices]
    labels = [torch.randint(4, (6,), device="cuda") for _ in devices]
    return uo.PerReplica(inputs, devices), uo.PerReplica(labels, devices)


class Training:
    """A small training, with what tests change about it."""

    def __init__(
        self,
        strategy: uo.MirroredStrategy,
        *,
        around: Callable[[], Any] | None = None,
        change: Callable[[nn.Module], Any] = lambda model: model,
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model: Any = convnet()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.forward = change(self.model)
        self.around = around
        self.batch = batches(strategy.num_replicas_in_sync)

    def replica_step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.forward(inputs), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> Any:
        return self.strategy.run(self.replica_step, args=self.batch)

    def weights(self, steps: int = 3) -> list[Tensor]:
        for _ in range(steps):
            self.step()
        return [parameter.detach().cpu().clone() for parameter in self.model.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_all_gpus_are_the_default(gpus: Strategies) -> None:
    strategy = uo.MirroredStrategy()

    assert [str(device) for device in strategy.extended.worker_devices] == GPUS


def test_replicas_on_streams_of_their_own_end_with_the_same_bits(gpus: Strategies) -> None:
    expected = Training(gpus(3)).weights()
    training = Training(gpus(3))
    streams = [torch.cuda.Stream() for _ in range(3)]
    plain_step = training.replica_step

    def on_own_stream(inputs: Tensor, labels: Tensor) -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        stream = streams[int(context.replica_id_in_sync_group)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The later a replica, the earlier it would be seen if nobody waited for it.
            torch.cuda._sleep(SLEEP_CYCLES * (3 - int(context.replica_id_in_sync_group)))
            loss = plain_step(inputs, labels)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    training.replica_step = on_own_stream  # type: ignore[method-assign]

    assert_equal(training.weights(), expected)


def test_a_caller_on_another_stream_needs_no_other_order(gpus: Strategies) -> None:
    expected = Training(gpus(2)).weights()
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        training = Training(gpus(2))
        found = training.weights()

    assert_equal(found, expected)


def test_what_follows_waits_for_what_was_noted() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    trail = Trail()
    value = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()

    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        value += 1
        trail.note(value.device)
        assert not trail.follow()
    with torch.cuda.stream(second):
        assert trail.follow()
        copy = value.clone()

    torch.cuda.synchronize()
    assert bool((copy == 1).all())


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_step_never_waits_for_the_gpu(gpus: Strategies, num_replicas: int) -> None:
    training = Training(gpus(num_replicas))
    training.weights(steps=2)

    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [training.step() for _ in range(3)]
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len(losses) == 3


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_input_is_prefetched_without_waiting_for_the_gpu(
    gpus: Strategies, num_replicas: int
) -> None:
    strategy = gpus(num_replicas)
    data = [(torch.randn(8, 3, 8, 8), torch.randint(4, (8,))) for _ in range(6)]
    training = Training(strategy)
    training.step()
    losses = []

    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs, labels in strategy.experimental_distribute_dataset(data):
            losses.append(strategy.run(training.replica_step, args=(inputs, labels)))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len(losses) == 6


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_channels_last_keeps_the_result(gpus: Strategies, num_replicas: int) -> None:
    expected = Training(gpus(num_replicas)).weights()

    def to_channels_last(model: nn.Module) -> nn.Module:
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    found = Training(gpus(num_replicas), change=to_channels_last).weights()

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_with_a_scaler_trains(
    gpus: Strategies, num_replicas: int, dtype: torch.dtype
) -> None:
    strategy = gpus(num_replicas)
    training = Training(strategy)
    with strategy.scope():
        scaler = torch.amp.GradScaler("cuda")

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = nn.functional.cross_entropy(training.model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        return loss.detach()

    losses = [
        float(strategy.reduce(uo.ReduceOp.MEAN, strategy.run(step, args=training.batch)))
        for _ in range(20)
    ]

    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:.*script_method", "ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_to_the_same_weights(gpus: Strategies) -> None:
    expected = Training(gpus(2)).weights()

    # What turns the graphs into code keeps threads and processes, which tests must not leave.
    compiled = functools.partial(torch.compile, backend="aot_eager")
    found = Training(gpus(2), change=compiled).weights()

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_can_be_captured_and_replayed_as_a_cuda_graph(
    gpus: Strategies, num_replicas: int
) -> None:
    expected = Training(gpus(num_replicas)).weights(steps=6)
    training = Training(gpus(num_replicas))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training.weights(steps=3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        training.step()
    for _ in range(3):
        graph.replay()

    assert_equal(training.weights(steps=0), expected)
