import logging
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, manual_seed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono as uo
from unisono.errors import ContextError

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

    assert results(mirrored(), step) == ("meta", "meta")


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


def results(strategy: uo.Strategy, step: Callable[[], object]) -> tuple[Any, ...]:
    return strategy.experimental_local_results(strategy.run(step))


SEEDS: dict[str, Callable[[int], object]] = {
    "torch.manual_seed": lambda seed: torch.manual_seed(seed),
    "torch.random.manual_seed": lambda seed: torch.random.manual_seed(seed),
    "imported by name": manual_seed,
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_seed_set_in_a_step_is_that_of_the_replica(
    mirrored: Make, seed: Callable[[int], object]
) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    torch.manual_seed(1)
    strategy = mirrored(3)
    strategy.run(lambda: None)
    before = torch.get_rng_state()

    def step() -> tuple[Any, ...]:
        seed(7)
        first = torch.rand(3).tolist()
        dropped = functional.dropout(torch.ones(9)).tolist()
        seed(7)
        return (*first, *torch.rand(3).tolist(), *dropped, torch.initial_seed())

    found = results(strategy, step)

    assert [list(one[:6]) for one in found] == [expected * 2] * 3
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == 7
    # As after any other step.
    torch.set_rng_state(before)
    strategy.run(lambda: None)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    strategy.run(step)
    assert torch.equal(torch.get_rng_state(), after)


def test_each_replica_can_have_its_own_seed(mirrored: Make) -> None:
    def step() -> list[float]:
        context = uo.get_replica_context()
        assert context is not None
        torch.manual_seed(context.replica_id_in_sync_group)
        return torch.rand(2).tolist()

    expected = [
        torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)
    ]

    assert list(results(mirrored(), step)) == expected


def test_torch_seed_gives_each_replica_other_numbers(mirrored: Make) -> None:
    assert len({*results(mirrored(3), torch.seed)}) == 3


def test_a_fork_of_the_generators_is_undone_on_each_replica(mirrored: Make) -> None:
    def step() -> bool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            inside = torch.rand(4)
            expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
        return torch.equal(inside, expected)

    def forked() -> float:
        step()
        return torch.rand(1).item()

    strategy = mirrored()
    torch.manual_seed(1)
    plain = results(strategy, lambda: torch.rand(1).item())
    torch.manual_seed(1)

    assert results(strategy, forked) == plain
    assert strategy.run(step) is True


def test_a_generator_made_outside_draws_the_same_on_every_replica(mirrored: Make) -> None:
    given, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    strategy = mirrored(3)

    def step() -> tuple[float, ...]:
        time.sleep(random.Random().random() / 100)
        drawn = torch.rand(2, generator=given), torch.randperm(5, generator=given)
        torch.nn.init.normal_(torch.empty(2), 0.0, 1.0, given)
        return (*drawn[0].tolist(), *drawn[1].tolist())

    for _ in range(3):
        expected = (
            *torch.rand(2, generator=twin).tolist(),
            *torch.randperm(5, generator=twin).tolist(),
        )
        torch.nn.init.normal_(torch.empty(2), 0.0, 1.0, twin)
        found = results(strategy, step)
        assert found == (expected,) * 3
        assert torch.equal(given.get_state(), twin.get_state())


def test_after_a_run_a_generator_goes_on_as_that_of_replica_0(mirrored: Make) -> None:
    given, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        for _ in range(1 + context.local_id):
            torch.rand(1, generator=given)

    mirrored(3).run(step)
    torch.rand(1, generator=twin)

    assert torch.equal(given.get_state(), twin.get_state())


def test_a_generator_made_in_a_step_is_the_replicas_own(mirrored: Make) -> None:
    def step() -> bool:
        own = torch.Generator().manual_seed(4)
        first = torch.rand(3, generator=own)
        own.manual_seed(4)
        return torch.equal(first, torch.rand(3, generator=own))

    assert mirrored(3).run(step) is True


def test_a_generator_made_outside_cannot_be_seeded_in_a_step(mirrored: Make) -> None:
    given = torch.Generator()
    meet = threading.Barrier(2)

    def step() -> None:
        torch.rand(1, generator=given)
        meet.wait(30)
        given.manual_seed(3)
        torch.rand(1, generator=given)

    with pytest.raises(ContextError, match=r"call `torch\.manual_seed\(\)` in the step"):
        mirrored().run(step)


def test_the_default_generator_by_name_is_the_replicas_own(mirrored: Make) -> None:
    strategy = mirrored()

    def drawn(draw: Callable[[], Tensor]) -> tuple[Any, ...]:
        torch.manual_seed(8)
        return results(strategy, lambda: draw().tolist())

    assert drawn(lambda: torch.rand(3, generator=torch.default_generator)) == drawn(
        lambda: torch.rand(3)
    )


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's `random`"), (np.random.rand, "`numpy.random`")]
)
def test_a_step_that_draws_from_a_generator_of_all_threads_is_told_once(
    mirrored: Make, draw: Callable[[], float], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored()

    with caplog.at_level(logging.WARNING, "unisono"):
        for _ in range(5):
            strategy.run(draw)

    (line,) = caplog.messages
    assert f"A step has drawn from {name}, which all replicas share" in line
    assert "random.Random(seed + replica_id)" in line
