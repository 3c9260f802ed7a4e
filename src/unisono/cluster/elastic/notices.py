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

_NUMBER_LENGTH = 8
_LENGTH = _NUMBER_LENGTH + 32


class Notices:
    """Where a worker finds the notices that are left for it."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._socket: socket.socket | None = None
        self._newest = -1
        if contact.machine:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            close_in_children(self._socket)
            self._socket.settimeout(0)
            self._socket.bind(_address(contact))
            # Programs need not close their strategies.
            weakref.finalize(self, self._socket.close)

    def newest(self) -> int:
        """Returns the last generation in which others have gone on without this worker, or -1.

        It may have joined them again since.
        """
        with suppress(BlockingIOError):
            while self._socket is not None:
                found = self._socket.recv(_LENGTH + 1)
                number = int.from_bytes(found[:_NUMBER_LENGTH], "big")
                if hmac.compare_digest(found, _notice(self._contact, number)):
                    self._newest = max(self._newest, number)
        return self._newest

    def close(self) -> None:
        """Ends it. Nothing happens if it has ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def leave_notice(contact: Contact, generation: int) -> None:
    """Tells a worker that others go on without it, if it is on this machine and lives."""
    if contact.machine != machine_identity():
        # It never sees that they have ended, and so it does not go on by itself.
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0)
        # It may have left or ended, or a notice may lie there already.
        with suppress(ConnectionError, BlockingIOError):
            sender.sendto(_notice(contact, generation), _address(contact))


def _address(contact: Contact) -> str:
    """A name that is in no file system, so that none is left."""
    return f"\0unisono elastic {contact.process}"


def _notice(contact: Contact, generation: int) -> bytes:
    number = generation.to_bytes(_NUMBER_LENGTH, "big")
    said = f"left behind: {contact.process} ".encode() + number
    return number + hmac.digest(job_secret(), said, "sha256")
