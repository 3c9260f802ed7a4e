"""Keys and certificates for connections that are encrypted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
CAN_MAKE = importlib.util.find_spec("trustme") is not None


def new_authority() -> Any:
    """Returns what issues certificates. Skips the test where there is nothing."""
    reason = "trustme makes the certificates, and its cryptography has no wheel for Python 3.13t"
    return pytest.importorskip("trustme", reason=reason).CA()


def keys(folder: Path, authority: Any, name: str) -> dict[str, str]:
    """Makes a key for a host, and returns the environment of processes that encrypt with it."""
    certificate = authority.issue_cert(name)
    files = {"PKEY": folder / f"{name}.key", "CERT": folder / f"{name}.pem"}
    certificate.private_key_pem.write_to_path(files["PKEY"])
    certificate.cert_chain_pems[0].write_to_path(files["CERT"])
    files["CA_FILE"] = folder / "authority.pem"
    authority.cert_pem.write_to_path(files["CA_FILE"])
    settings = {f"{_TRANSPORT}_TCP_TLS_{which}": str(path) for which, path in files.items()}
    return {_TRANSPORT: "TCP_TLS", **settings}
