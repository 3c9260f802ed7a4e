"""The sockets between ranks: keepalive, encryption, and that no child process holds them.

The settings that Gloo has for encryption count here, too:

    GLOO_DEVICE_TRANSPORT=TCP_TLS
    GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY      the file with the key of this host
    GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT      its certificate
    GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE   the authority that has signed those of all hosts

Both ends show a certificate. Host names are not verified: every process with a certificate that the
authority has signed belongs to the job.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import ssl
from typing import NamedTuple

from unisono.errors import UnsupportedError
from unisono.sharing import LiveSet
from unisono.system import after_fork_in_child, is_local

# What a socket raises that cannot move bytes now.
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# Firewalls and address translators drop connections that are idle for some minutes.
_MAX_IDLE_SECONDS = 60
_MAX_SECONDS = 24 * 3600

_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_TRANSPORTS = ("TCP", "TCP_TLS", "UV")
_NAMES = tuple(f"{_TRANSPORT}_TCP_TLS_{which}" for which in ("PKEY", "CERT", "CA_FILE"))

_own: LiveSet[socket.socket] = LiveSet()


def keep_alive(connected: socket.socket, timeout_seconds: float, *, is_idle: bool = False) -> None:
    """Ends a connection with an error if the other host has not answered for `timeout_seconds`.

    The kernel of the other host answers, also for a process that is paused or computes. So a
    connection ends when the host or the network is gone, not when a process is slow.

    Args:
        is_idle: Whether only small messages travel, which the other host can always receive. Then
            messages that are not acknowledged end the connection, too. Elsewhere that would take a
            receiver that is paused, and has no room left, for a host that is gone.
    """
    close_in_children(connected)
    if is_local(connected):
        return
    limit = min(max(2, math.ceil(timeout_seconds)), _MAX_SECONDS)
    idle = max(1, min(limit // 4, _MAX_IDLE_SECONDS))
    interval = max(1, (limit - idle) // 8)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(connected, "TCP_KEEPIDLE", idle)
    _set(connected, "TCP_KEEPINTVL", interval)
    _set(connected, "TCP_KEEPCNT", math.ceil((limit - idle) / interval))
    if is_idle:
        _set(connected, "TCP_USER_TIMEOUT", limit * 1000)


def close_in_children(one: socket.socket) -> None:
    """Closes a socket in processes that are forked from this one, so that it ends with this one."""
    _own.add(one)


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this host that other hosts know, too.

    Many hosts know their own name as the loopback, where others would not find them. Then it
    listens on all interfaces.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    address = str(where[0])
    if host not in (address, "localhost") and ipaddress.ip_address(address).is_loopback:
        return listening_everywhere(port)
    listener = socket.create_server((address, port), family=family, backlog=1024)
    close_in_children(listener)
    return listener


def listening_everywhere(port: int) -> socket.socket:
    """Returns a socket that listens on all interfaces of this host."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=is_dual)
    close_in_children(listener)
    return listener


def _set(connected: socket.socket, name: str, value: int) -> None:
    """Sets an option of TCP, where the system has it."""
    if hasattr(socket, name):
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_in_child() -> None:
    """Sees to it that connections end with this process, though its children live on."""
    for one in _own:
        one.close()


after_fork_in_child(_close_in_child)


class Encryption(NamedTuple):
    """How connections are encrypted, for who is called and for who calls."""

    called: ssl.SSLContext
    calling: ssl.SSLContext


def encryption() -> Encryption | None:
    """Returns what the environment asks for, or None if it asks for none."""
    wanted = os.environ.get(_TRANSPORT, "TCP")
    if wanted not in _TRANSPORTS:
        raise UnsupportedError(
            f"{_TRANSPORT} is {wanted!r}. It must be 'TCP_TLS' to encrypt what is sent, or unset "
            "to send it unencrypted."
        )
    given = [name for name in os.environ if name.startswith("GLOO_DEVICE")]
    if misspelt := [name for name in given if name not in (_TRANSPORT, *_NAMES)]:
        raise UnsupportedError(
            f"There is no setting {' or '.join(sorted(misspelt))}. To encrypt, set "
            f"{_TRANSPORT}=TCP_TLS and {', '.join(_NAMES)}."
        )
    if wanted != "TCP_TLS":
        if given := [name for name in _NAMES if os.environ.get(name)]:
            raise UnsupportedError(
                f"{given[0]} is set, but {_TRANSPORT} is not 'TCP_TLS', so nothing would be "
                f"encrypted. Set {_TRANSPORT}=TCP_TLS, or unset {' and '.join(given)}."
            )
        return None
    if missing := [name for name in _NAMES if not os.environ.get(name)]:
        raise UnsupportedError(
            f"{_TRANSPORT} is 'TCP_TLS', which needs {' and '.join(missing)} too. Give the files, "
            f"or unset {_TRANSPORT} to send unencrypted."
        )
    key, certificate, authority = (os.environ[name] for name in _NAMES)
    try:
        return Encryption(
            _context(ssl.PROTOCOL_TLS_SERVER, key, certificate, authority),
            _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate, authority),
        )
    except OSError as error:
        raise UnsupportedError(
            f"The key {key!r}, the certificate {certificate!r} and the authority {authority!r} of "
            f"{_NAMES[0]} and the like could not be used together: {error}. They must be PEM "
            "files, the key without a password."
        ) from error


def _context(protocol: int, key: str, certificate: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    return context
