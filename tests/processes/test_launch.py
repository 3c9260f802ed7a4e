"""`unisono launch` from the outside: real launchers, real workers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from processes.launched import MEETS, script
from processes.ports import free_ports
from processes.programs import (
    Program,
    launcher,
    program,
    run,
    wait_until_gone,
)

# Take no time to start.
RANKS = """
import os

print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "0")
"""
SLEEPS = """
import os, pathlib, signal, sys, time

if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
# Leaves in its own time and way when asked to.
LEAVES = """
import os, pathlib, signal, sys, time

def leave(number, frame):
    time.sleep(0.5)
    sys.exit(42)

signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
# A job that starts with one host waits until another one comes.
GROWS = """
import os, pathlib, sys, time

print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["WORLD_SIZE"] == "1":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
from unisono.cluster import Membership, WorkerCard, detect, meet, open_store

membership = Membership.of(detect())
meet(open_store(membership, 100), WorkerCard.of(membership, 1), 100)
"""
# Worker 1 ends as its arguments say, after a line without an end; the others would go on.
FAILS = """
import os, signal, sys, time

if os.environ["RANK"] == "1":
    print("reason: bad luck", file=sys.stderr, end="")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
time.sleep(600)
"""


# Worker 0 kills itself in its first life. The others go on, and then all three work together.
ELASTIC = """
import os, pathlib, signal, sys
import torch
from unisono.cluster import Membership, detect
from unisono.communicators.wire import share_state
from unisono.devices import cpu_slots
from unisono.errors import CommunicationError
from unisono.experimental import CommunicationOptions
from unisono.options import ReduceOp
from unisono.workers.joining import join_elastic

options = CommunicationOptions(timeout_seconds=60)
members, _ = join_elastic(Membership.of(detect()), cpu_slots(1), options, 4)
step, shared = None if members.met.joined else 0, None
while step is None or step < 6:
    met = members.met
    try:
        if met.stateless and met is not shared:
            step, shared = share_state(met.communicator, step, met.source), met
        if step == 2 and met.members[met.rank] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        told = torch.tensor([float(members.newcomers())])
        met.communicator.all_reduce(ReduceOp.SUM, [told])
    except CommunicationError as error:
        members.meet_again(None if step is None else (step,), error, admits=True)
        continue
    step += len(met.members) == 3
    if told > 0:
        members.meet_again((step,), admits=True)
print("step", step, "workers", members.met.members, flush=True)
members.leave()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that is killed cannot remove what its workers have printed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_every_line_is_marked_with_its_worker_and_arguments_arrive(tmp_path: Path) -> None:
    prints = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\nprint('e', file=sys.stderr)"
    arguments = ["-n", "9", "$$x ${local_rank}", "two words"]

    status, output, errors = run(launcher("-n", "3", script(tmp_path, prints), *arguments))

    assert status == 0, errors
    assert sorted(output.splitlines()) == [f"[worker {r}] {r} {arguments}" for r in range(3)]
    assert [f"[worker {r}] e" in errors.splitlines() for r in range(3)] == [True] * 3


def test_lines_come_while_the_worker_runs_and_whole(tmp_path: Path) -> None:
    halves = "import sys, time\nprint('a', end='')\ntime.sleep(0.3)\nprint('b')\ninput()"

    with program(launcher("-n", "1", script(tmp_path, halves))) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)

    assert line == "[worker 0] ab\n"


def test_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    path = script(tmp_path, MEETS)
    # One is the command as it is installed, in whose processes nothing is forked.
    installed = Path(sys.executable).with_name("unisono")
    real: list[str | Path] = [installed, "launch", "-n", "2", path]
    commands = [real, launcher("-n", "2", path)]

    with ExitStack() as stack:
        processes = [stack.enter_context(program(command)) for command in commands]
        results = [process.communicate(timeout=200) for process in processes]

    for process, (output, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
        # Neither the launcher nor the workers log what torch's C++ code does.
        assert "[c10d]" not in errors
        assert sorted(output.splitlines()) == [f"[worker {r}] worker {r} of 2 0" for r in range(2)]


@pytest.mark.parametrize("numbered", [True, False])
def test_several_hosts_make_one_job(tmp_path: Path, numbered: bool) -> None:
    (port,) = free_ports(1)
    hosts = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    # Hosts with a number need not be told who is first, so their workers only show their places.
    path = script(tmp_path, RANKS if numbered else MEETS)
    per_host = 2 if numbered else 1
    commands = [
        launcher("-n", str(per_host), *hosts, *(["--node-rank", rank] if numbered else []), path)
        for rank in "01"
    ]

    with program(commands[0]) as first, program(commands[1]) as second:
        outputs = [process.communicate(timeout=200) for process in (first, second)]

    places = [sorted(output.splitlines()) for output, _ in outputs]
    expected = [f"[worker {r}] worker {r} of {2 * per_host} 0" for r in range(2 * per_host)]
    assert sorted(places[0] + places[1]) == expected, outputs
    if numbered:
        assert places == [expected[:2], expected[2:]]


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [("3", 3, "with status 3"), ("killed", 128 + signal.SIGKILL, "by signal 9")],
)
def test_the_first_failure_ends_all_and_is_told(
    tmp_path: Path, how: str, status: int, words: str
) -> None:
    found, _, errors = run(launcher("-n", "3", script(tmp_path, FAILS), how))

    assert found == status
    assert f"failed first, {words}." in errors
    # The launcher says it once: torch's agent is quiet.
    assert "elastic/multiprocessing" not in errors
    assert "worker 1 (process" in errors
    assert "[worker 1] reason: bad luck\n" in errors
    assert errors.rstrip().endswith("\n  reason: bad luck")


