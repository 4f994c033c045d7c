"""Messages over a socket: a JSON header and raw tensors. No objects are pickled.

A message is the length of the header, the header, and the bytes of the tensors it lists.

An address is the path of a Unix socket, which only its owner may use, or `host:port`. Who may talk
there is decided before the first message, see `pixelrag.models.handshake`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pixelrag.json_text import parse_json

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 1 << 20
_MAX_TENSOR = 1 << 36
_MAX_TENSORS = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
        torch.int8,
    )
}  # fmt: skip


def send(
    connection: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Send one message."""
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    ]
    text = json.dumps({**header, "tensors": listed}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().cpu().view(-1)
        connection.sendall(flat.view(torch.uint8).numpy().data)


def receive(
    connection: socket.socket,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Receive one message; None where the other side has hung up between messages.

    Raises:
        ValueError: what comes is no message.
        OSError: the connection broke in the middle of one.
    """
    start = _exactly(connection, _LENGTH.size, may_end=True)
    if start is None:
        return None
    (size,) = _LENGTH.unpack(start)
    if size > _MAX_HEADER:
        raise ValueError("not a message of pixelrag")
    try:
        header = parse_json(bytes(_exactly(connection, size) or b""), finite=False)
        listed = [(str(name), DTYPES[kind], list(shape)) for name, kind, shape in header["tensors"]]
        del header["tensors"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of pixelrag: {error!r}") from error
    if len(listed) > _MAX_TENSORS:
        raise ValueError(f"{len(listed)} tensors in a message")
    tensors = {}
    for name, dtype, shape in listed:
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"tensor {name}: no shape {shape}")
        count = math.prod(shape) * dtype.itemsize
        if count > _MAX_TENSOR:
            raise ValueError(f"tensor {name}: {count} bytes")
        if count == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            tensors[name] = torch.frombuffer(_exactly(connection, count), dtype=dtype).view(shape)
    return header, tensors


def _exactly(connection: socket.socket, size: int, *, may_end: bool = False) -> bytearray | None:
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        got = connection.recv_into(view[done:])
        if got == 0:
            if may_end and done == 0:
                return None
            raise ConnectionError("it ended in the middle of a message")
        done += got
    return buffer


def is_path(address: str) -> bool:
    """Whether an address is a Unix socket's path rather than host:port."""
    host, colon, port = address.rpartition(":")
    return not (colon and host and port.isdigit())


def connected(address: str, timeout_seconds: float) -> socket.socket:
    """A connection to what listens there.

    Raises:
        OSError: nothing does.
    """
    if not is_path(address):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=timeout_seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_seconds)
    connection.connect(address)
    return connection


def listening(address: str) -> socket.socket:
    """A socket that listens there; what a dead server left of a Unix socket is replaced.

    Raises:
        OSError: the address is taken, or cannot be used.
    """
    if not is_path(address):
        host, _, port = address.rpartition(":")
        return socket.create_server((host, int(port)))
    path = Path(address)
    if path.is_socket() and not _answers(address):
        path.unlink()  # a dead server's
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _only_mine():
        listener.bind(address)
    listener.listen()
    return listener


def _answers(address: str) -> bool:
    try:
        connected(address, 5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _only_mine() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
