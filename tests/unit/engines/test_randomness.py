import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]

ONES = torch.ones(4, 8, 16)
IMAGES = torch.ones(4, 8, 5, 5)
NN: Any = torch._C._nn
MATRIX = torch.arange(144.0).reshape(12, 12).sin()
LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
LSTM_INPUT = torch.ones(3, 2, 4)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5)

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(20),
    "randn": lambda: torch.randn(20),
    "randn_like": lambda: torch.randn_like(torch.ones(20)),
    "rand_like": lambda: torch.rand_like(torch.ones(20)),
    "randint": lambda: torch.randint(0, 1000, (20,)),
    "randint_like": lambda: torch.randint_like(torch.ones(20), 1000),
    "randperm": lambda: torch.randperm(50),
    "normal": lambda: torch.normal(torch.zeros(20), 1.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((90,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "poisson": lambda: torch.poisson(torch.full((40,), 5.0)),
    "binomial": lambda: torch.binomial(torch.full((90,), 9.0), torch.full((90,), 0.5)),
    "in_place": lambda: torch.empty(20).uniform_(),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample((20,)),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((20,)),
    "beta": lambda: torch.distributions.Beta(1.0, 1.0).sample((20,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(5)).sample((5,)),
    "dropout": lambda: functional.dropout(ONES),
    "dropout_in_place": lambda: functional.dropout(ONES.clone(), inplace=True),
    "dropout1d": lambda: functional.dropout1d(ONES),
    "dropout2d": lambda: functional.dropout2d(IMAGES),
    "dropout3d": lambda: functional.dropout3d(IMAGES[None].repeat(8, 1, 1, 1, 1)),
    "alpha_dropout": lambda: functional.alpha_dropout(ONES, training=True),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(IMAGES, training=True),
    "module": lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3))(IMAGES),
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "gumbel": lambda: functional.gumbel_softmax(ONES),
    "fractional_pool": lambda: functional.fractional_max_pool2d(
        torch.arange(800.0).reshape(1, 8, 10, 10), 2, output_size=6
    ),
    "attention": lambda: functional.scaled_dot_product_attention(ONES, ONES, ONES, dropout_p=0.5),
    "lstm": lambda: LSTM(LSTM_INPUT)[0],
    "dropout_": lambda: torch.dropout_(ONES.clone(), 0.5, True),
    "torch.dropout": lambda: torch.dropout(ONES, p=0.5, train=True),
    "alpha_dropout_": lambda: torch.alpha_dropout_(ONES.clone(), 0.5, True),
    "feature_dropout_": lambda: torch.feature_dropout_(IMAGES.clone(), 0.5, True),
    "rrelu_": lambda: torch.rrelu_(-ONES, training=True),
    "rrelu_with_noise": lambda: NN.rrelu_with_noise(-ONES, torch.empty_like(ONES), 0.1, 0.3, True),
    "svd_lowrank": lambda: torch.svd_lowrank(MATRIX, 3)[0],
    "pca_lowrank": lambda: torch.pca_lowrank(MATRIX, 3)[0],
    "lobpcg": lambda: torch.lobpcg(MATRIX @ MATRIX.T, 1, niter=1)[1],
    "fractional_pool_indices": lambda: functional.fractional_max_pool2d_with_indices(
        torch.arange(800.0).reshape(1, 8, 10, 10), (2, 2), output_size=(6, 6)
    )[0],
    "multi_head": lambda: ATTENTION(*[torch.ones(3, 2, 8)] * 3)[0],
}


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand(20)


def drawn_in_backward() -> Tensor:
    x = torch.ones(20, requires_grad=True)
    DrawsInBackward.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def noisy(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True) + torch.rand_like(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(noisy)


DRAWS |= {
    "in_backward": drawn_in_backward,
    "scripted": lambda: scripted(ONES),
    "operator": lambda: torch.ops.aten.rand.default([20]),
    "vmap": lambda: torch.vmap(lambda x: x + torch.rand(16), randomness="different")(ONES[0]),
}


def draws(strategy: uo.Strategy, draw: Callable[[], Tensor]) -> tuple[list[float], ...]:
    torch.manual_seed(5)

    def step() -> list[float]:
        first, second = draw(), draw()
        return [*first.detach().flatten().tolist(), *second.detach().flatten().tolist()]

    return strategy.experimental_local_results(strategy.run(step))


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_draw_other_numbers_and_the_same_in_every_run(mirrored: Make, name: str) -> None:
    strategy = mirrored(2)

    first = draws(strategy, DRAWS[name])
    again = [draws(strategy, DRAWS[name]) for _ in range(20)]

    assert first[0] != first[1]
    assert again == [first] * 20


@pytest.mark.parametrize("name", ["dropout", "rrelu", "alpha_dropout", "attention"])
def test_nothing_is_drawn_where_plain_torch_draws_nothing(mirrored: Make, name: str) -> None:
    calls: dict[str, Callable[[], Tensor]] = {
        "dropout": lambda: functional.dropout(ONES, training=False),
        "rrelu": lambda: functional.rrelu(ONES),
        "alpha_dropout": lambda: functional.alpha_dropout(ONES),
        "attention": lambda: functional.scaled_dot_product_attention(ONES, ONES, ONES),
    }

    def step() -> Tensor:
        calls[name]()
        return torch.rand(3)

    strategy = mirrored()
    torch.manual_seed(1)
    expected = strategy.run(lambda: torch.rand(3)).values
    torch.manual_seed(1)
    found = strategy.run(step).values

    assert [f.tolist() for f in found] == [e.tolist() for e in expected]


def test_no_mode_sees_the_functions_that_a_replica_calls(mirrored: Make) -> None:
    assert mirrored().run(torch._C._len_torch_function_stack) == 0


def test_a_thread_draws_from_the_default_generator_after_a_run(mirrored: Make) -> None:
    strategy = mirrored()
    torch.manual_seed(3)
    strategy.run(lambda: torch.rand(3))
    found = torch.rand(3)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    torch.manual_seed(3)
    strategy.run(lambda: None)

    assert torch.equal(torch.rand(3), found)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(4)))


