"""A worker that was paused finds out that others have gone on without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from unisono.cluster.elastic.doors import Contact, machine_identity
from unisono.cluster.elastic.notices import Notices, leave_notice
from unisono.system import process_start


@pytest.fixture
def contact() -> Contact:
    if (started := process_start(os.getpid())) is None:
        pytest.skip("this system does not tell when a process has ended")
    process = f"a test {os.getpid()}"
    return Contact("127.0.0.1", 1, process, machine_identity(), os.getpid(), started)


def test_a_notice_stays_when_the_process_that_left_it_has_ended(contact: Contact) -> None:
    notices = Notices(contact)
    assert notices.newest() == -1
    program = (
        "from unisono.cluster.elastic import doors, notices\n"
        f"notices.leave_notice(doors.{contact!r}, 3)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert notices.newest() == 3
    assert notices.newest() == 3
    leave_notice(contact, 1)
    assert notices.newest() == 3
    notices.close()
    notices.close()


def test_a_stranger_cannot_leave_a_notice(contact: Contact) -> None:
    notices = Notices(contact)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for message in (b"", b"?" * 40, b"?" * 1000):
            stranger.sendto(message, f"\0unisono elastic {contact.process}")
    assert notices.newest() == -1
    leave_notice(contact, 3)
    assert notices.newest() == 3
    notices.close()


def test_a_notice_for_nobody_is_lost(contact: Contact) -> None:
    leave_notice(contact, 1)
    leave_notice(contact._replace(machine="another"), 2)
    notices = Notices(contact)
    for _ in range(1000):
        leave_notice(contact, 3)
    assert notices.newest() == 3
    notices.close()


def test_where_no_end_is_seen_there_are_no_notices(contact: Contact) -> None:
    notices = Notices(contact._replace(machine=""))
    leave_notice(contact._replace(machine=""), 3)
    assert notices.newest() == -1
    notices.close()
