import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import unisono as uo
from unit.modules.one_weight import Setup, X

Make = Callable[..., uo.MirroredStrategy]


@pytest.fixture
def setup(mirrored: Make, memories: str) -> Setup:
    return Setup(mirrored())


def test_one_update_for_all_replicas(setup: Setup) -> None:
    def step(x: Tensor) -> None:
        setup.backward(x)
        setup.optimizer.step()

    for expected in (-5.5, -11.0):
        setup.run(step)
        assert setup.weight == expected
        seen = setup.strategy.run(lambda: setup.model.weight.item())
        assert setup.strategy.experimental_local_results(seen)[-1] == expected


def test_every_replica_gets_what_step_returns(setup: Setup) -> None:
    def step(x: Tensor) -> Any:
        setup.backward(x)
        return setup.optimizer.step()

    assert setup.run(step) is None


def test_hooks_of_the_optimizer_run_once(setup: Setup) -> None:
    calls: list[str] = []
    setup.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    setup.optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def step(x: Tensor) -> None:
        setup.backward(x)
        setup.optimizer.step()

    setup.run(step)

    assert calls == ["before", "after"]


def test_an_optimizer_made_outside_for_a_mirrored_model(setup: Setup) -> None:
    other = torch.optim.SGD(setup.model.parameters(), lr=2.0)

    def step(x: Tensor) -> None:
        other.zero_grad()
        setup.model(x).sum().backward()
        other.step()

    setup.run(step)

    assert setup.weight == -11


def test_a_model_and_an_optimizer_made_outside(mirrored: Make) -> None:
    strategy = mirrored()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    assert strategy.mirror(model) is model
    assert strategy.mirror(optimizer) is optimizer

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    strategy.run(step, args=(X,))
    assert model.weight.item() == -5.5


def test_step_outside_run_uses_the_reduced_gradients(setup: Setup) -> None:
    setup.run(setup.backward)

    setup.optimizer.step()

    assert setup.weight == -5.5


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(setup: Setup, set_to_none: bool) -> None:
    def step(x: Tensor) -> Any:
        setup.optimizer.zero_grad(set_to_none)
        setup.model(x).sum().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad(set_to_none)
        return setup.model.weight.grad is None

    for expected in (-5.5, -11.0):
        assert setup.run(step) is set_to_none
        assert setup.weight == expected


def test_zero_grad_outside_run(setup: Setup) -> None:
    def step(x: Tensor) -> None:
        setup.model(x).sum().backward()
        setup.optimizer.step()

    for expected in (-5.5, -11.0):
        setup.optimizer.zero_grad()
        setup.run(step)
        assert setup.weight == expected


def test_the_norm_is_that_of_the_reduced_gradient(setup: Setup) -> None:
    def step(x: Tensor) -> float:
        setup.backward(x)
        norm = clip_grad_norm_(setup.model.parameters(), 2.0)
        setup.optimizer.step()
        return norm.item()

    norms = setup.strategy.experimental_local_results(setup.run(step))

    assert set(norms) == {5.5}
    assert setup.weight == pytest.approx(-2)


def test_clipping_by_value(setup: Setup) -> None:
    def step(x: Tensor) -> None:
        setup.backward(x)
        clip_grad_value_(setup.model.parameters(), 3.0)
        setup.optimizer.step()

    setup.run(step)

    assert setup.weight == -3


def test_clipping_outside_run(setup: Setup) -> None:
    setup.run(setup.backward)

    clip_grad_value_(setup.model.parameters(), 3.0)
    setup.optimizer.step()

    assert setup.weight == -3


def test_accumulation(setup: Setup) -> None:
    def step(x: Tensor) -> None:
        setup.optimizer.zero_grad()
        with setup.strategy.no_sync():
            setup.model(x).sum().backward()
        setup.model(x).sum().backward()
        setup.optimizer.step()

    for expected in (-11.0, -22.0):
        setup.run(step)
        assert setup.weight == expected


def test_parameter_groups(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr": 10.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=1.0)
    optimizer.add_param_group({"params": [model[2].weight], "lr": 100.0})
    for p in model.parameters():
        nn.init.zeros_(p)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        sum((layer(x).sum() for layer in model), torch.zeros(())).backward()
        optimizer.step()

    strategy.run(step, args=(X,))

    assert [p.item() for p in model.parameters()] == [-5.5, -55, -550]


def test_two_optimizers(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
    nn.init.zeros_(first.weight)
    nn.init.zeros_(second.weight)

    def step(x: Tensor) -> None:
        for model, optimizer, factor in zip((first, second), optimizers, (1, 10), strict=True):
            optimizer.zero_grad()
            (model(x) * factor).sum().backward()
            optimizer.step()

    for times in (1, 2):
        strategy.run(step, args=(X,))
        assert first.weight.item() == -5.5 * times
        assert second.weight.item() == -55 * times


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("is_inside", [True, False], ids=["in a step", "outside"])
def test_all_replicas_see_what_a_fused_optimizer_has_written(
    kind: Any, is_inside: bool, mirrored: Make, memories: str
) -> None:
    """torch does not count a write of a fused optimizer either."""
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = kind(model.parameters(), lr=1.0, fused=True)
    nn.init.zeros_(model.weight)
    alone = nn.Linear(1, 1, bias=False)
    alone_optimizer = kind(alone.parameters(), lr=1.0, fused=True)
    nn.init.zeros_(alone.weight)

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        if is_inside:
            optimizer.step()
        return model.weight.item()

    for _ in range(3):
        found = strategy.experimental_local_results(strategy.run(step, args=(X,)))
        if not is_inside:
            optimizer.step()
            found = strategy.experimental_local_results(strategy.run(lambda: model.weight.item()))
        alone_optimizer.zero_grad()
        alone.weight.grad = torch.stack(
            [torch.autograd.grad((alone(x) - 1).square().mean(), alone.weight)[0] for x in X.values]
        ).mean(0)
        alone_optimizer.step()
        assert found == (alone.weight.item(),) * 2
        assert model.weight.item() == alone.weight.item()


def test_a_closure_is_evaluated_on_every_replica(mirrored: Make, memories: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - 3 * x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    for _ in range(2):
        losses = strategy.run(step, args=(X,))
    assert model.weight.item() == pytest.approx(3, abs=1e-4)
    assert strategy.experimental_local_results(losses)[-1].item() < 1


def test_an_error_in_a_closure_is_raised(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.LBFGS(model.parameters())

    def step(x: Tensor) -> None:
        def closure() -> Tensor:
            if x.item() == 10:
                raise LookupError("in a closure")
            return model(x).sum()  # type: ignore[no-any-return]

        optimizer.step(closure)

    for _ in range(2):
        with pytest.raises(LookupError, match="in a closure"):
            strategy.run(step, args=(X,))


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
def test_copies_of_an_optimizer_are_plain(setup: Setup, duplicate: Callable[[Any], Any]) -> None:
    setup.run(setup.backward)

    other = duplicate(setup.optimizer)
    other.step()

    assert type(other) is torch.optim.SGD


def test_an_optimizer_looks_as_it_did(setup: Setup) -> None:
    assert isinstance(setup.optimizer, torch.optim.SGD)
    assert repr(setup.optimizer).startswith("SGD (")
    assert list(setup.optimizer.state_dict()) == ["state", "param_groups"]
