"""What TensorFlow answered, asked again of Unisono."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import Json, in_form

import unisono as uo
from unisono.devices import Device
from unisono.packing import group_by_bytes, split_evenly

GOLDEN = Path(__file__).parent / "golden"
REDUCTIONS = ["broadcast", "hierarchical", "one_device", "scenarios", "sparse"]
REFUSALS = {"InvalidArgumentError": ValueError, "ValueError": ValueError}


def golden(names: list[str], wanted: Callable[[Json], bool]) -> pytest.MarkDecorator:
    """Parametrises a test over the recorded cases that are `wanted`."""
    found = [
        pytest.param(case, id=f"{name}:{case['name']}")
        for name in names
        for case in json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
        if wanted(case)
    ]
    return pytest.mark.parametrize("case", found)


def answered(case: Json) -> bool:
    return "fault" not in case and "error" not in case["outcome"]


def refused(case: Json) -> bool:
    return "fault" not in case and "error" in case["outcome"]


@golden(REDUCTIONS, answered)
def test_the_answer_is_that_of_tensorflow(case: Json) -> None:
    assert_outcome(case, case["outcome"])


@golden(REDUCTIONS, refused)
def test_what_tensorflow_refuses_is_refused(case: Json) -> None:
    assert_outcome(case, case["outcome"])


@golden(REDUCTIONS, lambda case: "fault" in case)
def test_a_fault_of_tensorflow_is_not_repeated(case: Json) -> None:
    assert_outcome(case, case["right"])


@golden(["packing"], lambda case: case["method"] == "split")
def test_packs_are_cut_where_tensorflow_cuts_them(case: Json) -> None:
    assert split_evenly(case["elements"], case["num_packs"]) == case["outcome"]["packs"]


@golden(["packing"], lambda case: case["method"] == "group")
def test_tensors_share_a_pack_where_they_do_in_tensorflow(case: Json) -> None:
    assert group_by_bytes(case["sizes"], case["bytes_per_pack"]) == case["outcome"]["packs"]


@golden(["options"], answered)
def test_options_merge_as_in_tensorflow(case: Json) -> None:
    other = case["other"]

    merged = options(case["base"]).merge(None if other is None else options(other))

    assert merged == options(case["outcome"])
    assert merged.implementation.name == case["outcome"]["implementation"]


@golden(["options"], refused)
def test_options_that_tensorflow_refuses_are_refused(case: Json) -> None:
    with pytest.raises(REFUSALS[case["outcome"]["error"]]):
        options(case["base"])


def options(fields: Json) -> uo.experimental.CommunicationOptions:
    return uo.experimental.CommunicationOptions(**fields)


def assert_outcome(case: Json, outcome: Json) -> None:
    if "error" in outcome:
        with pytest.raises(REFUSALS[outcome["error"]]):
            ask(case)
        return
    for result, expected in zip(ask(case), outcome["results"], strict=True):
        assert_result(result, expected)


def assert_result(result: Any, expected: Json) -> None:
    assert isinstance(result, uo.Mirrored) == expected["wrapped"]
    if expected["wrapped"]:
        assert result.devices == tuple(Device.parse(name) for name in slots(expected))
    parts = result.values if expected["wrapped"] else (result,)
    for part in parts:
        assert_component(part, component(expected["each"], expected["shape"], expected["dtype"]))
    assert len(parts) == len(expected["slots"])


def assert_component(part: Any, expected: torch.Tensor) -> None:
    assert part.shape == expected.shape
    assert part.is_sparse == expected.is_sparse
    if expected.is_sparse:
        # Compared as stored: rows in the order of the replicas, duplicates kept.
        torch.testing.assert_close(part._indices(), expected._indices())
        part, expected = part._values(), expected._values()
    torch.testing.assert_close(part, expected, rtol=0, atol=0)


def ask(case: Json) -> list[Any]:
    made = implementation(case["implementation"])
    pairs = [as_pair(pair) for pair in case["pairs"]]
    if case["method"] == "broadcast":
        return [made.broadcast(*pairs[0])]
    reduce_op: Any = getattr(uo.ReduceOp, case["reduce_op"], case["reduce_op"])
    if case["method"] == "reduce":
        return [made.reduce(reduce_op, *pairs[0])]
    return made.batch_reduce(reduce_op, in_form(case.get("form", "list"), pairs))


def implementation(spec: Json) -> uo.CrossDeviceOps:
    arguments = {name: given for name, given in spec.items() if name != "class"}
    if "reduce_to_device" in arguments:
        arguments["reduce_to_device"] = f"/cpu:{arguments['reduce_to_device']}"
    if arguments.get("accumulation_fn") == "max":
        arguments["accumulation_fn"] = lambda parts: torch.stack(list(parts)).amax(0)
    made: uo.CrossDeviceOps = getattr(uo, spec["class"])(**arguments)
    return made


def as_pair(pair: Json) -> tuple[Any, Any]:
    value = as_value(pair["value"])
    where = pair["destinations"]
    return value, value if where["kind"] == "itself" else as_destinations(where)


def as_value(spec: Json) -> Any:
    if spec["kind"] == "list":
        return [float(number) for number in spec["replicas"][0]]
    shapes = spec.get("shapes", [spec["shape"]] * len(spec["replicas"]))
    components = [
        component(replica, shape, spec["dtype"])
        for replica, shape in zip(spec["replicas"], shapes, strict=True)
    ]
    if spec["kind"] == "tensor":
        return components[0]
    container = uo.PerReplica if spec["kind"] == "per_replica" else uo.Mirrored
    return container(components, devices=slots(spec))


def as_destinations(spec: Json) -> Any:
    if spec["kind"] == "raw":
        return spec["raw"]
    if spec["kind"] == "device":
        return slots(spec)[0]
    # A CPU tensor of PyTorch does not know its slot, so what is one tensor or variable in
    # TensorFlow is a value of one component here.
    container = uo.PerReplica if spec["kind"] == "per_replica" else uo.Mirrored
    return container([torch.zeros(()) for _ in spec["slots"]], devices=slots(spec))


def slots(spec: Json) -> list[str]:
    return [f"/cpu:{slot}" for slot in spec["slots"]]


def component(numbers: Any, shape: list[int], dtype: str) -> torch.Tensor:
    if isinstance(numbers, list):
        return dense(numbers, shape, dtype)
    rows = dense(numbers["values"], [len(numbers["indices"]), *shape[1:]], dtype)
    indices = torch.tensor([numbers["indices"]], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, rows, shape, check_invariants=True)


def dense(numbers: list[Any], shape: list[int], dtype: str) -> torch.Tensor:
    if dtype == "complex64":
        numbers = [complex(real, imaginary) for real, imaginary in numbers]
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
