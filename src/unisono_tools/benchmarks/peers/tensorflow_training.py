"""TensorFlow's MirroredStrategy in graph mode, stepped on request: a co-process for the benchmarks.

Its argument is the number of replicas. Every line that it reads is a JSON object: `{"case": NAME,
"batch_size": N}` builds and traces a case, and `{"steps": N}` takes steps of it. It answers both
with a line `{"loss": ...}`, the loss of the last step. It ends with its input. Needs TensorFlow.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf  # type: ignore[import-untyped]

NUM_REPLICAS = int(sys.argv[1])
NUM_CLASSES = 10
NUM_WARM_UPS = 3

layers = tf.keras.layers


def main() -> None:
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
    tf.config.set_logical_device_configuration(cpu, devices)
    # One for all cases: the collectives of a second strategy would meet those of the first.
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(NUM_REPLICAS)])
    step: Callable[[], Any] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            step = prepared(strategy, request["case"], request["batch_size"])
        assert step is not None
        for _ in range(request.get("steps", NUM_WARM_UPS)):
            loss = step()
        print(json.dumps({"loss": float(loss)}), flush=True)


def prepared(strategy: Any, case: str, batch_size: int) -> Callable[[], Any]:
    """Builds a case under a strategy, and returns one step of it as a graph."""
    with strategy.scope():
        model = MODELS[case]()
        momentum = 0.0 if case == "Embedding" else 0.9
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.01, momentum=momentum)
        # A tf.function that makes variables fails on two logical CPUs, so all are made here.
        model(INPUTS[case](1))
        optimizer.build(model.trainable_variables)

    def values(context: Any) -> Any:
        with tf.device(f"/cpu:{context.replica_id_in_sync_group}"):
            labels = tf.random.uniform([batch_size], 0, NUM_CLASSES, dtype=tf.int32)
            return INPUTS[case](batch_size), labels

    batch = strategy.experimental_distribute_values_from_function(values)

    def train_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=model(inputs, training=True)
            )
            loss = tf.reduce_sum(losses) / (batch_size * NUM_REPLICAS)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def distributed_step(inputs: Any, labels: Any) -> Any:
        losses = strategy.run(train_step, args=(inputs, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def step() -> Any:
        return distributed_step(*batch).numpy()

    return step


def mlp(width: int) -> Any:
    return tf.keras.Sequential(
        [
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def convnet() -> Any:
    return tf.keras.Sequential(
        [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def bag_of_words() -> Any:
    return tf.keras.Sequential(
        [
            layers.Embedding(100_000, 64),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def transformer() -> Any:
    tokens = tf.keras.Input((32,), dtype=tf.int32)
    hidden = layers.Embedding(1_000, 128)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        wide = layers.Dense(512, activation="relu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(128)(wide))
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return tf.keras.Model(tokens, layers.Dense(NUM_CLASSES)(pooled))


def pixels(*shape: int) -> Callable[[int], Any]:
    return lambda batch_size: tf.random.normal([batch_size, *shape])


def texts(num_words: int, length: int) -> Callable[[int], Any]:
    return lambda size: tf.random.uniform([size, length], 0, num_words, dtype=tf.int32)


MODELS = {
    "MLP 256": lambda: mlp(256),
    "MLP 1024": lambda: mlp(1024),
    "MLP 2048": lambda: mlp(2048),
    "ConvNet": convnet,
    "Embedding": bag_of_words,
    "Transformer": transformer,
}
INPUTS = {
    "MLP 256": pixels(784),
    "MLP 1024": pixels(784),
    "MLP 2048": pixels(784),
    "ConvNet": pixels(28, 28, 1),
    "Embedding": texts(100_000, 16),
    "Transformer": texts(1_000, 32),
}


if __name__ == "__main__":
    main()