def test_tensors_without_data_draw_nothing(mirrored: Make) -> None:
    def step() -> str:
        return torch.rand(3, device="meta").uniform_().device.type

    strategy = mirrored()

    assert strategy.experimental_local_results(strategy.run(step)) == ("meta", "meta")


def test_a_closure_of_an_optimizer_draws_from_its_replica(mirrored: Make) -> None:
    """Also on replica 0, which makes the update for all."""
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def step() -> float:
        drawn: list[float] = []

        def closure() -> Tensor:
            drawn.append(torch.rand(1).item())
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return drawn[0]

    torch.manual_seed(1)
    expected = strategy.run(lambda: torch.rand(1).item()).values
    torch.manual_seed(1)

    assert strategy.run(step).values == expected


def test_a_generator_that_is_given_is_used(mirrored: Make) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(9)).tolist()

    def step() -> list[float]:
        return torch.rand(3, generator=torch.Generator().manual_seed(9)).tolist()

    strategy = mirrored()

    assert strategy.experimental_local_results(strategy.run(step)) == (expected, expected)


def test_dropout_scales_what_it_keeps(mirrored: Make) -> None:
    def step() -> Tensor:
        return functional.dropout(torch.ones(10000), 0.25)

    for dropped in mirrored().run(step).values:
        assert sorted(set(dropped.tolist())) == pytest.approx([0, 4 / 3])
        assert dropped.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(mirrored: Make, p: float) -> None:
    for dropped in mirrored().run(lambda: functional.dropout(torch.ones(9), p)).values:
        assert dropped.tolist() == [1.0 - p] * 9


def test_every_run_draws_other_numbers(mirrored: Make) -> None:
    strategy = mirrored()

    runs = [strategy.run(lambda: torch.rand(1).item()).values for _ in range(5)]

    assert len({number for run in runs for number in run}) == 10


def test_a_thread_whose_first_run_was_for_inference_can_train(mirrored: Make) -> None:
    strategy = mirrored()

    def runs() -> set[bool]:
        with torch.inference_mode():
            strategy.run(torch.rand, args=(1,))
        return {one.is_inference() for one in strategy.run(torch.rand, args=(1,)).values}

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(runs).result(timeout=60) == {False}


def test_the_generator_of_the_caller_goes_on_the_same_way(mirrored: Make) -> None:
    strategy = mirrored(3)
    after: set[float] = set()

    for name in ("rand", "dropout2d", "lstm", "rrelu"):
        draws(strategy, DRAWS[name])
        after.add(torch.rand(1).item())

    assert len(after) == 1


def test_an_rng_state_resumes(mirrored: Make) -> None:
    strategy = mirrored()
    strategy.run(lambda: torch.rand(1))
    state = torch.get_rng_state()

    first = [strategy.run(lambda: torch.rand(1).item()).values for _ in range(3)]
    torch.set_rng_state(state)
    again = [strategy.run(lambda: torch.rand(1).item()).values for _ in range(3)]

    assert again == first


def test_one_replica_draws_what_plain_torch_draws(mirrored: Make) -> None:
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)

    assert torch.equal(mirrored(1).run(lambda: torch.rand(3)), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask_again(mirrored: Make, use_reentrant: bool) -> None:
    def step() -> bool:
        x = torch.ones(100, requires_grad=True)
        y = checkpoint(functional.dropout, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad is not None
        return torch.equal(y.detach(), x.grad)

    assert mirrored().run(step) is True


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


def test_operators_that_call_functions_are_found_on_replicas(mirrored: Make) -> None:
    strategy = mirrored()
    x = torch.arange(4.0)
    double: Any = Double.apply

    def step() -> Any:
        return torch.func.vmap(torch.func.grad(lambda one: double(one).square()))(x)

    class Made(HigherOrderOperator):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)  # type: ignore[no-untyped-call]

    assert all(torch.equal(one, 8 * x) for one in strategy.run(step).values)
    made: Any = Made("unisono_test_made")  # type: ignore[no-untyped-call]
    made.py_impl(torch._C.DispatchKey.AutogradCPU)(lambda fn, given: fn(given))
    found = strategy.run(lambda: made(torch.neg, x))
    assert all(torch.equal(one, -x) for one in found.values)
