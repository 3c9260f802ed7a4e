"""What workers leave for one that they go on without, and that may be paused on the same machine.

It wakes up when they have ended, and must know then that they had gone on. So they send it a
message before they do. The kernel keeps the message until the worker reads it or ends itself,
whatever becomes of those who sent it.
"""

from __future__ import annotations

import hmac
import socket
import weakref
from contextlib import suppress

from unisono.cluster.elastic.doors import Contact, job_secret, machine_identity
from unisono.communicators.sockets import close_in_children


class Notices:
    """Where a worker finds the notices that are left for it.

    Args:
        contact: This worker.
    """

    def __init__(self, contact: Contact) -> None:
        self._expected = _notice(contact)
        self._socket: socket.socket | None = None
        self._is_left_behind = False
        if contact.machine:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            close_in_children(self._socket)
            self._socket.settimeout(0)
            self._socket.bind(_address(contact))
            # Programs need not close their strategies.
            weakref.finalize(self, self._socket.close)

    def is_left_behind(self) -> bool:
        """Returns whether others have gone on without this worker."""
        with suppress(BlockingIOError):
            while self._socket is not None and not self._is_left_behind:
                found = self._socket.recv(len(self._expected) + 1)
                self._is_left_behind = hmac.compare_digest(found, self._expected)
        return self._is_left_behind

    def close(self) -> None:
        """Ends it. Nothing happens if it has ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def leave_notice(contact: Contact) -> None:
    """Tells a worker that others go on without it, if it is on this machine and lives."""
    if contact.machine != machine_identity():
        # It never sees that they have ended, and so it does not go on by itself.
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0)
        # It may have left or ended, or a notice may lie there already.
        with suppress(ConnectionError, BlockingIOError):
            sender.sendto(_notice(contact), _address(contact))


def _address(contact: Contact) -> str:
    """A name that is in no file system, so that none is left."""
    return f"\0unisono elastic {contact.process}"


def _notice(contact: Contact) -> bytes:
    return hmac.digest(job_secret(), f"left behind: {contact.process}".encode(), "sha256")
