"""The state of a job, on its way to workers that have none: tensors as bytes, the rest as JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.communicators.communicator import as_bytes
from unisono.errors import CommunicationError, UnsupportedError

_PLAIN = (str, int, float, bool, type(None))


def share_state(communicator: Communicator, state: Any, root: int) -> Any:
    """Gives all ranks the state of one. All ranks call it.

    Args:
        state: On `root`, dicts, lists, tuples, plain values, bytes and dense tensors, in any depth.
            Nowhere else is it looked at.

    Returns:
        On `root`, `state` itself; elsewhere a copy, with tensors on the CPU, of the same bits.

    Raises:
        UnsupportedError: On `root`, if something in the state cannot be sent.
        CommunicationError: Elsewhere, in that case; on all ranks if one is lost.
    """
    tensors: list[Tensor] = []
    refusal: UnsupportedError | None = None
    text = ""
    if communicator.rank == root:
        try:
            text = json.dumps([True, _packed(state, tensors, "state")])
        except UnsupportedError as error:
            refusal, text = error, json.dumps([False, str(error)])
    is_good, packed = json.loads(_shared_text(communicator, text, root))
    if refusal is not None:
        raise refusal
    if not is_good:
        raise CommunicationError(f"The state of rank {root} cannot be sent. {packed}", [root])
    if communicator.rank == root:
        for tensor in filter(Tensor.numel, tensors):
            communicator.broadcast(as_bytes(tensor.cpu().contiguous()), root)
        return state
    return _unpacked(packed, communicator, root)


def _shared_text(communicator: Communicator, text: str, root: int) -> str:
    size = torch.tensor([len(text)])
    communicator.broadcast(size, root)
    # JSON is ASCII.
    sent = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) if text else None
    data = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
    communicator.broadcast(data, root)
    return bytes(data.tolist()).decode("ascii")


def _packed(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Returns a value for JSON, and puts its tensors aside."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise UnsupportedError(
                f"{where} is a tensor that is not dense ({value.layout}, {value.dtype}). Make it "
                "dense before it is sent to new workers."
            )
        tensors.append(value.resolve_conj().resolve_neg())
        return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in _PLAIN:
        return {"f": value.hex()} if isinstance(value, float) else value
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        pairs = [
            (_packed(key, tensors, where), _packed(one, tensors, f"{where}[{key!r}]"))
            for key, one in value.items()
        ]
        return {"d": pairs}
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "u"
        return {kind: [_packed(one, tensors, f"{where}[{n}]") for n, one in enumerate(value)]}
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}, which cannot be sent to new workers. Use dicts, "
        "lists, tuples, numbers, texts, bytes and tensors."
    )


def _unpacked(packed: Any, communicator: Communicator, root: int) -> Any:
    """Returns what was packed, and receives its tensors in the order in which they come."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "t":
        name, shape = content
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        if tensor.numel():
            communicator.broadcast(as_bytes(tensor), root)
        return tensor
    if kind == "f":
        return float.fromhex(content)
    if kind == "b":
        return base64.b64decode(content)
    if kind == "d":
        return {
            _unpacked(key, communicator, root): _unpacked(one, communicator, root)
            for key, one in content
        }
    items = [_unpacked(one, communicator, root) for one in content]
    return items if kind == "l" else tuple(items)
