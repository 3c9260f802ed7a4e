from __future__ import annotations

import pytest

from unisono.cluster import Address
from unisono.cluster.spec import derived_port
from unisono.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host:2222", "host", 2222),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("a-b.example.org:65535", "a-b.example.org", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = Address.parse(text)

    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:-1",
        "host:x",
        "::1:80",
        "[::1]",
        "grpc://host:1",
        "ho st:1",
        "host:1 ",
        "[]:1",
        "[host]:1",
        2222,
        None,
        b"host:1",
    ],
)
def test_what_is_no_address_is_refused_and_shown(text: object) -> None:
    with pytest.raises(ClusterError) as caught:
        Address.parse(text)

    assert repr(text) in str(caught.value)


def test_a_derived_port_is_the_same_everywhere_and_below_those_that_linux_gives_out() -> None:
    ports = {derived_port(f"job-{number}") for number in range(200)}

    assert derived_port("slurm-42.0") == 12000 + 0x23A7EA12 % 20000
    assert len(ports) > 190
    assert all(12000 <= port < 32000 for port in ports)
