"""Programs in the style of real ones end with the weights of one device, or with a named error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from processes.crew import Crew

import programs.all  # noqa: F401 - brings in the programs
from programs.running import PROGRAMS, Outcome, on_one_device, on_replicas, on_workers

# torch's own functions warn of each other.
pytestmark = [
    # Packages take their time to be imported, in each process.
    pytest.mark.timeout(300),
    # peft asks transformers in an older way.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]

each_program = pytest.mark.parametrize("name", list(PROGRAMS))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Two processes, which are the workers of one program after another."""
    with Crew(2) as members:
        yield members


@each_program
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_of_one_process(name: str, num_replicas: int) -> None:
    pytest.importorskip(PROGRAMS[name][1].package)
    check(name, on_replicas(name, num_replicas), num_replicas)


@each_program
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_two_workers(crew: Crew, name: str, num_replicas: int) -> None:
    pytest.importorskip(PROGRAMS[name][1].package)
    for outcome in on_workers(crew, name, num_replicas):
        check(name, outcome, 2 * num_replicas)


def check(name: str, found: Outcome, num_replicas: int) -> None:
    settings = PROGRAMS[name][1]
    if settings.error is not None and num_replicas > 1:
        assert found.error == settings.error.__name__, found.message
        assert [word for word in settings.words if word not in found.message] == []
        return
    assert not found.error, found.traceback
    expected = on_one_device(name).learned
    assert found.learned.keys() == expected.keys()
    for key, values in expected.items():
        limit = settings.tolerance
        np.testing.assert_allclose(found.learned[key], values, rtol=limit, atol=limit, err_msg=key)
