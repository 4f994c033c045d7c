"""The two ends of a connection show each other that they know the same token; neither sends it.

Each sends a fresh nonce. The asker answers with an HMAC over both, and the server with another one
once it has found the asker's right, so a stranger learns nothing from it. What follows is neither
encrypted nor signed: between hosts that need more, tunnel it (ssh -L).
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket

TOKEN_VARIABLE = "PIXELRAG_TEACHER_TOKEN"  # noqa: S105 - the name, no token
MIN_TOKEN = 16
_MAGIC = b"pixelrag teacher 2\n"
_NONCE, _MAC = 32, 32
_SECONDS = 20.0


class Refused(ConnectionError):
    """The other end does not know the token, or is no pixelrag."""


def shared_token() -> bytes:
    """The token of the environment; empty where there is none."""
    return os.environ.get(TOKEN_VARIABLE, "").encode()


def accept(connection: socket.socket, token: bytes) -> None:
    """Let an asker show that it knows the token, then show it the same.

    Raises:
        Refused: it does not.
        OSError: it went away, or kept silent.
    """
    before = connection.gettimeout()
    connection.settimeout(_SECONDS)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_MAGIC + ours)
    theirs = _greeting(connection)
    if not hmac.compare_digest(_take(connection, _MAC), _mac(token, b"asker", ours + theirs)):
        raise Refused("the token is another one")
    connection.sendall(_mac(token, b"server", ours + theirs))
    connection.settimeout(before)


def introduce(connection: socket.socket, token: bytes) -> None:
    """Show a server that this end knows the token, and let it show the same.

    Raises:
        Refused: one of the two does not.
        OSError: it went away, or kept silent.
    """
    before = connection.gettimeout()
    connection.settimeout(_SECONDS)
    theirs = _greeting(connection)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_MAGIC + ours + _mac(token, b"asker", theirs + ours))
    try:
        proof = _take(connection, _MAC)
    except ConnectionError as error:
        raise Refused(f"it refused the token of {TOKEN_VARIABLE}") from error
    if not hmac.compare_digest(proof, _mac(token, b"server", theirs + ours)):
        raise Refused(f"it does not know the token of {TOKEN_VARIABLE}")
    connection.settimeout(before)


def _greeting(connection: socket.socket) -> bytes:
    if _take(connection, len(_MAGIC)) != _MAGIC:
        raise Refused("no teacher of this version")
    return _take(connection, _NONCE)


def _mac(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")


def _take(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        if not (part := connection.recv(size - len(taken))):
            raise ConnectionError("the other end hung up")
        taken += part
    return taken
