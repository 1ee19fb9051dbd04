"""A scripted LLM API over plain HTTP: chat completions, responses, messages and Gemini's content, plain or streamed.

The `model` of a request says what happens to the answer:

    plain                 the whole answer at once
    fails                 status 500, in the shape of the API
    one-by-one.ID         the next piece of text is sent only when `release(ID)` is called, so that a client which
                          reports a piece after it has seen the one before proves that nothing holds pieces back
    cut-between-events.ID the same, but the connection ends after three pieces, without the end of the chunked body
    cut-inside-event.ID   the same, in the middle of the fourth
    gzip.ID               the same as one-by-one, compressed and flushed after every event
    keepalive.ID          the same as one-by-one, with a sign of life behind every event, as this API's clients bear it
    silent.ID             the same as one-by-one, with a long silence before the last piece

Everything that arrives is kept: `of_model(M)` tells what reached the upstream.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.parse
import zlib
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECES = ["The ", "gate ", "öffnet ", "one ", "by ", "one", " ✓."]
PIECES_BEFORE_CUT = 3
USAGE = {"input": 11, "output": 7}

# A client that never sees the next piece must fail its own case, not hang the suite.
RELEASE_TIMEOUT_S = 20
SILENCE_S = 3
FAILURE = "The scripted upstream fails on purpose."


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


def sse(payload: dict, *, named: bool = True, is_text: bool = False, newline: str = "\n") -> Event:
    name = f"event: {payload['type']}{newline}" if named else ""
    return Event(f"{name}data: {json.dumps(payload, ensure_ascii=False)}{newline * 2}".encode(), is_text)


class OpenAi:
    """What OpenAI's two APIs have in common."""

    credential = ("authorization", "Bearer {}")
    # Not a line more: the Python SDK takes an empty one for the end of an event without data, if events have ids.
    keepalive = b": keepalive\n"
    error = {"error": {"message": FAILURE, "type": "server_error", "param": None, "code": "server_error"}}


class ChatCompletions(OpenAi):
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


class Responses(OpenAi):
    """OpenAI's responses: every event is named, and the last one repeats the whole answer."""

    def answer(self, model: str) -> dict:
        text = {"type": "output_text", "text": "".join(PIECES), "annotations": []}
        return {
            "id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": "completed",
            "output": [
                {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]},
            ],
            "usage": {
                "input_tokens": USAGE["input"], "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": USAGE["output"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": USAGE["input"] + USAGE["output"],
            },
        }

    def events(self, model: str) -> list[Event]:
        whole = self.answer(model)
        item = whole["output"][0]
        text = item["content"][0]
        in_item = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        started = {"status": "in_progress"}
        payloads = [
            {"type": "response.created", "response": {**whole, **started, "output": [], "usage": None}},
            {"type": "response.output_item.added", "output_index": 0, "item": {**item, **started, "content": []}},
            {"type": "response.content_part.added", **in_item, "part": {**text, "text": ""}},
            *({"type": "response.output_text.delta", **in_item, "delta": piece, "logprobs": []} for piece in PIECES),
            {"type": "response.output_text.done", **in_item, "text": text["text"], "logprobs": []},
            {"type": "response.content_part.done", **in_item, "part": text},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]
        return [
            sse({**payload, "sequence_number": number}, is_text="delta" in payload)
            for number, payload in enumerate(payloads)
        ]


class Messages:
    """Anthropic's messages: usage is spread over the first event and the last but one."""

    credential = ("x-api-key", "{}")
    keepalive = sse({"type": "ping"}).data
    error = {"type": "error", "error": {"type": "api_error", "message": FAILURE}, "request_id": "req_1"}

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


