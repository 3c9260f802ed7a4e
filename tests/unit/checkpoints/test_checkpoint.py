"""Checkpoints: what is saved, what is restored, and what a kill in the middle leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import unisono as uo
from unisono.checkpoints.checkpoint import write_file
from unisono.errors import UnsupportedError
from unisono.experimental import Checkpoint, CheckpointManager
from unit.checkpoints.training import Hook, Training, are_equal


class Saved:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Unknown:
    """A class that `torch.load` refuses."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    training = Training()
    for _ in range(2):
        for batch in training.batches:
            training.step(*batch)
    result = training.result()
    training.strategy.close()
    return result


@pytest.mark.parametrize("num_steps", [1, 5, 7])
def test_a_restored_training_ends_with_the_same_bits(
    num_steps: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    first = Training()
    done = 0
    while done < num_steps:
        for batch in first.batches:
            first.step(*batch)
            done += 1
            if done == num_steps:
                break
    first.checkpoint.save(tmp_path / "one.pt")
    first.strategy.close()

    second = Training()
    torch.manual_seed(99)
    second.checkpoint.restore(tmp_path / "one.pt")
    while done < 10:
        for batch in second.batches:
            second.step(*batch)
            done += 1

    assert are_equal(second.result(), undisturbed)
    second.strategy.close()


def powersgd(strategy: uo.Strategy) -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(
        strategy.process_group, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, Hook] = {
    "compress": lambda _: (None, uo.hooks.Compress(error_feedback=True)),
    "PowerSGD": powersgd,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_checkpoint_holds_what_a_communication_hook_keeps(hook: Hook, tmp_path: Path) -> None:
    results = []
    for is_resumed in (False, True):
        training, num_done = Training(hook=hook), 0
        while num_done < 8:
            for batch in training.batches:
                training.step(*batch)
                num_done += 1
                if is_resumed and num_done == 4:
                    training.checkpoint.save(tmp_path / "one.pt")
                    training.strategy.close()
                    training = Training(hook=hook)
                    training.checkpoint.restore(tmp_path / "one.pt")
                    break
                if num_done == 8:
                    break
        results.append(training.result())
        training.strategy.close()

    assert are_equal(*results)


def test_the_state_of_a_hook_belongs_to_a_number_of_workers(tmp_path: Path) -> None:
    training = Training(hook=HOOKS["compress"])
    training.checkpoint.save(tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt")
    state["hooks"]["kept_for"] = "3 workers"
    torch.save(state, tmp_path / "three.pt")

    with pytest.raises(UnsupportedError, match=r"kept for 3 workers, but now .* for 1 workers"):
        training.checkpoint.restore(tmp_path / "three.pt")
    training.strategy.close()

    # One without a hook has nothing to restore.
    plain = Training()
    plain.checkpoint.restore(tmp_path / "one.pt")
    plain.strategy.close()


def test_what_a_hook_keeps_out_of_sight_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def counting(_: Any, bucket: Any) -> Tensor:
        seen.append(bucket.index())
        found: Tensor = bucket.buffer()
        return found

    training = Training(hook=lambda _: (None, counting))
    training.checkpoint.save(tmp_path / "one.pt")
    training.strategy.close()

    assert "does not hold what the communication hook keeps" in caplog.text
    assert "'seen'" in caplog.text


@pytest.mark.parametrize("thing", [3, "text", None, nn.Linear])
def test_what_has_no_state_is_refused(thing: Any) -> None:
    if thing is nn.Linear:
        Checkpoint(model=thing(1, 1))
        return

    with pytest.raises(UnsupportedError, match=r"`thing`.*state_dict"):
        Checkpoint(thing=thing)


def test_a_state_that_could_not_be_loaded_is_refused_before_it_replaces_a_good_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.pt"
    Checkpoint(one=Saved({"a": 1})).save(path)

    with pytest.raises(UnsupportedError, match="weights_only"):
        Checkpoint(one=Saved({"a": Unknown()})).save(path)

    restored = Saved(None)
    Checkpoint(one=restored).restore(path)
    assert restored.state == {"a": 1}
    assert os.listdir(tmp_path) == ["one.pt"]


def test_other_names_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    Checkpoint(one=Saved(1)).save(path)
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pt")

    with pytest.raises(UnsupportedError, match=r"'one'.*'two'"):
        Checkpoint(two=Saved(1)).restore(path)
    with pytest.raises(UnsupportedError, match="does not hold a checkpoint"):
        Checkpoint(one=Saved(1)).restore(tmp_path / "other.pt")


def test_random_states_of_other_workers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    Checkpoint(one=Saved(1)).save(path)
    state = torch.load(path)
    torch.save(state | {"random": 2 * state["random"]}, path)

    with pytest.raises(UnsupportedError, match=r"2 workers.*there are 1"):
        Checkpoint(one=Saved(1)).restore(path)


SAVING = """
import os, signal, sys, torch
from unisono.experimental import Checkpoint

class Model:
    load_state_dict = print
    def state_dict(self):
        return {"weight": torch.full((1000,), 2.0)}

def fsync(_):  # the new file is written, but does not have its name yet
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])

os.fsync = fsync
Checkpoint(one=Model()).save(sys.argv[1])
"""


def test_a_process_that_is_killed_as_it_saves_leaves_the_old_file(tmp_path: Path) -> None:
    old = Saved({"weight": torch.ones(1000)})
    manager = CheckpointManager(Checkpoint(one=old), tmp_path, max_to_keep=1)
    path = manager.save(1)

    command = [sys.executable, "-c", SAVING, path, "SIGKILL"]
    killed = subprocess.run(command, timeout=200, check=False)

    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    old.state = None
    assert manager.restore_or_initialize() == path
    assert torch.equal(old.state["weight"], torch.ones(1000))
    # The next save cleans up.
    manager.save()
    assert os.listdir(tmp_path) == ["ckpt-2.pt"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_that_is_paused_as_it_saves_keeps_what_others_save_meanwhile(
    number: int, tmp_path: Path
) -> None:
    new = Saved({"weight": torch.ones(1000)})
    path = tmp_path / "ckpt-1.pt"
    command = [sys.executable, "-c", SAVING, str(path), "SIGSTOP"]
    paused = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(paused.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        saved = CheckpointManager(Checkpoint(one=new), tmp_path, max_to_keep=None).save(number)
        paused.send_signal(signal.SIGCONT)
        _, told = paused.communicate(timeout=200)
    finally:
        paused.kill()

    assert "FileExistsError" in told
    assert "another process has saved to its folder meanwhile" in told
    assert os.listdir(tmp_path) == [os.path.basename(saved)]
    restored = Saved(None)
    Checkpoint(one=restored).restore(saved)
    assert torch.equal(restored.state["weight"], torch.ones(1000))


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(one=Saved(1)), tmp_path / "new", max_to_keep=2)
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize() is None

    saved = [manager.save() for _ in range(11)]

    assert manager.checkpoints == saved[-2:]
    assert manager.latest_checkpoint == str(tmp_path / "new" / "ckpt-11.pt")


def test_a_background_save_writes_the_state_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    manager = CheckpointManager(Checkpoint(model=model), tmp_path, max_to_keep=3)
    may_write = threading.Event()

    def late(*args: Any) -> None:
        assert may_write.wait(60)
        write_file(*args)

    monkeypatch.setattr("unisono.checkpoints.manager.write_file", late)
    manager.save(background=True)
    assert manager.latest_checkpoint is None

    with torch.no_grad():
        model.weight.zero_()
    may_write.set()
    manager.wait()

    manager.restore_or_initialize()
    assert torch.equal(model.weight, before)


def test_a_manager_deletes_the_unfinished_files_of_its_own_name_only(tmp_path: Path) -> None:
    """Another manager may write one in the background."""
    own, other = (tmp_path / f".{name}-1.pt.0f.unfinished" for name in ("ckpt", "ckpt-best"))
    own.touch()
    other.touch()

    CheckpointManager(Checkpoint(one=Saved(1)), tmp_path, max_to_keep=1).save()

    assert not own.exists()
    assert other.exists()


def test_the_error_of_a_background_save_is_raised_at_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    manager = CheckpointManager(Checkpoint(one=Saved(1)), tmp_path / "file", max_to_keep=1)

    manager.save(background=True)

    with pytest.raises(FileExistsError):
        manager.save(background=True)
    manager.wait()


@pytest.mark.parametrize("wrong", [{"max_to_keep": 0}, {"checkpoint_name": "a/b"}])
def test_wrong_arguments_of_a_manager_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    right: dict[str, Any] = {"checkpoint": Checkpoint(), "directory": tmp_path, "max_to_keep": 1}

    with pytest.raises(UnsupportedError, match=next(iter(wrong))):
        CheckpointManager(**(right | wrong))
