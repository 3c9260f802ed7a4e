"""Python objects as JSON and the bytes of their tensors, to be sent to other workers.

Unlike a pickle, what arrives cannot run code. Supported are plain values, lists, tuples, dicts,
arrays, tensors, and records: named tuples, dataclasses, attrs classes, enumerations, and subclasses
of list and dict. The class of a record is looked up among the imported modules, and none of its
methods is called.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator, as_bytes, gather_texts
from unisono.errors import CommunicationError, UnsupportedError

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, torch.Size)
}


_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


def write(thing: Any) -> tuple[str, Tensor]:
    """Returns an object as text, and the bytes of its tensors."""
    writer = _Writer()
    written = writer.write(thing)
    flat = [as_bytes(one.cpu().contiguous()) for one in writer.tensors]
    return (
        json.dumps([written, writer.kinds()]),
        torch.cat([torch.empty(0, dtype=torch.uint8), *flat]),
    )


def num_bytes(text: str) -> int:
    """Returns how many bytes the tensors of a written object have."""
    return sum(_DTYPES[name].itemsize * math.prod(shape) for name, *shape in json.loads(text)[1])


def read(text: str, data: Tensor) -> Any:
    """Returns the object that `write` has turned into `text` and `data`."""
    written, kinds = json.loads(text)
    tensors = []
    for name, *shape in kinds:
        size = _DTYPES[name].itemsize * math.prod(shape)
        # Copied, for the alignment of the tensor.
        tensors.append(data[:size].clone().view(_DTYPES[name]).view(shape))
        data = data[size:]
    return _Reader(tensors).read(written)


def share_state(communicator: Communicator, state: Any, root: int) -> Any:
    """Gives all ranks the object of `root`, whose tensors travel one by one and come on the CPU.

    `root` itself gets the same object. If it cannot be sent, all ranks raise an error.
    """
    writer, refusal, written = _Writer(), "", None
    if communicator.rank == root:
        try:
            written = writer.write(state)
        except UnsupportedError as error:
            refusal = f"state{''.join(f'[{key!r}]' for key in writer.place)}: {error}"
    told = gather_texts(communicator, json.dumps([refusal, written, writer.kinds()]))[root]
    refusal, written, kinds = json.loads(told)
    if refusal:
        if communicator.rank == root:
            raise UnsupportedError(refusal)
        raise CommunicationError(f"The state of rank {root} cannot be sent. {refusal}", [root])
    if communicator.rank == root:
        tensors = [one.cpu().contiguous() for one in writer.tensors]
    else:
        tensors = [torch.empty(shape, dtype=_DTYPES[name]) for name, *shape in kinds]
    for tensor in filter(Tensor.numel, tensors):
        communicator.broadcast(as_bytes(tensor), root)
    return state if communicator.rank == root else _Reader(tensors).read(written)


class _Writer:
    """Turns objects into JSON values, and collects their tensors.

    Attributes:
        place: The keys that lead to what is written now, or could not be.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.place: list[Any] = []

    def kinds(self) -> list[Any]:
        return [(str(one.dtype).removeprefix("torch."), *one.shape) for one in self.tensors]

    def _at(self, key: Any, thing: Any) -> Any:
        self.place.append(key)
        written = self.write(thing)
        self.place.pop()
        return written

    def write(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _PLAIN:
            return thing
        if kind in _SEQUENCES.values():
            return [kind.__name__, [self._at(i, one) for i, one in enumerate(thing)]]
        if kind in (dict, defaultdict):
            factory = [] if kind is dict else [self.write(thing.default_factory)]
            items = [[self.write(key), self._at(key, value)] for key, value in thing.items()]
            return [kind.__name__, *factory, items]
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, (np.ndarray, np.generic)):
            return self._array(thing)
        if kind is bytes:
            return ["bytes", thing.decode("latin-1")]
        if kind is complex:
            return ["complex", thing.real, thing.imag]
        if isinstance(thing, type):
            return ["type", *_path(thing)]
        if isinstance(thing, enum.Enum):
            return ["enum", *_path(kind), thing.name]
        return self._record(thing)

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.sparse_coo:
            parts = self._tensor(tensor._indices()), self._tensor(tensor._values())
            return ["sparse", *parts, list(tensor.shape)]
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if not is_dense or tensor.is_quantized or tensor.is_meta:
            raise _unknown(tensor)
        self.tensors.append(tensor.detach().resolve_conj().resolve_neg())
        return ["tensor", len(self.tensors) - 1]

    def _array(self, array: Any) -> Any:
        kind = "array" if isinstance(array, np.ndarray) else "scalar"
        if array.dtype.kind in "biufc":
            # As bytes, because torch lacks some dtypes of NumPy.
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            content = self._tensor(torch.from_numpy(data.copy()))
        elif array.dtype.kind in "USO":
            content = self.write(np.asarray(array).reshape(-1).tolist())
        else:
            raise _unknown(array)
        return [kind, array.dtype.str, list(array.shape), content]

    def _record(self, thing: Any) -> Any:
        kind = type(thing)
        base = _base(kind)
        if base is None:
            raise _unknown(thing)
        content: list[Any] = []
        if base is not object:
            content = list(thing.items() if issubclass(base, dict) else thing)
        return ["record", *_path(kind), self.write(content), self.write(attributes_of(thing))]


