"""A teacher in another process, or on another host, asked over a socket.

The token ids go there (4 bytes a token), the final hidden states of the supervised tokens come back
(8 KB each at a width of 4,096 in bf16, half in int8), the head once. `wire.py` says how.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from pixelrag.errors import ConfigError, EngineError, ProvenanceError
from pixelrag.losses.kd import Head, Projected
from pixelrag.models.handshake import (
    MIN_TOKEN,
    TOKEN_VARIABLE,
    accept,
    introduce,
    shared_token,
)
from pixelrag.models.rows import Rows
from pixelrag.models.state_codec import Codec, decode, encode
from pixelrag.models.teacher import LiveTeacher, TeacherRequest
from pixelrag.models.wire import DTYPES, connected, is_path, listening, receive, send

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a served teacher says of itself.

    Attributes:
        teacher: name of the model.
        dtype: of its states.
        vocab_size: real tokens.
        vocabulary: fingerprint of the map from id to token over these.
        codec: `exact` or `int8`.
        isolated: it has been tried that documents of a row do not see each other.
        logit_scale, soft_cap: of the head.
    """

    teacher: str
    dtype: str
    vocab_size: int
    vocabulary: str
    codec: Codec
    isolated: bool
    logit_scale: float
    soft_cap: float | None


class RemoteTeacher:
    """Asks a served teacher.

    Args:
        address: path of its Unix socket, or host:port.
        device: where answers are needed.
        timeout_seconds: for an answer.

    Raises:
        EngineError: nobody listens there, or the other side is no served teacher, or one of the
            two does not know the other's token.
    """

    def __init__(self, address: str, device: torch.device, timeout_seconds: float = 600) -> None:
        self._address = address
        self._device = device
        try:
            self._socket = connected(address, timeout_seconds)
        except OSError as error:
            raise EngineError(
                f"teacher.path {address}: no teacher answers there ({error}); start one with "
                "`pixelrag teacher`, or set teacher.source live"
            ) from error
        try:
            introduce(self._socket, shared_token())
        except OSError as error:
            self._socket.close()
            raise EngineError(
                f"teacher.path {address}: {error}; set {TOKEN_VARIABLE} to what the teacher was "
                "started with"
            ) from error
        header, _ = self._ask({"ask": "greeting"}, {})
        try:
            self.greeting = Greeting(**header["greeting"])
            self._dtype = DTYPES[self.greeting.dtype]
        except (KeyError, TypeError) as error:
            raise EngineError(f"teacher.path {address}: no teacher of this version") from error
        self._head: Head | None = None

    @property
    def head(self) -> Head:
        """The teacher's head, fetched once."""
        if self._head is None:
            _, tensors = self._ask({"ask": "head"}, {})
            weights = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            self._head = Head(
                weights["weight"],
                weights.get("bias"),
                None,
                logit_scale=self.greeting.logit_scale,
                soft_cap=self.greeting.soft_cap,
            )
        return self._head

    def answer(self, request: TeacherRequest) -> Projected:
        """Send the rows, get the states of their supervised tokens.

        Raises:
            EngineError: the connection broke, or the other side failed; with its reason.
        """
        rows = request.rows
        _, parts = self._ask(
            {"ask": "states", "bounds": list(rows.bounds), "max_length": rows.max_length},
            {
                "input_ids": rows.input_ids_BT,
                "position_ids": rows.position_ids_BT,
                "supervised": request.supervised_N,
            },
        )
        states_NH = decode(parts, self._dtype)
        return Projected(states_NH.to(self._device), self.head)

    def _ask(
        self, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        try:
            send(self._socket, header, tensors)
            reply = receive(self._socket)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"teacher.path {self._address}: the connection to the teacher broke ({error})"
            ) from error
        if reply is None:
            raise EngineError(f"teacher.path {self._address}: the teacher hung up")
        if "error" in reply[0]:
            raise EngineError(f"the teacher at {self._address} failed: {reply[0]['error']}")
        return reply

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_for(address: str) -> bytes:
    """What askers at an address must know: the environment's token, perhaps none at a path.

    Raises:
        ConfigError: host:port without a token: anyone who reaches the port could ask.
    """
    token = shared_token()
    if not is_path(address) and len(token) < MIN_TOKEN:
        raise ConfigError(
            f"--listen {address}: TCP needs a token of {MIN_TOKEN} characters or more in the "
            f"environment variable {TOKEN_VARIABLE}, here and where the job runs; or listen on the "
            "path of a Unix socket, which is its owner's alone"
        )
    return token


class TeacherServer:
    """Serves a live teacher to any number of askers, one question at a time.

    Args:
        teacher: answers.
        greeting: what it says of itself.
        address: path of a Unix socket to make, or host:port.

    Raises:
        ConfigError: see `token_for`.
        EngineError: the address cannot be listened on, e.g. because another server does.
    """

    def __init__(self, teacher: LiveTeacher, greeting: Greeting, address: str) -> None:
        self._teacher = teacher
        self._greeting = greeting
        self._turn = threading.Lock()
        self.address = address
        self._token = token_for(address)
        self._closed = False
        try:
            self._socket = listening(address)
        except OSError as error:
            raise EngineError(f"{address}: cannot be listened on ({error})") from error

    def serve(self) -> None:
        """Answer until `close` is called from another thread, or the process is interrupted."""
        logger.info("teacher %s listens on %s", self._greeting.teacher, self.address)
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("nobody can connect for now: %s", error)
                time.sleep(1)  # out of file handles, which other askers give back
                continue
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            try:
                accept(connection, self._token)
                while (question := receive(connection)) is not None:
                    try:
                        with self._turn:
                            header, tensors = self._reply(*question)
                    except Exception as error:  # noqa: BLE001 - told to the asker, who stops
                        logger.error("a question could not be answered: %s", error)
                        header, tensors = {"error": f"{type(error).__name__}: {error}"}, {}
                    send(connection, header, tensors)
            except (OSError, ValueError) as error:
                logger.warning("an asker is gone: %s", error)

    def _reply(
        self, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if header["ask"] == "greeting":
            return {"greeting": asdict(self._greeting)}, {}
        if header["ask"] == "head":
            head = self._teacher.head
            weights = {"weight": head.weight_VH, "bias": head.bias_V}
            return {}, {n: t.cpu() for n, t in weights.items() if t is not None}
        if header["ask"] != "states":
            raise ProvenanceError(f"got the question {header['ask']!r}")
        rows = Rows(
            tensors["input_ids"],
            tensors["position_ids"],
            tuple(header["bounds"]),
            torch.tensor(header["bounds"], dtype=torch.int32),
            header["max_length"],
        )
        answer = self._teacher.answer(TeacherRequest(rows, tensors["supervised"]))
        if not isinstance(answer, Projected):
            raise ProvenanceError("the teacher's head cannot be used apart from its model")
        return {}, encode(answer.hidden_TH, self._greeting.codec)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if is_path(self.address):
            Path(self.address).unlink(missing_ok=True)
