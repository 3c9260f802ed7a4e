"""Records what TensorFlow answers into `golden/`. Needs TensorFlow: `python record_golden.py`."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import golden_cases as cases
import golden_scenarios as scenarios
from golden_cases import NUM_SLOTS, Json, in_form

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]
from tensorflow.python.distribute import (  # type: ignore[import-untyped]
    cross_device_ops,
    cross_device_utils,
    values,
)

GOLDEN = Path(__file__).parent / "golden"
FILES: dict[str, Callable[[], Iterator[Json]]] = {
    "broadcast": cases.broadcast_cases,
    "hierarchical": cases.hierarchical_cases,
    "one_device": cases.one_device_cases,
    "options": cases.options_cases,
    "packing": cases.packing_cases,
    "scenarios": scenarios.scenario_cases,
    "sparse": cases.sparse_cases,
}


def main() -> None:
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    slots = [tf.config.LogicalDeviceConfiguration()] * NUM_SLOTS
    tf.config.set_logical_device_configuration(cpu, slots)
    for name, questions in FILES.items():
        write(GOLDEN / f"{name}.json", [answered(case) for case in questions()])


def write(path: Path, answers: list[Json]) -> None:
    names = [answer["name"] for answer in answers]
    assert len(set(names)) == len(names), f"{path.name} names a case twice"
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    path.write_text(f'{{"tensorflow":"{tf.__version__}","cases":[\n{lines}\n]}}\n')


def answered(case: Json) -> Json:
    """`case` with TensorFlow's outcome, and where that is a fault, with the right one."""
    outcome = attempt(case)
    if "fault" not in case:
        if case.get("implementation", {}).get("class") == "HierarchicalCopyAllReduce":
            assert outcome == right_outcome(case, "one_device") or "error" in outcome, case["name"]
        return case | {"outcome": outcome}
    right = right_outcome(case, case["right"])
    assert outcome != right, f"{case['name']} is marked as a fault and is none"
    return case | {"outcome": outcome, "right": right}


def right_outcome(case: Json, right: str | Json) -> Json:
    if isinstance(right, dict):
        return right
    made: Json = {"class": "ReductionToOneDevice"}
    if right == "one_device":
        return attempt(case | {"implementation": made})
    # Sent from elsewhere, a single value takes no shortcut and is divided as it should be.
    pairs = []
    for pair in case["pairs"]:
        slots = pair["value"]["slots"]
        away = pair["value"] | {"slots": [slot + 1 for slot in slots]}
        pairs.append({"value": away, "destinations": cases.at(*slots)})
    return attempt(case | {"implementation": made, "pairs": pairs})


def attempt(case: Json) -> Json:
    try:
        return run(case)
    except Exception as error:
        return {"error": type(error).__name__}


def run(case: Json) -> Json:
    if "base" in case:
        return merge(case["base"], case["other"])
    if case["method"] in ("split", "group"):
        return {"packs": split(case) if case["method"] == "split" else group(case)}
    made = implementation(case["implementation"])
    pairs = [as_pair(pair) for pair in case["pairs"]]
    if case["method"] == "broadcast":
        return {"results": [described(made.broadcast(*pairs[0]))]}
    op = getattr(tf.distribute.ReduceOp, case["reduce_op"], case["reduce_op"])
    if case["method"] == "reduce":
        return {"results": [described(made.reduce(op, *pairs[0]))]}
    results = made.batch_reduce(op, in_form(case.get("form", "list"), pairs))
    return {"results": [described(result) for result in results]}


def implementation(spec: Json) -> Any:
    arguments = {name: given for name, given in spec.items() if name != "class"}
    if "reduce_to_device" in arguments:
        arguments["reduce_to_device"] = f"/cpu:{arguments['reduce_to_device']}"
    if arguments.get("accumulation_fn") == "max":
        arguments["accumulation_fn"] = lambda parts: tf.reduce_max(tf.stack(parts), axis=0)
    return getattr(tf.distribute, spec["class"])(**arguments)


def as_pair(pair: Json) -> tuple[Any, Any]:
    value = as_value(pair["value"])
    where = pair["destinations"]
    return value, value if where["kind"] == "itself" else as_destinations(where)


