import inspect

import pytest

from unisono import errors

DEFINED = {
    name: thing
    for name, thing in vars(errors).items()
    if inspect.isclass(thing) and thing.__module__ == errors.__name__
}
RAISED = [error for error in DEFINED.values() if error is not errors.UnisonoError]


@pytest.mark.parametrize("error", RAISED)
def test_every_error_is_ours_and_one_that_python_knows(error: type[Exception]) -> None:
    assert issubclass(error, errors.UnisonoError)
    assert issubclass(error, (ValueError, RuntimeError, TimeoutError, IndexError))


@pytest.mark.parametrize(
    "error",
    [
        errors.BatchError,
        errors.DestinationError,
        errors.DeviceError,
        errors.ReplicaMismatchError,
        errors.UnsupportedError,
    ],
)
def test_a_wrong_argument_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_the_base_is_of_no_kind() -> None:
    assert errors.UnisonoError.__bases__ == (Exception,)
