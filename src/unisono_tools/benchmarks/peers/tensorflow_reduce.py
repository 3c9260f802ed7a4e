"""TensorFlow's reduction to one device, timed on request: a co-process for the benchmarks.

Reads one JSON object a line, `{"sizes": [...], "replicas": R, "into": "one" | "all", "repeats": N}`
(the elements of each float32 tensor; N is 20 unless said), and answers each with a line
`{"eager_s": ..., "graph_s": ...}`: the median seconds of a batch_reduce of the tensors over R
logical CPU devices, run eagerly and inside a tf.function. Ends with its input.
Needs TensorFlow.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf  # type: ignore[import-untyped]
from tensorflow.core.function.capture import capture_container  # type: ignore[import-untyped]
from tensorflow.python.distribute import values  # type: ignore[import-untyped]

NUM_DEVICES = 16
NUM_WARM_UPS = 3


def main() -> None:
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    tf.config.set_logical_device_configuration(cpu, devices)
    # A tf.function makes constants of the small tensors that it captures, and then sums them only
    # once. Captured they must be: as arguments, hundreds of tensors cost more than their sums.
    capture_container._EAGER_CONST_THRESHOLD = -1
    for line in sys.stdin:
        request = json.loads(line)
        case = prepared(tuple(request["sizes"]), request["replicas"], request["into"])
        seconds = [median_s(call, request.get("repeats", 20)) for call in case]
        print(json.dumps({"eager_s": seconds[0], "graph_s": seconds[1]}), flush=True)


@lru_cache(maxsize=1)
def prepared(
    sizes: tuple[int, ...], num_replicas: int, into: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same reduction twice, eager and traced, warm; kept while the requests stay the same."""
    ops = tf.distribute.ReductionToOneDevice()
    batch = [values.PerReplica(tensors(size, num_replicas)) for size in sizes]
    pairs = [(value, value if into == "all" else "/cpu:0") for value in batch]

    def eager() -> Any:
        results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
        # A Mirrored may not leave a tf.function outside a strategy; its tensors may.
        return [getattr(result, "values", result) for result in results]

    graph = tf.function(eager)
    for call in (eager, graph):
        median_s(call, NUM_WARM_UPS)
    return eager, graph


def tensors(size: int, num_replicas: int) -> list[Any]:
    """One tensor per device."""
    made = []
    for replica in range(num_replicas):
        with tf.device(f"/cpu:{replica}"):
            made.append(tf.identity(tf.fill([size], float(replica + 1))))
    return made


def median_s(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = call()
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
        # Freed outside of the time that is counted.
        del results
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
