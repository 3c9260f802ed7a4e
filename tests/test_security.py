"""The table in docs/security.md: every row has tests, and those of three rows are here."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes.ports import free_port

from unisono.cluster import Membership, SimpleClusterResolver, open_store
from unisono.communicators.greeting import call, greet
from unisono.communicators.job_store import serve_store
from unisono.communicators.sockets import listening
from unisono.errors import CommunicationError

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
SECONDS = 30.0

# For each row, by who tries what: the tests that show it.
ROWS = {
    ("same network", "send garbage"): {
        "unit/communicators/test_greeting.py": [
            "test_strangers_are_hung_up_on_and_learn_nothing",
            "test_silent_and_slow_strangers_keep_nobody_waiting",
        ],
    },
    ("same network", "join as a worker"): {
        "unit/cluster/test_store.py": [
            "test_workers_with_the_same_token_meet",
            "test_a_stranger_needs_the_token",
        ],
        "unit/communicators/test_joining.py": [
            "test_a_certificate_of_another_authority_is_refused"
        ],
    },
    ("same network", "read or change the store"): {
        "unit/cluster/test_store.py": [
            "test_workers_with_the_same_token_meet",
            "test_a_stranger_needs_the_token",
        ],
        "unit/communicators/test_joining.py": ["test_the_store_is_encrypted_too"],
    },
    ("same network", "guess the token"): {
        "test_security.py": ["test_who_asks_and_who_repeats_what_it_heard_learns_nothing"],
    },
    ("same network", "make a worker wait"): {
        "unit/cluster/test_store.py": [
            "test_something_that_never_answers_is_given_up_in_time",
            "test_a_worker_that_waits_hears_ctrl_c",
        ],
    },
    ("same network", "reach rank 0 through another address"): {
        "unit/cluster/test_store.py": ["test_the_store_listens_at_the_address_of_rank_0_alone"],
    },
    ("on the path", "change what the store answers"): {
        "test_security.py": ["test_only_a_token_shows_that_a_store_is_not_that_of_the_job"],
        "unit/communicators/test_job_store.py": ["test_who_changes_an_answer_is_found_out"],
        "unit/communicators/test_joining.py": ["test_the_store_is_encrypted_too"],
    },
    ("on the path", "read gradients and weights"): {
        "unit/communicators/test_joining.py": [
            "test_large_and_small_messages_are_encrypted_where_that_is_asked_for"
        ],
    },
    ("anyone", "run code on a worker"): {
        "unit/communicators/test_wire.py": [
            "test_what_a_stranger_writes_runs_nothing",
            "test_nothing_in_the_package_reads_pickles",
        ],
    },
    ("another user of the host", "get the shared memory"): {
        "unit/communicators/test_segment.py": ["test_another_user_is_not_even_listened_to"],
    },
    ("another user of the host", "read the token"): {
        "test_security.py": ["test_the_token_is_hidden_from_other_users_alone"],
    },
    ("the same user, root", "anything"): {
        "test_security.py": [
            "test_the_token_is_hidden_from_other_users_alone",
            "test_who_has_read_the_token_of_a_worker_can_join",
        ],
    },
}


def rows() -> list[tuple[str, str]]:
    section = PAGE.read_text().split("## Who can do what")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [(line.split("|")[1].strip(), line.split("|")[2].strip()) for line in lines]


def test_every_row_of_the_page_has_tests() -> None:
    found = rows()

    assert len(found) == len(ROWS)
    for (who, what), (expected_who, expected_what) in zip(found, ROWS, strict=True):
        assert who == expected_who
        assert what.startswith(expected_what)


@pytest.mark.parametrize("path", sorted({path for tests in ROWS.values() for path in tests}))
def test_the_tests_of_the_rows_exist(path: str) -> None:
    named = {name for tests in ROWS.values() for name in tests.get(path, [])}
    tree = ast.parse((TESTS / path).read_text())

    assert named <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def workers() -> list[Membership]:
    cluster = {"worker": [f"127.0.0.1:{free_port()}", "127.0.0.1:9"]}
    return [
        Membership.of(SimpleClusterResolver(cluster, task_type="worker", task_id=rank))
        for rank in range(2)
    ]


def greeting_for(hello: bytes, key: bytes) -> bytes:
    """What a worker says to somebody who poses as rank 0 and sends it `hello`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(hello)
        steps = greet(theirs, key, 1, None)
        # Up to where it waits for an answer.
        next(steps)
        steps.close()
        return ours.recv(1000)


def test_who_asks_and_who_repeats_what_it_heard_learns_nothing() -> None:
    key = b"k" * 32
    store = serve_store("127.0.0.1", listening("127.0.0.1", 0), key, None)
    heard, refusals = [], []
    greeting = greeting_for(b"unisono 1\n" + bytes(16), key)
    guesses = [greeting_for(b"unisono 1\n" + bytes(16), one * 32) for one in (b"a", b"b")]
    try:
        # The last one is what a real worker has said, to another challenge.
        for said in [*guesses, greeting]:
            with socket.create_connection((store.host, store.port), timeout=SECONDS) as stranger:
                heard.append(stranger.recv(26, socket.MSG_WAITALL))
                stranger.sendall(said)
                refusals.append(stranger.recv(1000))
        call((store.host, store.port), key, 1, None, time.monotonic() + SECONDS).socket.close()
    finally:
        store.close()

    assert len(set(heard)) == 3
    assert refusals == [bytes(32)] * 3


@pytest.mark.parametrize("token", ["", "secret"])
def test_only_a_token_shows_that_a_store_is_not_that_of_the_job(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers()
    # Somebody on the path knows the cluster, and answers in the place of rank 0.
    monkeypatch.delenv("UNISONO_JOB_TOKEN", raising=False)
    posing = open_store(first, SECONDS)
    try:
        posing.set("key", "forged")
        monkeypatch.setenv("UNISONO_JOB_TOKEN", token)
        if token:
            with pytest.raises(CommunicationError, match=r"token|TOKEN"):
                open_store(second, SECONDS)
        else:
            assert open_store(second, SECONDS).get("key") == b"forged"
    finally:
        posing.close()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root to be two users")
def test_the_token_is_hidden_from_other_users_alone() -> None:
    user, other = 12_345, 12_346
    environ = {"UNISONO_JOB_TOKEN": "secret", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "60"], env=environ, user=user) as worker:
        try:
            command = ["cat", f"/proc/{worker.pid}/environ"]
            found = {
                reader: subprocess.run(command, capture_output=True, user=reader, timeout=SECONDS)
                for reader in (other, user, 0)
            }
        finally:
            worker.kill()

    assert found[other].returncode != 0
    assert b"secret" not in found[other].stdout
    assert all(b"UNISONO_JOB_TOKEN=secret" in found[reader].stdout for reader in (user, 0))


def test_who_has_read_the_token_of_a_worker_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc")
    first, second = workers()
    monkeypatch.setenv("UNISONO_JOB_TOKEN", "secret")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        store = open_store(first, SECONDS)
        try:
            monkeypatch.delenv("UNISONO_JOB_TOKEN")
            environ = Path(f"/proc/{worker.pid}/environ").read_text()
            (token,) = re.findall(r"UNISONO_JOB_TOKEN=([^\0]*)", environ)
            monkeypatch.setenv("UNISONO_JOB_TOKEN", token)
            open_store(second, SECONDS).set("key", "value")
            assert store.get("key") == b"value"
        finally:
            store.close()
            worker.kill()
