import sys

import pytest

from unisono.kernels import native_core

# The function as it is before its result is kept.
load = native_core.__wrapped__


def test_the_core_is_loaded_once() -> None:
    assert native_core() is native_core()


def test_the_status_says_which_path_is_used() -> None:
    core = native_core()

    assert core.status.startswith("torch: " if core.kernel is None else "native, ")


def test_the_environment_turns_it_off_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNISONO_NATIVE", "0")

    core = load()

    assert core.kernel is None
    assert core.status == "torch: UNISONO_NATIVE=0 turns the native core off"


def test_an_installation_without_the_core_says_so_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_NATIVE", raising=False)
    monkeypatch.setitem(sys.modules, "unisono._native", None)
    monkeypatch.delattr("unisono._native", raising=False)

    core = load()

    assert core.kernel is None
    assert core.status == "torch: Unisono was installed without the native core"


@pytest.mark.usefixtures("path")
def test_both_paths_of_these_tests_are_what_they_say(request: pytest.FixtureRequest) -> None:
    from unisono.kernels import native_core as seen

    assert (seen().kernel is None) == (request.getfixturevalue("path") == "torch")
