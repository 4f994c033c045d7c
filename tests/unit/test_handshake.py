"""Who may ask a served teacher: whoever knows its token, and nobody else."""

import json
import socket
import struct
import threading

import pytest

from pixelrag.errors import ConfigError
from pixelrag.models import handshake, wire
from pixelrag.models.teacher_channel import TeacherServer, token_for

TOKEN = b"a token of many letters"


def meet(server: bytes, asker: bytes) -> tuple[Exception | None, Exception | None]:
    """How the two ends of a connection fare with their tokens."""
    ours, theirs = socket.socketpair()
    ends: list[Exception | None] = [None, None]

    def one(number: int, end: socket.socket, act, token: bytes) -> None:
        with end:
            try:
                act(end, token)
            except OSError as error:
                ends[number] = error

    other = threading.Thread(target=one, args=(0, ours, handshake.accept, server))
    other.start()
    one(1, theirs, handshake.introduce, asker)
    other.join()
    return ends[0], ends[1]


def test_equal_tokens_are_let_in():
    assert meet(TOKEN, TOKEN) == (None, None)
    assert meet(b"", b"") == (None, None)


@pytest.mark.parametrize("asker", [b"", TOKEN[:-1], TOKEN + b" ", b"x" * len(TOKEN)])
def test_another_token_is_refused_on_both_ends(asker):
    server, told = meet(TOKEN, asker)
    assert isinstance(server, handshake.Refused)
    assert isinstance(told, handshake.Refused)
    assert TOKEN.decode() not in f"{server} {told}"


def test_a_server_without_the_token_is_found_out():
    """One that lets everybody in cannot answer for the token."""
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        with ours:
            ours.sendall(handshake._MAGIC + bytes(32))
            handshake._take(ours, len(handshake._MAGIC) + 64)
            ours.sendall(bytes(32))

    other = threading.Thread(target=pretend)
    other.start()
    with theirs, pytest.raises(handshake.Refused, match="does not know the token"):
        handshake.introduce(theirs, TOKEN)
    other.join()


def test_an_answer_cannot_be_used_again():
    """What an asker once said to one server is no answer to the next one's nonce."""
    heard = handshake._MAGIC + bytes(32) + handshake._mac(TOKEN, b"asker", bytes(64))
    ours, theirs = socket.socketpair()
    theirs.sendall(heard)
    with ours, theirs, pytest.raises(handshake.Refused):
        handshake.accept(ours, TOKEN)


def test_tcp_wants_a_token_before_anything_is_loaded(monkeypatch):
    monkeypatch.delenv(handshake.TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=handshake.TOKEN_VARIABLE):
        token_for("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="path of a Unix socket"):
        TeacherServer(None, None, "127.0.0.1:0")
    assert token_for("/run/teacher") == b""
    monkeypatch.setenv(handshake.TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="16 characters"):
        token_for("0.0.0.0:8000")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 5000, "nested"),
        (b"[]", "not a message"),
        (b"{}", "not a message"),
        (json.dumps({"tensors": [["a", "float32"]]}).encode(), "values to unpack"),
        (json.dumps({"tensors": [["a", "object", [1]]]}).encode(), "not a message"),
        (json.dumps({"tensors": [["a", "int8", [-1, -8]]]}).encode(), "no shape"),
        (json.dumps({"tensors": [["a", "int8", [2**40, 2**40]]]}).encode(), "bytes"),
        (json.dumps({"tensors": [["a", "int8", [0]]] * 65}).encode(), "65 tensors"),
    ],
)
def test_headers_are_checked_before_anything_is_allocated(header, reason):
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack("<Q", len(header)) + header)
    with ours, theirs, pytest.raises(ValueError, match=reason):
        wire.receive(ours)
