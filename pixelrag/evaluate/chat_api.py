"""Asks a model behind an OpenAI-compatible API for a reply; its failures stay failures.

A key is read from the environment, sent in the header alone, and cut out of every message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import httpx2

ATTEMPTS = 3
_LONGEST_PAUSE = 30.0
# Worth another try: too many requests, and what servers say when they are not well.
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})


class ReplyError(Exception):
    """No reply was had; the text says why. It is counted by the caller, never raised further."""


class ChatApi:
    """One model of one API; threads may share it.

    Args:
        url: of the API, such as http://localhost:8201/v1.
        model: its name there.
        key_variable: environment variable that holds the key, if one is needed.
        timeout: seconds for one attempt.
        pause: sleeps so many seconds between attempts; tests pass their own.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str,
        timeout: float = 60.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._where = f"{model} at {url}"
        self._endpoint = f"{url}/chat/completions"
        self._model = model
        self._key = os.environ.get(key_variable)
        self._key_variable = key_variable
        self._pause = pause
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx2.Client(headers=headers, timeout=timeout)

    def reply(self, content: str | list[dict[str, Any]]) -> str:
        """The reply to one user message, without white space around it.

        Args:
            content: text, or the parts of a message with images.

        Raises:
            ReplyError: no usable reply after three attempts, or a refusal that would come again.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._pause(2.0 ** (attempt - 1))
            try:
                response = self._client.post(self._endpoint, json=body)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return self._text_of(response)
            reason = self._refusal(response)
            if response.status_code not in _PASSING:
                break
            if wait := _seconds(response.headers.get("Retry-After")):
                self._pause(min(wait, _LONGEST_PAUSE))
        raise ReplyError(self._safe(f"{self._where}: {reason}"))

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def _text_of(self, response: httpx2.Response) -> str:
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            shown = self._safe(response.text[:200])
            raise ReplyError(f"{self._where}: a reply of another form: {shown!r}") from error
        if not isinstance(text, str) or not text.strip():
            raise ReplyError(f"{self._where}: an empty reply")
        return text.strip()

    def _refusal(self, response: httpx2.Response) -> str:
        if response.status_code in (401, 403):
            # Such replies may repeat the key.
            held = "was refused" if self._key else "is not set"
            return f"status {response.status_code}: the key in {self._key_variable} {held}"
        return f"status {response.status_code}: {response.text[:200]}"

    def _safe(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _seconds(value: str | None) -> float:
    """What Retry-After asks for; dates are not read."""
    return float(value) if value is not None and value.isdigit() else 0.0
