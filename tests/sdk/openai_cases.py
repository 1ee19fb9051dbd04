"""The `openai` package from PyPI against Tollgate."""

from __future__ import annotations

from typing import Iterator

import openai

from case import (
    HOURLY, PIECES, ROOMY, TEXT, TINY, URL, USAGE, WRONG, case, expect, expect_cut, expect_equal, expect_raises,
    expect_sdk_to_wait, new_stream, received, release,
)

QUESTION = [{"role": "user", "content": "Grüße?"}]


def client(key: str, **options: object) -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"{URL}/v1", timeout=30, **options)


def chat(key: str, model: str = "plain", **options: object) -> str:
    answer = client(key, **options).chat.completions.create(model=model, messages=QUESTION)
    return answer.choices[0].message.content


@case("plain chat completion")
def _() -> None:
    answer = client(ROOMY).chat.completions.with_raw_response.create(model="plain", messages=QUESTION)
    completion = answer.parse()
    expect_equal(completion.choices[0].message.content, TEXT)
    expect_equal(completion.usage.total_tokens, USAGE["input"] + USAGE["output"])
    expect_equal(answer.headers.get("x-ratelimit-limit"), "1000")
    expect(0 <= int(answer.headers["x-ratelimit-remaining"]) < 1000, str(answer.headers))


@case("plain response")
def _() -> None:
    answer = client(ROOMY).responses.create(model="plain", input="Grüße?")
    expect_equal(answer.output_text, TEXT)
    expect_equal(answer.usage.output_tokens, USAGE["output"])


@case("streamed chat completion, one by one")
def _() -> None:
    model, pieces, usage = new_stream(), [], None
    stream = client(ROOMY).chat.completions.create(
        model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            release(model)
    expect_equal(pieces, PIECES)
    expect_equal(usage.completion_tokens, USAGE["output"])


@case("streamed response, one by one")
def _() -> None:
    model, pieces, types = new_stream(), [], []
    for event in client(ROOMY).responses.create(model=model, input="Grüße?", stream=True):
        types.append(event.type)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
            release(model)
    expect_equal(pieces, PIECES)
    expect_equal([types[0], types[-1]], ["response.created", "response.completed"])


@case("wrong key raises AuthenticationError")
def _() -> None:
    error = expect_raises(openai.AuthenticationError, lambda: chat(WRONG, "wrong-key-openai-python"))
    expect("key" in error.message.lower(), error.message)
    expect_equal([error.type, error.code], ["authentication_error", "invalid_api_key"])
    expect_equal(received("wrong-key-openai-python"), [])


@case("over the limit raises RateLimitError")
def _() -> None:
    expect_equal(chat(HOURLY), TEXT)
    error = expect_raises(openai.RateLimitError, lambda: chat(HOURLY, max_retries=0))
    expect("limit" in error.message.lower(), error.message)
    expect_equal(error.code, "rate_limit_exceeded")
    expect(3500 < int(error.response.headers["retry-after"]) <= 3600, str(error.response.headers))


@case("a refusal for an hour is not retried")
def _() -> None:
    error = expect_raises(openai.RateLimitError, lambda: chat(HOURLY))
    expect_equal(error.response.headers.get("x-should-retry"), "false")
    expect_equal(error.response.request.headers.get("x-stainless-retry-count"), "0")


@case("refused first, waits for Retry-After, succeeds")
def _() -> None:
    patient = client(TINY)
    expect_sdk_to_wait(
        lambda model: patient.chat.completions.create(model=model, messages=QUESTION).choices[0].message.content
    )


def chat_pieces(model: str) -> Iterator[str]:
    for chunk in client(ROOMY).chat.completions.create(model=model, messages=QUESTION, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def response_pieces(model: str) -> Iterator[str]:
    for event in client(ROOMY).responses.create(model=model, input="Grüße?", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


@case("stream cut inside an event raises")
def _() -> None:
    expect_cut("cut-inside-event", chat_pieces)


@case("stream cut between events raises")
def _() -> None:
    expect_cut("cut-between-events", chat_pieces)


@case("streamed response that is cut raises")
def _() -> None:
    expect_cut("cut-between-events", response_pieces)
