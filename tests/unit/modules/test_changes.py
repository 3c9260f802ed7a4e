"""What is done to a model between runs reaches the replicas, and what they do is seen after."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


def mean_output(strategy: uo.Strategy, model: nn.Module) -> list[float]:
    """What each replica gets from the model for one row of ones."""
    dtype = next(model.parameters()).dtype
    x = torch.ones(1, 2, dtype=dtype)
    results = strategy.experimental_local_results(strategy.run(lambda: [model(x).sum().item()]))
    return [value for (value,) in results]


@pytest.fixture
def strategy(mirrored: Make, memories: str) -> uo.Strategy:
    return mirrored()


@pytest.fixture
def model(strategy: uo.Strategy) -> nn.Module:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
    strategy.run(lambda: model(torch.ones(1, 2)))
    return model


def test_load_state_dict(strategy: uo.Strategy, model: nn.Module) -> None:
    model.load_state_dict({"weight": torch.tensor([[1.0, 10.0]])})

    assert mean_output(strategy, model) == [11, 11]


def test_writing_in_place(strategy: uo.Strategy, model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.fill_(2)

    assert mean_output(strategy, model) == [4, 4]


def test_other_data(strategy: uo.Strategy, model: nn.Linear) -> None:
    model.weight.data = torch.tensor([[1.0, 10.0]])

    assert mean_output(strategy, model) == [11, 11]


def test_another_parameter(strategy: uo.Strategy, model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.tensor([[1.0, 10.0]]))

    assert mean_output(strategy, model) == [11, 11]


def test_another_dtype(strategy: uo.Strategy, model: nn.Module) -> None:
    model.to(torch.float64)

    dtype = strategy.run(lambda: next(model.parameters()).dtype)

    assert dtype is torch.float64
    assert len(set(mean_output(strategy, model))) == 1


def test_freezing(strategy: uo.Strategy, model: nn.Linear) -> None:
    for is_trained in (False, True, False):
        model.requires_grad_(is_trained)
        assert strategy.run(lambda: model.weight.requires_grad) is is_trained


def test_training_and_evaluation(strategy: uo.Strategy, model: nn.Module) -> None:
    for is_training in (False, True):
        model.train(is_training)
        assert strategy.run(lambda: model.training) is is_training


def test_train_after_a_replica_chose_evaluation(strategy: uo.Strategy, model: nn.Module) -> None:
    def evaluate() -> bool:
        model.eval()
        return model.training

    assert strategy.run(evaluate) is False
    model.train()
    assert strategy.run(lambda: model.training) is True


def test_evaluation_in_inference_mode_then_training(mirrored: Make, memories: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()

    for _ in range(2):
        with torch.inference_mode():
            model.eval()
            strategy.run(lambda: model(torch.ones(4, 2)))
            model.train()
        before = next(model.parameters()).detach().clone()
        strategy.run(step)
        assert not torch.equal(next(model.parameters()), before)


def test_gradients_are_seen_after_a_run(strategy: uo.Strategy, model: nn.Linear) -> None:
    def step(x: Tensor) -> None:
        model(x).sum().backward()

    strategy.run(step, args=(uo.PerReplica((torch.tensor([[1.0, 2]]), torch.tensor([[3.0, 4]]))),))

    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2, 3]]


def test_model_zero_grad_clears_the_gradients_of_replicas(
    strategy: uo.Strategy, model: nn.Linear
) -> None:
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())

    model.zero_grad()

    assert strategy.run(lambda: model.weight.grad is None) is True


def test_a_model_trains_outside_run_too(strategy: uo.Strategy, model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()

    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    assert torch.equal(model.weight, before - 1)
    assert mean_output(strategy, model) == pytest.approx([before.sum().item() - 2] * 2)


def test_batch_statistics_are_of_each_replica_and_averaged_when_read(
    mirrored: Make, memories: str
) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.BatchNorm1d(1)
    # Means 2 and 20, unbiased variances 2 and 200.
    x = uo.PerReplica((torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0], [30.0]])))

    def step(x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output

    outputs = strategy.run(step, args=(x,))

    for output in outputs.values:
        torch.testing.assert_close(output.flatten(), torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)
    assert model.running_mean is not None
    assert model.running_var is not None
    assert model.num_batches_tracked is not None
    torch.testing.assert_close(model.running_mean, torch.tensor([0.1 * 11]))
    torch.testing.assert_close(model.running_var, torch.tensor([0.9 + 0.1 * 101]))
    assert model.num_batches_tracked.item() == 1

    strategy.run(step, args=(x,))
    torch.testing.assert_close(model.state_dict()["running_mean"], torch.tensor([0.19 * 11]))
    assert model.num_batches_tracked.item() == 2


def test_synchronized_batch_statistics_are_those_of_the_whole_batch(mirrored: Make) -> None:
    strategy = mirrored(synchronize_batch_norm=True)
    with strategy.scope():
        model = nn.BatchNorm1d(3).double()
    reference = nn.BatchNorm1d(3).double()
    x = torch.randn(10, 3, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output

    for sizes in ([5, 5], [7, 3], [10, 0]):
        parts = strategy.run(step, args=(uo.PerReplica(x.split(sizes)),)).values
        torch.testing.assert_close(torch.cat(parts), reference(x), rtol=0, atol=1e-12)
    for name, buffer in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], buffer, rtol=0, atol=1e-12)


def test_buffers_that_nobody_writes_keep_their_bits(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model: Any = nn.Linear(2, 2)
        model.register_buffer("constant", torch.rand(100))
    before = model.constant.clone()

    for _ in range(3):
        strategy.run(lambda: model(torch.ones(1, 2)))

    assert torch.equal(model.state_dict()["constant"], before)
    assert torch.equal(strategy.run(lambda: model.constant.clone()).values[2], before)


def test_buffers_that_are_loaded_reach_the_replicas(strategy: uo.Strategy) -> None:
    with strategy.scope():
        model = nn.BatchNorm1d(1)
    strategy.run(lambda: model(torch.randn(4, 1)))

    model.load_state_dict({**model.state_dict(), "running_mean": torch.tensor([7.0])})
    model.eval()

    seen = strategy.run(lambda: model.running_mean.clone())  # type: ignore[union-attr]
    assert [one.item() for one in seen.values] == [7, 7]


def test_state_dict_is_that_of_plain_torch(strategy: uo.Strategy) -> None:
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3))
    plain(torch.randn(2, 1, 5, 5))

    model = strategy.mirror(copy.deepcopy(plain))
    strategy.run(lambda: model(torch.randn(2, 1, 5, 5)))

    found = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    assert found == {name: (t.shape, t.dtype) for name, t in plain.state_dict().items()}
    plain.load_state_dict(model.state_dict())


def through_pickle(model: nn.Module) -> nn.Module:
    duplicate: nn.Module = pickle.loads(pickle.dumps(model))
    return duplicate


def through_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    duplicate: nn.Module = torch.load(file, weights_only=False)
    return duplicate


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
def test_copies_are_plain_modules(
    strategy: uo.Strategy, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    strategy.run(lambda: model[:2](torch.randn(4, 2)))

    other = duplicate(model)

    assert [type(m) for m in other.modules()] == [
        nn.Sequential,
        nn.Linear,
        nn.BatchNorm1d,
        nn.LSTM,
    ]
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
        assert other.state_dict()[name].data_ptr() != tensor.data_ptr()
    other.eval()
    assert model.training


def test_what_a_step_has_given_a_parameter_stays_when_the_parameter_moves(
    strategy: uo.Strategy, model: nn.Linear
) -> None:
    def give() -> None:
        model.weight.register_hook(lambda grad: grad * 3)
        with strategy.no_sync():
            model(torch.ones(1, 2)).sum().backward()

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()

    strategy.run(give)
    model.weight.data = model.weight.data.clone()
    strategy.run(backward)

    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[6, 6]]


def test_gradients_of_a_model_that_is_converted(strategy: uo.Strategy, model: nn.Linear) -> None:
    def backward() -> None:
        model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().backward()

    for dtype in (torch.float64, torch.float32):
        strategy.run(backward)
        model.to(dtype)
    strategy.run(backward)

    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.tolist() == [[3, 3]]
