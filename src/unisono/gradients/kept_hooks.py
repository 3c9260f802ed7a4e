"""What the hooks of an elastic job keep, also on workers that do not run them.

At the end of a run, each worker gives an equal part of what its replicas keep to each other worker.
If a worker is lost, the others put the parts together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.reductions import Workers
from unisono.reductions.wire import Reader, Writer

# By the number of a replica, what its hook keeps; see `unisono.hooks.contents`.
Contents = dict[int, Any]


class Kept(NamedTuple):
    """What a worker has of what hooks keep between two runs.

    Attributes:
        own: By replica, what it keeps.
        texts: By replica, the same without the bytes of tensors; of all replicas.
        parts: By the number of another worker, a part of the bytes of what its replicas keep.
        replicas: By the number of a worker, its replicas. Empty if `own` has all replicas.
    """

    own: Contents
    texts: list[str]
    parts: dict[int, Tensor]
    replicas: dict[int, range]

    @classmethod
    def of_all(cls, contents: Contents) -> Kept:
        """What a worker has that knows what all replicas keep."""
        return cls(contents, [], {}, {})


def told(
    communicator: Communicator, numbers: Sequence[int], ranges: Sequence[range], own: Contents
) -> Kept:
    """Gives other workers what the replicas of this worker keep. All workers call it.

    Args:
        communicator: Connects the workers.
        numbers: Their numbers, by rank.
        ranges: Their replicas.
        own: What those of this worker keep.
    """
    data: list[Tensor] = []
    written = json.dumps([_text(content, data) for content in own.values()]).encode()
    rows = communicator.all_gather(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    texts = [json.loads(row.numpy().tobytes()) for row in rows]
    size, rank = communicator.size, communicator.rank
    most = max(sum(map(_num_bytes, of_worker)) for of_worker in texts)
    parts = [torch.empty(0, dtype=torch.uint8)] * size
    if size > 1 and most > 0:
        room = -(-most // (size - 1))
        padded = torch.zeros((size - 1) * room, dtype=torch.uint8)
        torch.cat([padded[:0], *data], out=padded[: sum(map(len, data))])
        given = list(padded.split(room))
        # A worker need not give itself a part.
        given.insert(rank, torch.zeros_like(given[0]))
        parts = communicator.all_to_all(torch.cat(given))
    of_all = [text for of_worker in texts for text in of_worker]
    parts_of = dict(zip(numbers, parts, strict=True))
    return Kept(own, of_all, parts_of, dict(zip(numbers, ranges, strict=True)))


def exchanged(
    communicator: Communicator, numbers: Sequence[int], kept: Kept | None
) -> Contents | None:
    """Returns what the hooks of all replicas keep. All workers call it.

    Args:
        communicator: Connects the workers.
        numbers: Their numbers, by rank.
        kept: What this one has; None if that is nothing.

    Returns:
        None if no hook keeps something yet.

    Raises:
        UnsupportedError: If several workers were lost at once.
    """
    mine: Any = None
    if kept is not None:
        parts = {number: one for number, one in kept.parts.items() if number not in numbers}
        replicas = {number: (own.start, own.stop) for number, own in kept.replicas.items()}
        mine = kept.own, kept.texts, parts, replicas
    found: Contents = {}
    lost: dict[int, dict[int, Tensor]] = {}
    texts: list[str] = []
    replicas = {}
    for number, one in zip(numbers, Workers(communicator).gather_objects(mine), strict=True):
        if one is not None:
            own, its_texts, parts, its_replicas = one
            found |= own
            texts, replicas = its_texts or texts, its_replicas or replicas
            for other, part in parts.items():
                lost.setdefault(other, {})[number] = part
    for number, parts in lost.items():
        missing = [replica for replica in range(*replicas[number]) if replica not in found]
        others = [other for other in replicas if other != number]
        if missing and not set(others) <= parts.keys():
            raise UnsupportedError(
                "Several workers were lost at once, and only they had what the communication hook "
                f"keeps for replica {missing[0]}. Start again from a checkpoint."
            )
        data = torch.cat([parts[other] for other in others]) if missing else torch.empty(0)
        for replica in missing:
            num_bytes = _num_bytes(texts[replica])
            found[replica] = _read(texts[replica], data[:num_bytes])
            data = data[num_bytes:]
    return found or None


def _text(content: Any, data: list[Tensor]) -> str:
    """Returns what a replica keeps as JSON, and adds the bytes of its tensors to `data`."""
    writer = Writer()
    written = writer.write(content)
    kinds = [(str(one.dtype).removeprefix("torch."), *one.shape) for one in writer.tensors]
    flat = [one.detach().cpu().contiguous().view(-1) for one in writer.tensors]
    data += [one.view(torch.uint8) for one in flat]
    return json.dumps([written, kinds])


def _num_bytes(text: str) -> int:
    _, kinds = json.loads(text)
    return sum(getattr(torch, name).itemsize * math.prod(shape) for name, *shape in kinds)


def _read(text: str, data: Tensor) -> Any:
    """Returns what a replica keeps, of which this is the text, and these are the bytes."""
    written, kinds = json.loads(text)
    tensors = []
    for name, *shape in kinds:
        dtype = getattr(torch, name)
        num_bytes = dtype.itemsize * math.prod(shape)
        # Copied, for the alignment of the tensor.
        tensors.append(data[:num_bytes].clone().view(dtype).view(shape))
        data = data[num_bytes:]
    return Reader(tensors).read(written)
