"""A custom training loop of TensorFlow and its port to torch, line by line.

    python examples/from_tensorflow.py
    python examples/from_tensorflow.py --replicas 4 --epochs 2

Each comment that starts with `tf|` is a line of the TensorFlow program. The lines below it are its
port. Together, these comments are a complete TensorFlow program. As in TensorFlow, the loss is
divided by the global batch size and gradients are summed: `reduce_gradients=uo.ReduceOp.SUM`. With
any number of replicas, the port ends with the loss of a plain loop on one device, to 12 decimals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

# tf| import tensorflow as tf
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

# tf| GLOBAL_BATCH_SIZE, NUM_SAMPLES, NUM_CLASSES = 50, 430, 3
GLOBAL_BATCH_SIZE, NUM_SAMPLES, NUM_CLASSES = 50, 430, 3


def load() -> TensorDataset:
    # tf| tf.keras.utils.set_random_seed(0)
    # tf| features = tf.random.normal([NUM_SAMPLES, 8], dtype=tf.float64)
    # tf| labels = tf.argmax(features[:, :NUM_CLASSES] ** 2, axis=1)
    # tf| dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    dice = torch.Generator().manual_seed(0)
    features = torch.randn(NUM_SAMPLES, 8, dtype=torch.float64, generator=dice)
    labels = (features[:, :NUM_CLASSES] ** 2).argmax(dim=1)
    return TensorDataset(features, labels)


def network() -> nn.Sequential:
    # tf| tf.keras.backend.set_floatx("float64")
    # tf| def network():
    # tf|     return tf.keras.Sequential([
    # tf|         tf.keras.Input([8]),
    # tf|         tf.keras.layers.Dense(32, activation="tanh"),
    # tf|         tf.keras.layers.Dense(NUM_CLASSES),
    # tf|     ])
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES)).double()


def train(num_replicas: int, num_epochs: int) -> float:
    # tf| strategy = tf.distribute.MirroredStrategy()
    strategy = uo.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)], reduce_gradients=uo.ReduceOp.SUM
    )

    # tf| dataset = dataset.batch(GLOBAL_BATCH_SIZE)
    # tf| dist_dataset = strategy.experimental_distribute_dataset(dataset)
    loader = DataLoader(load(), batch_size=GLOBAL_BATCH_SIZE)
    dist_dataset = strategy.experimental_distribute_dataset(loader)

    # tf| with strategy.scope():
    # tf|     model = network()
    # tf|     optimizer = tf.keras.optimizers.SGD(learning_rate=0.5, momentum=0.9)
    # tf|     optimizer.build(model.trainable_variables)
    # tf|     loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
    # tf|         from_logits=True, reduction="none")
    torch.manual_seed(0)
    with strategy.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        loss_object = nn.CrossEntropyLoss(reduction="none")

    # tf| def train_step(inputs):
    # tf|     features, labels = inputs
    # tf|     with tf.GradientTape() as tape:
    # tf|         per_example_loss = loss_object(labels, model(features, training=True))
    # tf|         loss = tf.nn.compute_average_loss(
    # tf|             per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
    # tf|     gradients = tape.gradient(loss, model.trainable_variables)
    # tf|     optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    # tf|     return loss
    def train_step(inputs: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = inputs
        optimizer.zero_grad()
        per_example_loss = loss_object(model(features), labels)
        loss: Tensor = per_example_loss.sum() / GLOBAL_BATCH_SIZE
        loss.backward()
        optimizer.step()
        return loss.detach()

    # tf| def test_step(inputs):
    # tf|     features, labels = inputs
    # tf|     context = tf.distribute.get_replica_context()
    # tf|     correct = tf.argmax(model(features, training=False), axis=1) == labels
    # tf|     correct = tf.cast(correct, tf.float64)
    # tf|     total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(correct))
    # tf|     return correct, total
    @torch.no_grad()
    def test_step(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        features, labels = inputs
        context = uo.get_replica_context()
        assert context is not None
        correct = model(features).argmax(dim=1) == labels
        correct = correct.double()
        total = context.all_reduce(uo.ReduceOp.SUM, correct.sum())
        return correct, total

    # tf| @tf.function
    # tf| def distributed_train_step(inputs):
    # tf|     per_replica_losses = strategy.run(train_step, args=(inputs,))
    # tf|     return strategy.reduce(
    # tf|         tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
    def distributed_train_step(inputs: tuple[Tensor, Tensor]) -> float:
        per_replica_losses = strategy.run(train_step, args=(inputs,))
        return float(strategy.reduce(uo.ReduceOp.SUM, per_replica_losses, axis=None))

    # tf| @tf.function
    # tf| def distributed_test_step(inputs):
    # tf|     correct, total = strategy.run(test_step, args=(inputs,))
    # tf|     accuracy = strategy.reduce(tf.distribute.ReduceOp.MEAN, correct, axis=0)
    # tf|     return accuracy, strategy.experimental_local_results(total)[0]
    def distributed_test_step(inputs: tuple[Tensor, Tensor]) -> tuple[float, int]:
        correct, total = strategy.run(test_step, args=(inputs,))
        accuracy = strategy.reduce(uo.ReduceOp.MEAN, correct, axis=0)
        return float(accuracy), int(strategy.experimental_local_results(total)[0])

    # tf| for epoch in range(5):
    # tf|     total_loss, num_correct = 0.0, 0.0
    # tf|     for inputs in dist_dataset:
    # tf|         total_loss += distributed_train_step(inputs)
    # tf|     for inputs in dist_dataset:
    # tf|         accuracy, total = distributed_test_step(inputs)
    # tf|         num_correct += total
    # tf|     print(f"epoch {epoch + 1}: loss {float(total_loss):.12f}, {int(num_correct)} right, "
    # tf|           f"{float(accuracy):.1%} of the last batch")
    for epoch in range(num_epochs):
        total_loss, num_correct = 0.0, 0
        for inputs in dist_dataset:
            total_loss += distributed_train_step(inputs)
        for inputs in dist_dataset:
            accuracy, total = distributed_test_step(inputs)
            num_correct += total
        print(
            f"epoch {epoch + 1}: loss {total_loss:.12f}, {num_correct} right, "
            f"{accuracy:.1%} of the last batch"
        )
    strategy.close()
    return total_loss


def train_plainly(num_epochs: int) -> float:
    """The same training without a strategy, for comparison."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(num_epochs):
        total_loss = 0.0
        for features, labels in DataLoader(load(), batch_size=GLOBAL_BATCH_SIZE):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(features), labels, reduction="none")
            loss = losses.sum() / GLOBAL_BATCH_SIZE
            loss.backward()
            optimizer.step()
            total_loss += float(loss.detach())
    return total_loss


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: 5)")
    options = parser.parse_args(arguments)
    loss = train(options.replicas, options.epochs)
    plain = train_plainly(options.epochs)
    print(f"without a strategy: loss {plain:.12f}")
    return loss, plain


if __name__ == "__main__":
    main()