def test_workers_are_started_anew_and_meet_again(tmp_path: Path) -> None:
    fails_once = """
import os, sys, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5) if os.environ["RANK"] == "1" else time.sleep(600)
"""

    command = launcher("-n", "2", "--max-restarts", "1", script(tmp_path, fails_once + MEETS))
    status, output, errors = run(command)

    assert status == 0, errors
    assert "[worker 1] worker 1 of 2 1" in output.splitlines()


def test_single_workers_of_an_elastic_job_are_started_again(tmp_path: Path) -> None:
    options = ["-n", "3", "--elastic", "--max-restarts", "1"]
    status, output, errors = run(launcher(*options, script(tmp_path, ELASTIC)))

    assert status == 0, errors
    told = [f"[worker {rank}] step 6 workers (1, 2, 3)" for rank in range(3)]
    assert sorted(output.splitlines()) == told
    assert "worker 0 (process" in errors
    assert errors.count("is started again") == 1


def test_an_elastic_job_goes_on_without_a_worker_that_is_not_started_again(tmp_path: Path) -> None:
    fails = "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' or 'all' in sys.argv else 0)"
    command = launcher("-n", "2", "--elastic", script(tmp_path, fails))

    status, _, errors = run(command)
    assert status == 0, errors
    assert "the others go on" in errors
    status, _, errors = run([*command, "all"])
    assert status == 3, errors


def test_a_worker_that_is_started_again_too_late_is_ended(tmp_path: Path) -> None:
    late = """
import os, signal, sys, time
import unisono as uo

lost, done = sys.argv[1:]

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)

if os.path.exists(lost):
    wait_for(done)
strategy = uo.MultiWorkerMirroredStrategy(num_replicas=2, elastic=True)
if os.environ["RANK"] == "1":
    open(lost, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(lost)
strategy.close()
open(done, "w").close()
"""
    marks = [str(tmp_path / name) for name in ("lost", "done")]
    options = ["-n", "2", "--elastic", "--max-restarts", "1"]
    status, _, errors = run(launcher(*options, script(tmp_path, late), *marks))

    assert status == 0, errors
    assert "is started again" in errors
    assert "worker 1 (process" in errors.splitlines()[-1]
    assert "too late" in errors.splitlines()[-1]


def workers_of(process: Program, folder: Path, count: int) -> list[int]:
    """The process ids that the workers have written down."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        texts = [path.read_text() for path in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError(f"the workers have not begun: {process.communicate(timeout=5)}")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_worker_outlives_its_launcher(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()

    with program(launcher("-n", "3", script(tmp_path, SLEEPS), folder)) as process:
        workers = workers_of(process, folder, 3)
        process.send_signal(how)
        process.communicate(timeout=200)

    assert wait_until_gone(workers) == []
    assert process.returncode == (-how if how is signal.SIGKILL else 128 + how)


def test_sigterm_is_passed_on_and_the_status_of_the_workers_is_returned(tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()

    with program(launcher("-n", "2", script(tmp_path, LEAVES), folder)) as process:
        workers_of(process, folder, 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        # A platform may insist.
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)

    assert process.returncode == 42


def test_all_workers_start_again_when_another_host_comes(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    is_alone = tmp_path / "alone"
    hosts = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    wait = ["--rdzv-conf", "last_call_timeout=1"]
    command = launcher("-n", "1", *hosts, *wait, script(tmp_path, GROWS), is_alone)

    with program(command) as first:
        deadline = time.monotonic() + 200
        while not is_alone.exists():
            assert time.monotonic() < deadline
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        with program(command) as second:
            outputs = [process.communicate(timeout=200) for process in (first, second)]

    assert (first.returncode, second.returncode) == (0, 0), outputs
    # A round that ends before the second host has joined it starts the first worker alone again.
    lines = {line.split("] ")[1] for output, _ in outputs for line in output.splitlines()}
    assert lines == {"worker 0 of 1", "worker 0 of 2", "worker 1 of 2"}


def test_ctrl_c_is_heard_while_other_hosts_have_not_come(tmp_path: Path) -> None:
    path = script(tmp_path, RANKS)
    places = [[], ["--node-rank", "1"]]
    hosts = [
        ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *place]
        for port, place in zip(free_ports(2), places, strict=True)
    ]

    with (
        program(launcher("-n", "1", *hosts[0], path)) as first,
        program(launcher("-n", "1", *hosts[1], path)) as second,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            first.communicate(timeout=5)
        for process in (first, second):
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=200)

            assert process.returncode != 0


def test_workers_that_do_not_listen_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    command = launcher("-n", "2", "--grace-period", "1", script(tmp_path, SLEEPS), folder)

    with program([*command, "stubborn"]) as process:
        workers = workers_of(process, folder, 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)

    assert wait_until_gone(workers) == []
    assert process.returncode == 128 + signal.SIGINT
