"""Trains on digits while another script kills and starts workers, and draws what happens.

    python examples/elastic.py               # and elastic_trouble.py, which it starts
    python examples/elastic.py --no-trouble  # says how to start elastic_trouble.py elsewhere

Three workers on this host share six replicas. The picture shows who runs which replica, and the
loss on top of that of an undisturbed run. It is a window that follows the training, or a file that
is drawn again every second where there is no display. At the end, the weights of all workers that
are left equal those of the undisturbed run to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono_tools.elastic_demo import Elastic, paint
from unisono_tools.processes import free_ports

NUM_REPLICAS = 6
# How many workers the cluster has room for: those at first, and those that are started later.
MAX_WORKERS = 12
SECONDS_PER_STEP = 0.2
PATIENCE_SECONDS = 300.0
Tell = Callable[..., None]


class Training:
    """A program that workers can leave and join at any time."""

    def __init__(self, strategy: uo.Strategy, num_epochs: int) -> None:
        self.strategy, self.num_epochs = strategy, num_epochs
        self.epoch = self.num_steps = 0
        digits = load_digits()
        images = torch.tensor(digits.images[:1437], dtype=torch.float32) / 16
        data = TensorDataset(images, torch.tensor(digits.target[:1437]))
        torch.manual_seed(1)
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        loader = DataLoader(data, batch_size=100, shuffle=True)
        self.batches = strategy.experimental_distribute_dataset(loader)
        # All that a worker that joins must know.
        self.checkpoint = uo.experimental.Checkpoint(
            model=self.model, optimizer=self.optimizer, input=self.batches, progress=self
        )

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.num_steps = state["epoch"], state["num_steps"]

    def train(self, tell: Tell, seconds_per_step: float) -> None:
        """Tells the loss of every step and the replicas that ran here, and a fingerprint."""
        while self.epoch < self.num_epochs:
            for batch in self.batches:
                loss, replica = self.strategy.run(self.step, args=batch)
                replicas = list(map(int, self.strategy.experimental_local_results(replica)))
                mean = float(self.strategy.reduce("MEAN", loss))
                tell(step=self.num_steps, loss=mean, replicas=replicas)
                self.num_steps += 1
                # So that one can watch.
                time.sleep(seconds_per_step)
            self.epoch += 1
        bits = b"".join(one.numpy().tobytes() for one in self.model.state_dict().values())
        tell(weights=hashlib.sha256(bits).hexdigest()[:16])

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        context = uo.get_replica_context()
        assert context is not None
        return loss.detach(), torch.tensor(context.replica_id_in_sync_group)


def work(folder: Path, worker: int, num_epochs: int) -> None:
    """What each worker does. It finds its place in TF_CONFIG."""
    torch.set_num_threads(1)
    with (folder / f"worker-{worker}").open("w", buffering=1) as file:
        tell = _teller(file)
        tell(process_id=os.getpid())
        strategy = uo.MultiWorkerMirroredStrategy(num_replicas=NUM_REPLICAS, elastic=True)
        with closing(strategy):
            training = Training(strategy, num_epochs)
            strategy.experimental_admit(training.checkpoint)
            training.train(tell, SECONDS_PER_STEP)


def _teller(file: Any) -> Tell:
    return lambda **told: print(json.dumps(told), file=file, flush=True)


def undisturbed(num_epochs: int) -> tuple[list[float], str]:
    """Returns the losses and the weights of one process that nobody disturbs."""
    told: list[dict[str, Any]] = []
    with closing(uo.MultiWorkerMirroredStrategy(num_replicas=NUM_REPLICAS)) as strategy:
        Training(strategy, num_epochs).train(lambda **one: told.append(one), 0.0)
    return [one["loss"] for one in told[:-1]], told[-1]["weights"]


class Picture:
    """A window that follows the training, or a file where there is no display."""

    def __init__(self, path: Path) -> None:
        from matplotlib import pyplot

        self._path = path
        self._figure = pyplot.figure(figsize=(9, 5), layout="constrained")
        self._has_window = self._figure.canvas.required_interactive_framework is not None
        if self._has_window:
            pyplot.show(block=False)

    def show(self, found: Elastic) -> None:
        """Draws what has happened so far."""
        paint(found, self._figure)
        if self._has_window:
            self._figure.canvas.draw_idle()
            self._figure.canvas.start_event_loop(0.5)
        self.save()

    def save(self) -> None:
        """Replaces the file in one go, so that a viewer never finds half of it."""
        new = self._path.with_name(f".new-{self._path.name}")
        self._figure.savefig(new, dpi=120)
        os.replace(new, self._path)


def heard(folder: Path, found: Elastic) -> dict[int, dict[str, Any]]:
    """Reads what the workers have told so far, and returns the last word of each."""
    last = {}
    for path in folder.glob("worker-*"):
        worker = int(path.name.removeprefix("worker-"))
        for line in path.read_text().splitlines(keepends=True):
            # A worker that is killed may leave half a line.
            if line.endswith("\n"):
                last[worker] = told = json.loads(line)
                if "step" in told:
                    found.losses[told["step"]] = told["loss"]
                    ran = found.layout.setdefault(told["step"], {})
                    ran.update(dict.fromkeys(told["replicas"], worker))
    return last


def watch(folder: Path, found: Elastic, picture: Picture) -> None:
    """Draws what the workers tell until they have ended."""
    left = PATIENCE_SECONDS
    while not (folder / "done").exists():
        num_steps = len(found.losses)
        time.sleep(1.0)
        heard(folder, found)
        picture.show(found)
        left = PATIENCE_SECONDS if len(found.losses) > num_steps else left - 1.0
        if left < 0:
            raise SystemExit(f"The workers have said nothing for {PATIENCE_SECONDS:g} s.")
    told = heard(folder, found)
    found.weights += [one["weights"] for one in told.values() if "weights" in one]
    picture.show(found)


def demonstrate(options: argparse.Namespace) -> Elastic:
    """Trains undisturbed, and then with workers that come and go."""
    found = Elastic()
    found.undisturbed, weights = undisturbed(options.epochs)
    found.weights.append(weights)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        command = [__file__, "--epochs", str(options.epochs), "--folder", name]
        addresses = [f"127.0.0.1:{port}" for port in free_ports(MAX_WORKERS)]
        (folder / "job").write_text(json.dumps({"command": command, "addresses": addresses}))
        script = str(Path(__file__).with_name("elastic_trouble.py"))
        trouble = [sys.executable, script, name, *options.trouble_options]
        if options.trouble:
            process = stack.enter_context(subprocess.Popen(trouble))
            stack.callback(process.terminate)
        else:
            print(f"In another terminal, run: {shlex.join(trouble)}", flush=True)
        watch(folder, found, Picture(options.plot))
    return found


def main(arguments: Sequence[str] | None = None) -> Elastic | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--plot", type=Path, default=Path("elastic.png"), metavar="FILE")
    parser.add_argument("--no-trouble", dest="trouble", action="store_false")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("trouble_options", nargs="*", help="after --, for elastic_trouble.py")
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options.folder, options.worker, options.epochs)
        return None
    found = demonstrate(options)
    same = "equal" if found.are_equal else "differ from"
    print(f"{found.weights[1:]} {same} {found.weights[0]} of an undisturbed run: {options.plot}")
    return found


if __name__ == "__main__":
    main()
