"""Replies from a stub of an OpenAI-compatible API, and what becomes of its failures."""

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pixelrag.config.tile_questions import TileQuestionOptions
from pixelrag.data.tile_questions import TileQuestion
from pixelrag.evaluate.chat_api import ChatApi, ReplyError
from pixelrag.evaluate.tile_answers import GradedAnswer, TileAnswerer, answer_figures

KEY = "sk-not-for-any-log"


class Stub:
    """A server on this machine whose `behave(request, number)` gives status, body and headers."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.behave: Callable = lambda request, number: (200, said("A"), {})
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(body | {"path": self.path})
                stub.headers.append(dict(self.headers))
                status, content, headers = stub.behave(body, len(stub.requests))
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def said(text: str | None) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def stub(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Stub()
    yield server
    server.close()


@pytest.fixture
def api(stub, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    pauses: list[float] = []
    made = ChatApi(stub.url, "m", key_variable="SOME_KEY", timeout=5, pause=pauses.append)
    made.pauses = pauses
    yield made
    made.close()


def test_a_reply(api, stub):
    stub.behave = lambda request, number: (200, said("  Paris \n"), {})
    assert api.reply("Where?") == "Paris"
    assert stub.requests[0]["path"] == "/v1/chat/completions"
    assert stub.requests[0]["model"] == "m"
    assert stub.requests[0]["messages"] == [{"role": "user", "content": "Where?"}]
    assert stub.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_what_passes_is_tried_again(api, stub):
    replies = [(503, b"later", {}), (429, b"slow", {"Retry-After": "7"}), (200, said("B"), {})]
    stub.behave = lambda request, number: replies[number - 1]
    assert api.reply("x") == "B"
    assert api.pauses == [1.0, 7.0, 2.0]


@pytest.mark.parametrize(
    ("reply", "count", "message"),
    [
        ((500, b"sick", {}), 3, "m at http://127.* status 500: sick"),
        ((404, b"no such model", {}), 1, "status 404: no such model"),
        ((401, KEY.encode(), {}), 1, "status 401: the key in SOME_KEY was refused"),
        ((400, b"bad " + KEY.encode(), {}), 1, r"status 400: bad \*\*\*"),
        ((200, b"<html>", {}), 1, "a reply of another form: '<html>'"),
        ((200, {"choices": []}, {}), 1, "a reply of another form"),
        ((200, said(" "), {}), 1, "an empty reply"),
        ((200, said(None), {}), 1, "an empty reply"),
    ],
)
def test_what_is_no_reply(api, stub, reply, count, message):
    stub.behave = lambda request, number: reply
    with pytest.raises(ReplyError, match=message) as caught:
        api.reply("x")
    assert KEY not in str(caught.value)
    assert len(stub.requests) == count


def test_nobody_there(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    api = ChatApi("http://127.0.0.1:9/v1", "m", key_variable="SOME_KEY", pause=lambda _: None)
    with pytest.raises(ReplyError, match=r"m at http://127\.0\.0\.1:9/v1: ConnectError"):
        api.reply("x")


@pytest.fixture
def answerer(stub, monkeypatch):
    monkeypatch.setenv("PIXELRAG_READER_API_KEY", KEY)
    options = TileQuestionOptions(
        miniv8="f", reader_url=stub.url, reader_model="r", grader_url=stub.url, grader_model="g"
    )
    return TileAnswerer(options, pause=lambda _: None)


QUESTION = TileQuestion("7", "Which {city}?", "Paris", (0,))


@pytest.mark.parametrize(
    ("grade", "expected"),
    [("A", "correct"), ("**B**", "incorrect"), ("C: no attempt", "not_attempted")],
)
def test_an_answer_is_read_from_tiles_and_graded(answerer, stub, tiles, grade, expected):
    stub.behave = lambda request, _: (200, said("Lyon" if request["model"] == "r" else grade), {})
    graded = answerer(QUESTION, tiles[:2])
    assert graded == GradedAnswer("7", "Lyon", expected)
    reader, grader = stub.requests
    *images, text = reader["messages"][0]["content"]
    assert len(images) == 2
    assert all(i["image_url"]["url"].startswith("data:image/png;base64,") for i in images)
    assert "Which {city}?" in text["text"]
    assert "Paris" not in text["text"]
    asked = grader["messages"][0]["content"]
    assert all(word in asked for word in ("Which {city}?", "Paris", "Lyon"))
    assert "Authorization" not in stub.headers[1], "the reader's key is not the grader's"


@pytest.mark.parametrize("broken", ["r", "g"])
def test_a_failure_is_no_wrong_answer(answerer, stub, tiles, broken, caplog):
    def behave(request, _):
        return (500, b"sick", {}) if request["model"] == broken else (200, said("A"), {})

    stub.behave = behave
    failed = answerer(QUESTION, tiles[:1])
    assert failed.grade == "failed"
    assert failed.answer == (None if broken == "r" else "A")
    assert "status 500" in failed.failure
    right = GradedAnswer("8", "x", "correct")
    with caplog.at_level(logging.WARNING, "pixelrag"):
        figures = answer_figures([failed, right, GradedAnswer("9", "y", "incorrect"), right])
    assert figures["miniv8/qa_accuracy"] == pytest.approx(2 / 3)
    assert figures["miniv8/qa_failed"] == 0.25
    assert answer_figures([failed]) == {"miniv8/qa_failed": 1.0}
    assert "The first, 7" in caplog.text
    assert KEY not in caplog.text


def test_a_grade_that_is_none_is_a_failure(answerer, stub, tiles):
    stub.behave = lambda request, _: (200, said("Correct, I think"), {})
    assert answerer(QUESTION, []).grade == "failed"
    assert answerer(QUESTION, [tiles[0].with_name("gone.png")]).grade == "failed"
