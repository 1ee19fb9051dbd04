"""A scripted LLM API: chat completions, responses and messages, plain or streamed, over plain HTTP.

The `model` of a request says what happens to the answer:

    plain                 the whole answer at once
    one-by-one/ID         the next piece of text is sent only after `POST /control/release/ID`, so that a client which releases a
                          piece after it has seen the one before proves that nothing on the way holds pieces back
    cut-between-events/ID the same, but the connection ends after three pieces, without the end of the chunked body
    cut-inside-event/ID   the same, in the middle of the fourth

Everything that arrives is kept: `GET /control/received?model=M` tells a client process what reached the upstream.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECES = ["The ", "gate ", "öffnet ", "one ", "by ", "one", " ✓."]
PIECES_BEFORE_CUT = 3
USAGE = {"input": 11, "output": 7}

# A client that never releases the next piece must fail its own case, not hang the suite.
RELEASE_TIMEOUT_S = 20


@dataclass
class Received:
    """One request as it arrived."""

    target: str
    headers: list[tuple[str, str]]
    body: bytes
    model: str

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def contains(self, secret: str) -> bool:
        return any(secret in text for text in [self.target, self.body.decode(errors="replace"), *map(str, self.headers)])


@dataclass
class Event:
    """One server-sent event, and whether it carries a piece of the text."""

    data: bytes
    is_text: bool = False


def sse(payload: dict, *, named: bool = True, is_text: bool = False) -> Event:
    name = f"event: {payload['type']}\n" if named else ""
    return Event(f"{name}data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode(), is_text)


class ChatCompletions:
    """OpenAI's chat completions: unnamed events, usage in a chunk of its own, `[DONE]` at the end."""

    usage = {
        "prompt_tokens": USAGE["input"],
        "completion_tokens": USAGE["output"],
        "total_tokens": USAGE["input"] + USAGE["output"],
    }

    def answer(self, model: str) -> dict:
        message = {"role": "assistant", "content": "".join(PIECES)}
        return {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "usage": self.usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    def events(self, model: str) -> list[Event]:
        def chunk(choices: list[dict], usage: dict | None = None, is_text: bool = False) -> Event:
            head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
            return sse({**head, "choices": choices, "usage": usage}, named=False, is_text=is_text)

        def choice(delta: dict, finish_reason: str | None = None) -> list[dict]:
            return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]

        return [
            *(chunk(choice({"content": piece}), is_text=True) for piece in PIECES),
            chunk(choice({}, "stop")),
            chunk([], self.usage),
            Event(b"data: [DONE]\n\n"),
        ]


class Responses:
    """OpenAI's responses: every event is named, and the last one repeats the whole answer."""

    def answer(self, model: str) -> dict:
        text = {"type": "output_text", "text": "".join(PIECES), "annotations": []}
        return {
            "id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": "completed",
            "output": [{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}],
            "usage": {
                "input_tokens": USAGE["input"], "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": USAGE["output"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": USAGE["input"] + USAGE["output"],
            },
        }

    def events(self, model: str) -> list[Event]:
        place = {"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
        started = {**self.answer(model), "status": "in_progress", "output": [], "usage": None}
        last = len(PIECES) + 1
        return [
            sse({"type": "response.created", "sequence_number": 0, "response": started}),
            *(sse({**place, "sequence_number": at, "delta": piece}, is_text=True) for at, piece in enumerate(PIECES, 1)),
            sse({"type": "response.completed", "sequence_number": last, "response": self.answer(model)}),
        ]


class Messages:
    """Anthropic's messages: usage is spread over the first event and the last but one."""

    def answer(self, model: str) -> dict:
        return {
            "id": "msg_1", "type": "message", "role": "assistant", "model": model,
            "content": [{"type": "text", "text": "".join(PIECES)}],
            "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": USAGE["input"], "output_tokens": USAGE["output"]},
        }

    def events(self, model: str) -> list[Event]:
        def delta(piece: str) -> Event:
            text = {"type": "text_delta", "text": piece}
            return sse({"type": "content_block_delta", "index": 0, "delta": text}, is_text=True)

        usage = {"input_tokens": USAGE["input"], "output_tokens": 1}
        started = {**self.answer(model), "content": [], "stop_reason": None, "usage": usage}
        stopped = {"stop_reason": "end_turn", "stop_sequence": None}
        return [
            sse({"type": "message_start", "message": started}),
            sse({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            sse({"type": "ping"}),
            *map(delta, PIECES),
            sse({"type": "content_block_stop", "index": 0}),
            sse({"type": "message_delta", "delta": stopped, "usage": {"output_tokens": USAGE["output"]}}),
            sse({"type": "message_stop"}),
        ]


FORMATS = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}


class Upstream:
    """The server, on a free loopback port while the `with` block runs."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.releases: dict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.upstream = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Upstream:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def release(self, stream: str) -> threading.Semaphore:
        with self.lock:
            return self.releases[stream]

    def keep(self, received: Received) -> None:
        with self.lock:
            self.received.append(received)

    def of_model(self, model: str) -> list[Received]:
        with self.lock:
            return [received for received in self.received if received.model == model]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Each event must leave at once: Nagle's algorithm would join those that follow each other.
    disable_nagle_algorithm = True

    @property
    def upstream(self) -> Upstream:
        return self.server.upstream

    def log_message(self, *_: object) -> None:
        """Silent: the suite prints what matters."""

    def do_GET(self) -> None:
        target = urllib.parse.urlsplit(self.path)
        if target.path != "/control/received":
            return self.reply(404, {"error": {"message": f"no {target.path} here"}})
        model = urllib.parse.parse_qs(target.query)["model"][0]
        self.reply(200, [dict(received.headers) for received in self.upstream.of_model(model)])

    def do_POST(self) -> None:
        body = self.read_body()
        if self.path.startswith("/control/release/"):
            self.upstream.release(self.path.rpartition("/")[2]).release()
            return self.reply(200, {})
        format = FORMATS.get(urllib.parse.urlsplit(self.path).path)
        if format is None:
            return self.reply(404, {"error": {"message": f"no {self.path} here"}})
        request = json.loads(body)
        model = request["model"]
        self.upstream.keep(Received(self.path, list(self.headers.items()), body, model))
        if request.get("stream"):
            self.stream(model, format.events(model))
        else:
            self.reply(200, format.answer(model))

    def read_body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, status: int, payload: object) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, model: str, events: list[Event]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        script, _, stream = model.partition("/")
        texts = 0
        for event in events:
            if event.is_text and texts and stream and not self.wait_for_release(stream):
                return self.cut(b"")
            if event.is_text and texts == PIECES_BEFORE_CUT and script.startswith("cut-"):
                return self.cut(event.data if script == "cut-inside-event" else b"")
            texts += event.is_text
            self.send_chunk(event.data)
        self.wfile.write(b"0\r\n\r\n")

    def wait_for_release(self, stream: str) -> bool:
        return self.upstream.release(stream).acquire(timeout=RELEASE_TIMEOUT_S)

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def cut(self, unfinished: bytes) -> None:
        """Ends the connection as a crashed server does: the head promised a last chunk, and it never comes."""
        if unfinished:
            self.send_chunk(unfinished[: len(unfinished) // 2])
        self.close_connection = True
