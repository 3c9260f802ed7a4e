from __future__ import annotations

from typing import Any

import pytest
from torch import distributed
from torch._C._distributed_c10d import HashStore

import unisono_autoload
from unisono.backend import process_group
from unisono.errors import UnsupportedError


def test_torch_is_told_once_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def register_backend(name: str, *_: Any, **__: Any) -> None:
        # torch 2.6 refuses a name that it has.
        assert not hasattr(distributed.Backend, name.upper())
        monkeypatch.setattr(distributed.Backend, name.upper(), name, raising=False)
        names.append(name)

    monkeypatch.delattr(distributed.Backend, "UNISONO", raising=False)
    monkeypatch.setattr(distributed.Backend, "register_backend", register_backend)

    unisono_autoload.register()
    unisono_autoload.register()

    assert names == ["unisono"]


def test_a_torch_that_forgets_what_groups_return_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "fits_torch", lambda: False)

    with pytest.raises(UnsupportedError, match=r'needs torch 2\.7 or newer.*backend "gloo"'):
        distributed.init_process_group("unisono", store=HashStore(), rank=0, world_size=1)
    assert not distributed.is_initialized()
