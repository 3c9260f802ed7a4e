import pytest

from unisono.algorithms import Gather, Schedule, Spread, num_steps, num_transfers
from unisono.algorithms.schedule import without


@pytest.mark.parametrize(
    ("schedule", "transfers", "steps"),
    [
        ((), 0, 0),
        ((Gather(0, ()),), 0, 1),
        ((Gather(0, (1, 2)),), 2, 1),
        ((Gather(0, (1, 2)), Spread(0, (1, 2))), 4, 2),
        ((Gather(0, (1,)), Gather(2, (3,))), 2, 1),
        ((Gather(0, (1,)), Gather(2, (3,)), Gather(0, (2,))), 3, 2),
        ((Gather(0, (1,)), Gather(1, (2,)), Gather(2, (3,))), 3, 3),
    ],
)
def test_moves_between_other_places_are_at_once(
    schedule: Schedule, transfers: int, steps: int
) -> None:
    assert num_transfers(schedule) == transfers
    assert num_steps(schedule) == steps


def test_a_place_is_taken_out_and_the_order_stays() -> None:
    assert without((3, 1, 2), 1) == (3, 2)
    assert without((3, 2), 1) == (3, 2)
