"""Whether the replicas of the next run take turns."""

from __future__ import annotations

from unisono.engines.turns import OneByOne, Turns

# A turn that is shorter is over before the threads of the others have got hold of the interpreter.
_SHORT_TURN_S = 1e-3
_FIRST_REST, _LONGEST_REST = 8, 1024


class Pace:
    """Lets replicas take turns as long as their turns are short.

    A turn that is not lets the others go on at once, and the runs that follow are concurrent from
    the start; now and then, and ever more seldom, one of them shows whether turns are short again.
    """

    def __init__(self) -> None:
        self._rest = 0
        self._next_rest = _FIRST_REST

    def turns(self, num_replicas: int) -> Turns:
        """Returns the turns of the next run."""
        if self._rest > 0:
            self._rest -= 1
            return Turns(num_replicas)
        return OneByOne(num_replicas, _SHORT_TURN_S)

    def learn(self, turns: Turns) -> None:
        """After a run: sees whether its turns were short."""
        if not isinstance(turns, OneByOne):
            return
        if turns.is_free:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        else:
            self._next_rest = _FIRST_REST