class Gemini:
    """Gemini's content: the model stands in the path, every event repeats the usage so far.

    Its clients bear no comments.
    """

    credential = ("x-goog-api-key", "{}")
    keepalive = b"\n\n"
    error = {"error": {"code": 500, "message": FAILURE, "status": "INTERNAL"}}

    def part(self, text: str, finish_reason: str | None = None) -> dict:
        usage = {"promptTokenCount": USAGE["input"], "candidatesTokenCount": USAGE["output"]}
        candidate = {"index": 0, "content": {"role": "model", "parts": [{"text": text}]}}
        if finish_reason:
            candidate["finishReason"] = finish_reason
        return {"candidates": [candidate], "usageMetadata": {**usage, "totalTokenCount": sum(USAGE.values())}}

    def answer(self, model: str) -> dict:
        return {**self.part("".join(PIECES), "STOP"), "modelVersion": model}

    def events(self, model: str) -> list[Event]:
        reasons = [None] * (len(PIECES) - 1) + ["STOP"]
        parts = [self.part(piece, reason) for piece, reason in zip(PIECES, reasons)]
        return [sse(part, named=False, is_text=True, newline="\r\n") for part in parts]


FORMATS = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
GEMINI = Gemini()
GEMINI_PATH = re.compile(r"/v1(?:beta)?/models/([^/:]+):(generateContent|streamGenerateContent)")


def format_of(path: str) -> OpenAi | Messages | Gemini | None:
    """The format that is spoken on a path, without the query."""
    return GEMINI if GEMINI_PATH.fullmatch(path) else FORMATS.get(path)


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


def asked(path: str, body: bytes) -> tuple[str, bool]:
    """The model of a request, and whether it wants a stream."""
    in_path = GEMINI_PATH.fullmatch(path)
    if in_path:
        return in_path[1], in_path[2] == "streamGenerateContent"
    request = json.loads(body)
    return request["model"], bool(request.get("stream"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Each event must leave at once: Nagle's algorithm would join those that follow each other.
    disable_nagle_algorithm = True

    @property
    def upstream(self) -> Upstream:
        return self.server.upstream

    def log_message(self, *_: object) -> None:
        """Silent: the suite prints what matters."""

    def do_POST(self) -> None:
        body = self.read_body()
        path = urllib.parse.urlsplit(self.path).path
        format = format_of(path)
        if format is None:
            return self.reply(404, {"error": {"message": f"no {self.path} here"}})
        model, streams = asked(path, body)
        self.upstream.keep(Received(self.path, list(self.headers.items()), body, model))
        if model == "fails":
            self.reply(500, format.error)
        elif streams:
            self.stream(model, format)
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

    def stream(self, model: str, format: OpenAi | Messages | Gemini) -> None:
        script, _, stream = model.partition(".")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16) if script == "gzip" else None
        if self.compressor:
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        texts = 0
        for event in format.events(model):
            if event.is_text and texts and stream and not self.wait_for_release(stream):
                return self.cut(b"")
            if event.is_text and texts == PIECES_BEFORE_CUT and script.startswith("cut-"):
                return self.cut(event.data if script == "cut-inside-event" else b"")
            texts += event.is_text
            if script == "silent" and texts == len(PIECES):
                time.sleep(SILENCE_S)
            self.send_event(event.data)
            if script == "keepalive":
                self.send_chunk(format.keepalive)
        if self.compressor:
            self.send_chunk(self.compressor.flush())
        self.wfile.write(b"0\r\n\r\n")

    def send_event(self, data: bytes) -> None:
        if self.compressor:
            data = self.compressor.compress(data) + self.compressor.flush(zlib.Z_SYNC_FLUSH)
        self.send_chunk(data)

    def wait_for_release(self, stream: str) -> bool:
        return self.upstream.release(stream).acquire(timeout=RELEASE_TIMEOUT_S)

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def cut(self, unfinished: bytes) -> None:
        """Ends the connection as a crashed server does: the head promised a last chunk, and it never comes."""
        if unfinished:
            self.send_chunk(unfinished[: len(unfinished) // 2])
        self.close_connection = True