def as_value(spec: Json) -> Any:
    if spec["kind"] == "list":
        return [float(number) for number in spec["replicas"][0]]
    if spec["kind"] == "mirrored_variable":
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{slot}" for slot in spec["slots"]])
        with strategy.scope():
            return tf.Variable(as_tensor(spec["replicas"][0], spec["shape"], spec["dtype"]))
    shapes = spec.get("shapes", [spec["shape"]] * len(spec["slots"]))
    components = []
    for slot, shape, replica in zip(spec["slots"], shapes, spec["replicas"], strict=True):
        with tf.device(f"/cpu:{slot}"):
            components.append(as_component(replica, shape, spec["dtype"]))
    if spec["kind"] == "tensor":
        return components[0]
    return {"per_replica": values.PerReplica, "mirrored": values.Mirrored}[spec["kind"]](components)


def as_component(replica: Any, shape: list[int], dtype: str) -> Any:
    if isinstance(replica, list):
        return as_tensor(replica, shape, dtype)
    row_shape = [len(replica["indices"]), *shape[1:]]
    part = as_tensor(replica["values"], row_shape, dtype)
    indices = tf.identity(tf.constant(replica["indices"], tf.int64))
    return tf.IndexedSlices(part, indices, tf.identity(tf.constant(shape, tf.int64)))


def as_tensor(numbers: list[Any], shape: list[int], dtype: str) -> Any:
    if dtype == "complex64":
        numbers = [complex(real, imaginary) for real, imaginary in numbers]
    array = np.array(numbers, tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
    return tf.identity(tf.constant(array))


def as_destinations(spec: Json) -> Any:
    if spec["kind"] == "raw":
        return spec["raw"]
    if spec["kind"] == "device":
        return f"/cpu:{spec['slots'][0]}"
    places = []
    for slot in spec["slots"]:
        with tf.device(f"/cpu:{slot}"):
            zero = tf.identity(tf.constant(0.0))
            places.append(tf.Variable(zero) if spec["kind"] == "variable" else zero)
    if spec["kind"] in ("tensor", "variable"):
        return places[0]
    return {"per_replica": values.PerReplica, "mirrored": values.Mirrored}[spec["kind"]](places)


def described(result: Any) -> Json:
    wrapped = isinstance(result, values.DistributedValues)
    assert not wrapped or isinstance(result, values.Mirrored)
    parts = result.values if wrapped else [result]
    replicas = [numbers_of(part) for part in parts]
    slots = [int(part.device.rsplit(":", 1)[1]) for part in parts]
    answer: Json = {"wrapped": wrapped, "dtype": parts[0].dtype.name}
    answer |= {"shape": tf.convert_to_tensor(parts[0]).shape.as_list(), "slots": slots}
    assert all(replica == replicas[0] for replica in replicas), "not one value all over"
    return answer | {"each": replicas[0]}


def numbers_of(part: Any) -> Any:
    if isinstance(part, tf.IndexedSlices):
        return {"indices": part.indices.numpy().tolist(), "values": numbers_of(part.values)}
    array = part.numpy().ravel()
    if np.iscomplexobj(array):
        return [[plain(number.real), plain(number.imag)] for number in array]
    return [plain(number) for number in array]


def plain(number: Any) -> int | float:
    exact = float(number)
    return int(exact) if exact.is_integer() else exact


def merge(base: Json, other: Json | None) -> Json:
    options = tf.distribute.experimental.CommunicationOptions
    merged = options(**base).merge(None if other is None else options(**other))
    return {
        "bytes_per_pack": merged.bytes_per_pack,
        "timeout_seconds": merged.timeout_seconds,
        "implementation": merged.implementation.value,
    }


def split(case: Json) -> list[int]:
    """The sizes of the packs that a vector is cut into."""
    packer = cross_device_ops._ConcatAndSplitPacker(case["num_packs"])
    gradients = [[(tf.zeros([case["elements"]]), None)]]
    return [int(tf.size(pack[0])) for pack in packer.pack(gradients)[0]]


def group(case: Json) -> list[list[int]]:
    """The indices of the tensors that share a pack."""
    tensors = [tf.zeros([size], tf.uint8) for size in case["sizes"]]
    positions = {id(tensor): position for position, tensor in enumerate(tensors)}
    packs = cross_device_utils.group_by_size(tensors, case["bytes_per_pack"])
    return [[positions[id(tensor)] for tensor in pack] for pack in packs]


if __name__ == "__main__":
    main()
