"""What the hooks of an elastic job keep, also on workers that do not run them.

At the end of a run, each worker gives an equal part of what its replicas keep to each other worker.
If a worker is lost, the others put the parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.reductions import Workers
from unisono.reductions.wire import num_bytes, read, write

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

    `numbers` are the workers, by rank, and `ranges` their replicas.
    """
    written = [write(content) for content in own.values()]
    texts = Workers(communicator).gather_objects([text for text, _ in written])
    data = torch.cat([torch.empty(0, dtype=torch.uint8), *(one for _, one in written)])
    size, rank = communicator.size, communicator.rank
    most = max(sum(map(num_bytes, of_worker)) for of_worker in texts)
    parts = [torch.empty(0, dtype=torch.uint8)] * size
    if size > 1 and most > 0:
        room = -(-most // (size - 1))
        padded = torch.zeros((size - 1) * room, dtype=torch.uint8)
        padded[: len(data)] = data
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
    """Returns what the hooks of all replicas keep, or None if that is nothing. All workers call it.

    `kept` is what this worker has. Raises if several workers were lost at once.
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
        total = sum(num_bytes(texts[replica]) for replica in missing)
        if total and not set(others) <= parts.keys():
            raise UnsupportedError(
                "Several workers were lost at once, and only they had what the communication hook "
                f"keeps for replica {missing[0]}. Start again from a checkpoint."
            )
        nothing = torch.empty(0, dtype=torch.uint8)
        data = torch.cat([parts[other] for other in others]) if total else nothing
        for replica in missing:
            found[replica] = read(texts[replica], data)
            data = data[num_bytes(texts[replica]) :]
    return found or None
