"""curl against Tollgate: what the README shows, over HTTP/2, which no SDK here speaks yet, and over HTTP/1.1."""

from __future__ import annotations

import json
import subprocess

from case import (
    HOURLY, MOST_CALLS_TO_A_REFUSAL, PIECES, PIECES_BEFORE_CUT, ROOMY, TEXT, TINY, URL, WRONG, case, expect, expect_equal,
    new_stream, received, release,
)


def command(key: str, model: str, *options: str, stream: bool = False) -> list[str]:
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "Grüße?"}]}
    # `-q` keeps a ~/.curlrc out of it. The certificate comes from CURL_CA_BUNDLE.
    return [
        "curl", "-q", "--silent", "--show-error", "--max-time", "30", *options, f"{URL}/v1/chat/completions",
        "-H", f"X-API-Key: {key}", "-H", "Content-Type: application/json", "-d", json.dumps(body),
    ]


class Answer:
    """The last answer that one run of curl got."""

    def __init__(self, key: str, model: str = "plain", *options: str) -> None:
        format = "\n%{http_code} %{http_version}"
        run = subprocess.run(
            command(key, model, "--include", "--write-out", format, *options), stdout=subprocess.PIPE, check=True
        )
        text, _, numbers = run.stdout.decode().rpartition("\n")
        head, _, self.body = text.replace("\r\n", "\n").rpartition("\n\n")
        self.status, self.version = numbers.split()
        lines = [line.split(": ", 1) for line in head.split("\n") if ": " in line]
        self.headers = {name.lower(): value for name, value in lines}

    @property
    def text(self) -> str:
        return json.loads(self.body)["choices"][0]["message"]["content"]


def plain(wanted_version: str, *options: str) -> None:
    answer = Answer(ROOMY, "plain", *options)
    expect_equal([answer.status, answer.version, answer.text], ["200", wanted_version, TEXT])
    expect_equal(answer.headers.get("x-ratelimit-limit"), "1000")


@case("plain chat completion over HTTP/2")
def _() -> None:
    plain("2")


@case("plain chat completion over HTTP/1.1")
def _() -> None:
    plain("1.1", "--http1.1")


def read_stream(model: str, *options: str) -> tuple[list[str], list[bytes], int]:
    """The pieces, all lines, and how curl ended."""
    pieces, lines = [], []
    arguments = command(ROOMY, model, "--no-buffer", *options, stream=True)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as curl:
        for line in curl.stdout:
            lines.append(line)
            piece = piece_in(line)
            if piece:
                pieces.append(piece)
                release(model)
    return pieces, lines, curl.returncode


def piece_in(line: bytes) -> str | None:
    try:
        choices = json.loads(line[len(b"data: "):])["choices"]
    except ValueError:  # An empty line, the end mark, or what a cut left of an event.
        return None
    return choices[0]["delta"].get("content") if choices else None


def streamed(*options: str) -> None:
    pieces, lines, returncode = read_stream(new_stream(), *options)
    expect_equal([pieces, returncode], [PIECES, 0])
    expect_equal(lines[-2:], [b"data: [DONE]\n", b"\n"])


@case("streamed over HTTP/2, one by one")
def _() -> None:
    streamed()


@case("streamed over HTTP/1.1, one by one")
def _() -> None:
    streamed("--http1.1")


@case("wrong key is answered 401")
def _() -> None:
    answer = Answer(WRONG, "wrong-key-curl")
    expect_equal([answer.status, json.loads(answer.body)["error"]["code"]], ["401", "invalid_api_key"])
    expect_equal(received("wrong-key-curl"), [])


@case("over the limit is answered 429")
def _() -> None:
    expect_equal(Answer(HOURLY).status, "200")
    answer = Answer(HOURLY)
    expect_equal([answer.status, json.loads(answer.body)["error"]["code"]], ["429", "rate_limit_exceeded"])
    expect(3500 < int(answer.headers["retry-after"]) <= 3600, str(answer.headers))
    expect_equal(answer.headers.get("x-ratelimit-remaining"), "0")
    expect_equal(answer.headers.get("x-ratelimit-source"), "tollgate")


@case("refused first, waits for Retry-After, succeeds")
def _() -> None:
    statuses = []
    while "429" not in statuses and len(statuses) < MOST_CALLS_TO_A_REFUSAL:
        statuses.append(Answer(TINY).status)
    expect_equal([statuses[:2], statuses[-1]], [["200", "200"], "429"])
    # One retry, after the seconds that Retry-After names. curl's own first pause, 1 s, would be too short.
    expect_equal(Answer(TINY, "plain", "--retry", "1").status, "200")


def cut(script: str, *options: str) -> None:
    pieces, _, returncode = read_stream(new_stream(script), *options)
    expect_equal(pieces, PIECES_BEFORE_CUT)
    expect(returncode != 0, "curl took the cut stream for a whole one")


@case("stream cut inside an event fails over HTTP/2")
def _() -> None:
    cut("cut-inside-event")


@case("stream cut between events fails over HTTP/2")
def _() -> None:
    cut("cut-between-events")


@case("stream cut between events fails over HTTP/1.1")
def _() -> None:
    cut("cut-between-events", "--http1.1")
