"""Where to listen: what an address may look like."""

from __future__ import annotations

import pytest

from batcher.errors import ConfigError
from batcher.rpc.transport import Address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8001", Address(host="127.0.0.1", port=8001)),
        ("localhost:0", Address(host="localhost", port=0)),
        ("0.0.0.0:65535", Address(host="0.0.0.0", port=65535)),
        ("[::1]:8001", Address(host="::1", port=8001)),
        ("[::]:80", Address(host="::", port=80)),
        ("unix:/run/b.sock", Address(path="/run/b.sock")),
        ("unix:b.sock", Address(path="b.sock")),
        ("unix:///run/b.sock", Address(path="/run/b.sock")),
        ("unix:" + "p" * 107, Address(path="p" * 107)),
    ],
)
def test_addresses_are_read(text: str, expected: Address) -> None:
    """HOST:PORT, [IPV6]:PORT and unix:PATH, with gRPC's spelling of a full path."""
    assert Address.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither HOST:PORT (0 to 65535) nor unix:PATH"),
        ("localhost", "neither HOST:PORT"),
        (":8001", "neither HOST:PORT"),
        ("localhost:", "neither HOST:PORT"),
        ("localhost:x", "neither HOST:PORT"),
        ("localhost:-1", "neither HOST:PORT"),
        ("localhost:65536", "neither HOST:PORT"),
        ("localhost:" + "9" * 5000, "neither HOST:PORT"),
        ("[::1]", "neither HOST:PORT"),
        ("unix:", "the path is missing"),
        ("unix://", "the path is missing"),
        ("unix:" + "p" * 108, "the path has over 107 bytes"),
        ("unix:" + "é" * 54, "the path has over 107 bytes"),
    ],
)
def test_other_addresses_are_refused(text: str, says: str) -> None:
    """What is no address is a configuration error that quotes it."""
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)

    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:80", "[::1]:80", "unix:/run/b.sock", "0.0.0.0:0", "host:1"]
)
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    """The text of an address parses to the address again."""
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:b.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
        ("127.example.org:1", False),
    ],
)
def test_local_addresses_are_told_apart(text: str, local: bool) -> None:
    """Only loopback and Unix sockets are local; a name that looks like one is not."""
    assert Address.parse(text).local is local
