"""Captured work of replicas on CPUs: one function for each replica, which needs no Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.functions.recording import CallEach, Graphs, Logs, Part
from unisono.functions.script import Script, UnscriptableError
from unisono.functions.tape import Call, Made, Noting, Number, Tape, bytes_of
from unisono.functions.watching import Watching
from unisono.modules import fit_for_training
from unisono.torch_private import without_dispatch_modes
from unisono.values import is_sparse, parts_of

_aten = torch.ops.aten
_POISON = 0xAA
# To copy so many bytes takes no longer than to give a tensor other memory.
_FEW_BYTES = 4096
# How often memory is counted as used if one tensor uses it.
_ALONE: int = torch._C._storage_Use_Count(torch.empty(1).untyped_storage()._cdata)


class _Target(NamedTuple):
    """A tensor that is to have a value after every replay, by `set_` or by `copy_`."""

    tensor: Tensor
    number: Number
    operator: Any


class Again:
    """A function that does again what a tape has noted."""

    def __init__(self, tape: Tape, targets: Sequence[_Target]) -> None:
        self._script = Script()
        self._tape = tape
        self._values: dict[int, Any] = {}
        self._arguments: list[Any] = []
        inputs = [self._argument(one.tensor) for one in targets]
        self.moving = [one.tensor for one in targets if one.operator is not _aten.copy_.default]
        for target, given in zip(targets, inputs, strict=True):
            if target.operator is not _aten.copy_.default:
                # The memory of the last replay is free for this one.
                self._script.call(_aten.set_.default, [given])
        for call in _needed(tape.calls, {target.number for target in targets}):
            if call.operator is _aten.detach.default and not tape.reshapes:
                # Here it is the same tensor.
                self._values[call.results[0]] = self._given(call.args[0])
                continue
            self._script.set_grad_enabled(call.is_grad_enabled)
            results = self._script.call(call.operator, list(map(self._given, call.args)))
            for number, value in zip(call.results, results, strict=False):
                self._bind(number, value)
        for (_, number, operator), given in zip(targets, inputs, strict=True):
            is_copy = operator is _aten.copy_.default
            self._script.call(operator, [given, self._given(number), *[False] * is_copy])
        self._run = self._script.finish()
        # Whether it writes to what was there before, so that it must not be done twice.
        self.writes = bool(tape.written)

    def __call__(self) -> None:
        """Does it again."""
        self._run(self._arguments)

    def _given(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return list(map(self._given, arg))
        if not isinstance(arg, Number):
            return arg
        if arg not in self._values:
            self._values[arg] = self._argument(self._tape.given[arg])
        return self._values[arg]

    def _argument(self, value: Any) -> Any:
        self._arguments.append(value)
        return self._script.input(is_generator=isinstance(value, torch.Generator))

    def _bind(self, number: Any, value: Any) -> None:
        if isinstance(number, list):
            parts = self._script.unpack(value, len(number))
            self._values.update(zip(number, parts, strict=True))
        elif number is not None:
            # What is changed in place keeps its value.
            self._values.setdefault(number, value)


def _needed(calls: Sequence[Call], wanted: set[Number]) -> list[Call]:
    """Returns the calls without those of which nothing comes."""
    kept = []
    for call in reversed(calls):
        if call.does_more or not wanted.isdisjoint(_numbers(call.results)):
            wanted.update(_numbers(call.args))
            kept.append(call)
    return kept[::-1]


def _numbers(args: Iterable[Any]) -> Iterator[Number]:
    for arg in args:
        if isinstance(arg, Number):
            yield arg
        elif isinstance(arg, list):
            yield from _numbers(arg)


def _targets(tape: Tape, held: Iterable[Tensor] | None) -> list[_Target]:
    """Returns what has to be given the memory, or the values, that a replay makes again."""
    made = {key: one for key, one in tape.storages.items() if one and not one.storage.expired()}
    if held is not None:
        parts = (part for one in held for part in parts_of(one))
        wanted = {one.untyped_storage()._cdata for one in parts if one.layout is torch.strided}
        made = {key: one for key, one in made.items() if key in wanted}
    tensors: dict[int, list[tuple[Tensor, Number]]] = {key: [] for key in made}
    for tensor, number in tape.numbers.items():
        key = tensor.untyped_storage()._cdata
        if key in tensors:
            tensors[key].append((tensor, number))
    return [_target(tape, key, one, tensors[key]) for key, one in made.items()]


def _target(tape: Tape, key: int, made: Made, tensors: Sequence[tuple[Tensor, Number]]) -> _Target:
    is_alone = len(tensors) == 1 and torch._C._storage_Use_Count(key) == _ALONE
    if is_alone and tensors[0][0].nbytes > _FEW_BYTES:
        # Nobody else knows this memory, so the tensor can have another one.
        return _Target(*tensors[0], _aten.set_.source_Tensor)
    storage = torch.UntypedStorage._new_with_weak_ptr(made.storage.cdata)
    whole = torch.empty(0, dtype=made.dtype).set_(storage, made.layout[2], *made.layout[:2])
    number = Number(made.number)
    if tape.reshapes:
        number = tape.seen_as(made, whole)
    return _Target(whole, number, _aten.copy_.default)


def again(
    tape: Tape, held: Iterable[Tensor] | None, copies: Iterable[tuple[Tensor, Tensor]]
) -> Again | None:
    """Returns a function that gives the same bits as a tape; None if nothing would come of it.

    Args:
        tape: What a replica has done.
        held: The tensors whose memory is read afterwards; None for all that is alive.
        copies: Tensors of the replica, each with one that is to have the same values.

    Raises:
        UnscriptableError: If there is no such function.
    """
    with without_dispatch_modes(), fit_for_training():
        targets = _targets(tape, held)
        targets += [_Target(copy, tape.number_of(own), _aten.copy_.default) for own, copy in copies]
        if not targets and not any(call.does_more for call in tape.calls):
            return None
        function = _written(tape, targets)
        if not _gives_same_bits(function, tape, targets):
            raise UnscriptableError(
                "something that torch does not show takes part in it, such as compiled code or "
                "`torch.set_rng_state`: its operators alone give other results"
            )
    return function


def _written(tape: Tape, targets: Sequence[_Target]) -> Again:
    try:
        return Again(tape, targets)
    except UnscriptableError:
        raise
    except Exception as error:
        # torch has said that it will give up TorchScript. Nothing has happened yet.
        message = str(error).partition("\n")[0]
        reason = f"TorchScript of torch {torch.__version__} fails: {message}"
        raise UnscriptableError(reason) from error


def _gives_same_bits(function: Again, tape: Tape, targets: Sequence[_Target]) -> bool:
    """Does it again, from the beginning, and returns whether all ends as it did."""
    seen = [held for held, _ in tape.written.values()] + [one.tensor for one in targets]
    ends = [one.clone() for one in seen]
    generator, state_before = tape.state
    state = generator.get_state()
    for held, before in tape.written.values():
        held.copy_(before)
    if tape.has_drawn:
        # Other threads may draw from it meanwhile.
        generator.set_state(state_before)
    for target in targets:
        bytes_of(target.tensor.untyped_storage()).fill_(_POISON)
    try:
        function()
        ends_there = not tape.has_drawn or torch.equal(generator.get_state(), state)
        if ends_there and all(map(_have_same_bits, seen, ends)):
            return True
    except RuntimeError:
        pass
    for one, end in zip(seen, ends, strict=True):
        one.detach().copy_(end)
    if tape.has_drawn:
        generator.set_state(state)
    return False


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    first, second = (x.detach().contiguous().flatten().view(torch.uint8) for x in (one, other))
    is_alike = one.shape == other.shape and one.dtype is other.dtype
    return is_alike and torch.equal(first, second)


@dataclass(eq=False)
class _Functions(Part):
    """What the replicas do between two calls of Python."""

    each: Sequence[Callable[[], None]]
    call_each: CallEach
    # Whether nothing of it can be seen if it fails halfway.
    is_pure: bool

    def replay(self) -> None:
        """Lets all replicas do it again, at the same time."""
        if len(self.each) == 1:
            self.each[0]()
        else:
            self.call_each(self.each)


class CpuGraphs(Graphs):
    """Captures one run of replicas on CPUs, or only looks whether it can be captured."""

    is_apart = is_on_host = True

    def __init__(
        self,
        generators: Sequence[torch.Generator | None],
        call_each: CallEach,
    ) -> None:
        super().__init__()
        self._generators = generators
        self.call_each = call_each
        self._modes = [Noting() for _ in generators]  # type: ignore[no-untyped-call]
        # For each replica, results, and where they are after every replay.
        self._copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in generators]
        # Tensors that get other memory in every replay.
        self._moving: list[Tensor] = []

    def refuse(self, reason: str) -> None:
        """Notes why the run cannot be captured; the first reason counts. The run goes on."""
        if reason and not self.reason:
            self.reason = reason
            for mode in self._modes:
                mode.tape = None

    @contextmanager
    def on_replica(self, replica_id: int) -> Iterator[None]:
        """Within the block, what this thread does is noted."""
        noting = self._modes[replica_id]
        watching = Watching(self.refuse, noting, self.named)
        with noting, watching:
            yield

    def begin(self) -> None:
        """Begins a part."""
        if not self.reason:
            for mode, generator in zip(self._modes, self._generators, strict=True):
                mode.tape = Tape(generator, self.refuse)

    def end(self) -> list[Tape]:
        """Ends a part, and returns what the replicas have noted."""
        tapes = [mode.tape for mode in self._modes if mode.tape is not None]
        for mode in self._modes:
            mode.tape = None
        self.logs.append([tape.log for tape in tapes])
        self.has_drawn |= any(tape.has_drawn for tape in tapes)
        self.written.update(*(tape.written for tape in tapes))
        return tapes

    def finish(self, held: Sequence[Tensor] | None = None) -> _Functions | None:
        """Ends a part, and returns what does it again, if something comes of it."""
        each: list[Again | None] = []
        for tape, copies in zip(self.end(), self._copies, strict=False):
            try:
                each.append(again(tape, held, copies))
            except UnscriptableError as error:
                self.refuse(str(error))
                return None
        found = [one for one in each if one is not None]
        self._moving += [tensor for one in found for tensor in one.moving]
        if not found:
            return None
        is_pure = not any(one.writes for one in found)
        alone = [found[0]] if len(found) == 1 else [one or _do_nothing for one in each]
        return _Functions(alone, self.call_each, is_pure)

    def attempt(self, work: Callable[[], Any]) -> tuple[Any, _Functions | None]:
        """Does some work as a part; returns its result and the part, if it can be captured."""
        reason, num_logs = self.reason, len(self.logs)
        self.begin()
        result = work()
        part = self.finish()
        self.reason = reason
        del self.logs[num_logs:]
        return result, part

    def kept(self, tensor: Tensor) -> Tensor:
        """Returns where a result of the run is after every replay.

        The tensor itself is the program's own, which a replay does not change.
        """
        if is_sparse(tensor):
            self.refuse("it returns a sparse tensor; return a dense one")
            return tensor
        moving = {one.untyped_storage()._cdata for one in self._moving}
        key = tensor.untyped_storage()._cdata
        for mode, copies in zip(self._modes, self._copies, strict=True):
            tape = mode.tape
            if tape is None or tensor not in tape.numbers:
                continue
            if tape.storages[key] is not None or key in moving:
                copy = tensor.detach().clone()
                copies.append((tensor, copy))
                return copy
        return tensor


def _do_nothing() -> None:
    pass


def difference(first: Logs, second: Logs) -> str:
    """Says where two runs called different operators; empty if they did not."""
    pairs = [
        pair
        for parts in _pairs(first, second)
        for logs in _pairs(*parts)
        for pair in zip_longest(*logs)
        if pair[0] != pair[1]
    ]
    if not pairs:
        return ""
    one, other = pairs[0]
    before, now = (x[0] if x else "nothing" for x in (one, other))
    return f"it does not do the same every time: {before}, then {now}, at {(other or one)[1]}"


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip_longest(first, second, fillvalue=()))
