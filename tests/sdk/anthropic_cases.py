"""The `anthropic` package from PyPI against Tollgate."""

from __future__ import annotations

from typing import Iterator

import anthropic

from case import (
    HOURLY, PIECES, ROOMY, TEXT, TINY, URL, USAGE, WRONG, case, expect, expect_cut, expect_equal, expect_raises,
    expect_sdk_to_wait, new_stream, received, release,
)

QUESTION = {"max_tokens": 100, "messages": [{"role": "user", "content": "Grüße?"}]}


def client(key: str, **options: object) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key=key, base_url=URL, timeout=30, **options)


def message(key: str, model: str = "plain", **options: object) -> str:
    return client(key, **options).messages.create(model=model, **QUESTION).content[0].text


@case("plain message")
def _() -> None:
    answer = client(ROOMY).messages.with_raw_response.create(model="plain", **QUESTION)
    reply = answer.parse()
    expect_equal(reply.content[0].text, TEXT)
    expect_equal(reply.usage.output_tokens, USAGE["output"])
    expect_equal(answer.headers.get("x-ratelimit-limit"), "1000")
    expect(0 <= int(answer.headers["x-ratelimit-remaining"]) < 1000, str(answer.headers))


@case("streamed message, one by one")
def _() -> None:
    model, pieces, types = new_stream(), [], []
    for event in client(ROOMY).messages.create(model=model, stream=True, **QUESTION):
        types.append(event.type)
        if event.type == "content_block_delta":
            pieces.append(event.delta.text)
            release(model)
    expect_equal(pieces, PIECES)
    expect_equal([types[0], types[-1]], ["message_start", "message_stop"])


@case("streamed message by the stream helper")
def _() -> None:
    model, pieces = new_stream(), []
    with client(ROOMY).messages.stream(model=model, **QUESTION) as stream:
        for piece in stream.text_stream:
            pieces.append(piece)
            release(model)
        expect_equal(stream.get_final_message().usage.output_tokens, USAGE["output"])
    expect_equal(pieces, PIECES)


@case("wrong key raises AuthenticationError")
def _() -> None:
    error = expect_raises(anthropic.AuthenticationError, lambda: message(WRONG, "wrong-key-anthropic-python"))
    expect("key" in error.message.lower(), error.message)
    expect_equal(error.body["error"]["type"], "authentication_error")
    expect_equal(received("wrong-key-anthropic-python"), [])


@case("over the limit raises RateLimitError")
def _() -> None:
    expect_equal(message(HOURLY), TEXT)
    error = expect_raises(anthropic.RateLimitError, lambda: message(HOURLY, max_retries=0))
    expect("limit" in error.body["error"]["message"].lower(), error.message)
    expect_equal(error.body["error"]["type"], "rate_limit_error")
    expect(3500 < int(error.response.headers["retry-after"]) <= 3600, str(error.response.headers))


@case("a refusal for an hour is not retried")
def _() -> None:
    error = expect_raises(anthropic.RateLimitError, lambda: message(HOURLY))
    expect_equal(error.response.headers.get("x-should-retry"), "false")
    expect_equal(error.response.request.headers.get("x-stainless-retry-count"), "0")


@case("refused first, waits for Retry-After, succeeds")
def _() -> None:
    patient = client(TINY)
    expect_sdk_to_wait(lambda model: patient.messages.create(model=model, **QUESTION).content[0].text)


def pieces_of(model: str) -> Iterator[str]:
    for event in client(ROOMY).messages.create(model=model, stream=True, **QUESTION):
        if event.type == "content_block_delta":
            yield event.delta.text


@case("stream cut inside an event raises")
def _() -> None:
    expect_cut("cut-inside-event", pieces_of)


@case("stream cut between events raises")
def _() -> None:
    expect_cut("cut-between-events", pieces_of)