class _Reader:
    """Turns back what a `_Writer` has written."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def read(self, written: Any) -> Any:
        if not isinstance(written, list):
            return written
        match written:
            case [("list" | "tuple" | "set" | "frozenset" | "deque" | "Size") as kind, items]:
                return _SEQUENCES[kind](self.read(one) for one in items)
            case ["dict", items]:
                return {self.read(key): self.read(value) for key, value in items}
            case ["defaultdict", factory, items]:
                return defaultdict(self.read(factory), self.read(["dict", items]))
            case ["tensor", number]:
                return self._tensors[number]
            case ["sparse", indices, values, shape]:
                return torch.sparse_coo_tensor(self.read(indices), self.read(values), shape)
            case ["array", dtype, shape, content]:
                return self._array(dtype, shape, self.read(content))
            case ["scalar", dtype, shape, content]:
                return self._array(dtype, shape, self.read(content))[()]
            case ["bytes", text]:
                return text.encode("latin-1")
            case ["complex", real, imag]:
                return complex(real, imag)
            case ["type", module, name]:
                return _class(module, name)
            case ["enum", module, name, member]:
                return enum.EnumMeta.__getitem__(_class(module, name), member)
            case ["record", module, name, content, state]:
                return self._record(_class(module, name), content, state)
        raise UnsupportedError(
            f"Another worker sent an object as {written[:1]}, which this version does not know. "
            "Install the same version of Unisono on every worker."
        )

    @staticmethod
    def _array(dtype: str, shape: list[int], values: Any) -> Any:
        if isinstance(values, Tensor):
            return values.numpy().view(dtype).reshape(shape).copy()
        array = np.empty(len(values), dtype)
        array[:] = values
        return array.reshape(shape)

    def _record(self, kind: Any, content: Any, state: Any) -> Any:
        base = _base(kind)
        if base is None:
            raise _unknown(kind)
        if base is tuple:
            return tuple.__new__(kind, self.read(content))
        made = base.__new__(kind)
        if base is list:
            list.extend(made, self.read(content))
        elif base is not object:
            for key, value in self.read(content):
                base.__setitem__(made, key, value)
        for attribute, value in self.read(state).items():
            object.__setattr__(made, attribute, value)
        return made


def _base(kind: type) -> Any:
    """Returns the content of a record besides its attributes, or None if it is not a record."""
    if hasattr(kind, "__del__"):
        return None
    for base in (OrderedDict, dict, list):
        if issubclass(kind, base):
            return base
    if issubclass(kind, tuple):
        return tuple if hasattr(kind, "_fields") else None
    is_known = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    return object if is_known or issubclass(kind, UserDict) else None


def attributes_of(thing: Any) -> dict[str, Any]:
    """Returns the attributes of an object, also those in slots."""
    names: list[str] = []
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    names = [name for name in names if name not in ("__dict__", "__weakref__")]
    own = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return own | dict(getattr(thing, "__dict__", {}))


def _path(kind: type) -> tuple[str, str]:
    if _found(kind.__module__, kind.__qualname__) is not kind:
        raise _unknown(kind)
    return kind.__module__, kind.__qualname__


def _class(module: str, name: str) -> type:
    found = _found(module, name)
    if not isinstance(found, type):
        raise UnsupportedError(
            f"Another worker sent an object of the class {module}.{name}, which is not imported "
            "here. Import it on every worker."
        )
    return found


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if found is None else vars(found).get(part)
    return found


def _unknown(thing: Any) -> UnsupportedError:
    kind = thing if isinstance(thing, type) else type(thing)
    return UnsupportedError(
        f"An object of {kind.__module__}.{kind.__qualname__} cannot be sent to other workers. Use "
        "numbers, strings, arrays and tensors, in lists, tuples, dicts, named tuples and "
        "dataclasses that a module defines."
    )


def gather_objects(communicator: Communicator, thing: Any) -> list[Any]:
    """Returns the objects of all ranks, by rank. Their tensors are on the host."""
    if communicator.size == 1:
        return [thing]
    refusal = ""
    try:
        text, data = write(thing)
    except UnsupportedError as error:
        refusal, (text, data) = str(error), write(None)
    told = list(map(json.loads, gather_texts(communicator, json.dumps([refusal, text]))))
    for rank, (refused, _) in enumerate(told):
        if refused:
            raise UnsupportedError(f"Worker {rank} cannot go on. {refused}")
    texts = [text for _, text in told]
    has_tensors = any(map(num_bytes, texts))
    gathered = communicator.all_gather(data) if has_tensors else [data] * len(texts)
    return [read(text, data) for text, data in zip(texts, gathered, strict=True)]
