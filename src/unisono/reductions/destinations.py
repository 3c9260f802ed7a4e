"""Reads destinations as devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.arguments import in_words
from unisono.devices import Device, resolve
from unisono.errors import DestinationError
from unisono.values import DistributedValues


class Destinations(NamedTuple):
    """Where to reduce to, as implementations get it.

    Attributes:
        devices: The devices, in the order of the result's components.
    """

    devices: tuple[Device, ...]


# CPU devices by name. They always exist, and a batch names the same ones many times.
_named: dict[str, Destinations] = {}


def destinations_of(destinations: Any) -> Destinations:
    """Returns the devices that `destinations` means, in order.

    A distributed value or variable means the devices of its components. A tensor means its device,
    which is `cpu:0` for every CPU tensor. A name means itself.
    """
    if type(destinations) is str and destinations in _named:
        return _named[destinations]
    if isinstance(destinations, DistributedValues):
        if not destinations.devices:
            raise DestinationError(
                "`destinations` is a value without components, so it names no device. Pass a "
                "device name, or a value that lives on devices."
            )
        return Destinations(destinations.devices)
    if isinstance(destinations, Destinations):
        return destinations
    if isinstance(destinations, Tensor) and destinations.device.type in ("cpu", "cuda"):
        device = resolve(destinations.device) if destinations.is_cuda else Device("cpu", 0)
        return Destinations((device,))
    if isinstance(destinations, (str, torch.device, Device)) and destinations != "":
        device = resolve(destinations)
        if isinstance(destinations, str) and device.type == "cpu":
            _named[destinations] = Destinations((device,))
        return Destinations((device,))
    raise DestinationError(
        "`destinations` must be a device name, a tensor, a distributed value or a variable, got "
        f"{in_words(destinations)} of type {type(destinations).__name__}. To reduce onto several "
        "devices, pass a value that lives on them; for an all-reduce, pass the value itself."
    )


def listed_destinations(destinations: Any) -> Destinations:
    """Returns the devices that `destinations` means, which may be a list of device names, too."""
    if not isinstance(destinations, (list, tuple)) or isinstance(destinations, Destinations):
        return destinations_of(destinations)
    if not destinations:
        raise DestinationError(
            "`destinations` is an empty list, so it names no device. Name at least one."
        )
    return Destinations(tuple(resolve(device) for device in destinations))
