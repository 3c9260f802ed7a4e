"""Encryption of connections, by the settings that Gloo has for it.

    GLOO_DEVICE_TRANSPORT=TCP_TLS
    GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY      the file with the key of this host
    GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT      its certificate
    GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE   the authority that has signed those of all hosts

Both ends show a certificate. Host names are not verified: every process with a certificate that the
authority has signed belongs to the job.
"""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple

from unisono.errors import UnsupportedError

_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_TRANSPORTS = ("TCP", "TCP_TLS", "UV")
_NAMES = tuple(f"{_TRANSPORT}_TCP_TLS_{which}" for which in ("PKEY", "CERT", "CA_FILE"))


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
