"""The columns of the matrix: what every SDK must make of every answer."""

from __future__ import annotations

import re
import time
import uuid
from typing import Callable

from trial import Hangs, Reply, Trial
from upstream import FAILURE, PIECES, PIECES_BEFORE_CUT, USAGE

TEXT = "".join(PIECES)

# The gate's bound lies between the two. An upload that is refused by its size costs less than it may drain.
MAX_BODY_SIZE = "21MiB"
ALLOWED_SIZE = 20_000_000
TOO_LARGE = 23_000_000
# A reset in place of an answer is a race, which one try may win.
UPLOADS = 3

# The tier has room for one a second. On a very slow machine room may appear again before the next call, so a few more
# are tried.
MOST_CALLS_TO_A_REFUSAL = 8
# Longer than the first pause that any SDK makes on its own account, which is 2 s at most.
HOLDS_STILL_S = 3

# What the caller's developer must find in an error: a sentence, and the code of the dialect.
SENTENCES = {401: "invalid API key", 413: "larger than", 429: "Rate limit reached", 500: FAILURE}
CODES = {
    "openai": {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded", 500: "server_error"},
    "anthropic": {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"},
    "gemini": {401: "UNAUTHENTICATED", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL"},
}

# Only with keepalives that the proxy makes.
KEEPALIVE_CASE = "silence"

CASES: dict[str, Callable[[Trial], None]] = {}


def case(name: str) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    def keep(body: Callable[[Trial], None]) -> Callable[[Trial], None]:
        CASES[name] = body
        return body

    return keep


def expect(condition: object, otherwise: str) -> None:
    """An assertion that is not optimized away, and that says what it saw."""
    if not condition:
        raise AssertionError(otherwise)


def expect_equal(seen: object, wanted: object) -> None:
    expect(seen == wanted, f"expected {wanted!r}, got {seen!r}")


def expect_answer(reply: Reply) -> Reply:
    expect(not reply.raised, f"it raised {reply.raised} {reply.details}")
    expect_equal([reply.text, reply.tokens], [TEXT, USAGE["output"]])
    return reply


def expect_error(trial: Trial, status: int, reply: Reply) -> Reply:
    expect(reply.raised, f"expected {trial.sdk.errors[status]}, got the answer {reply.text!r}")
    expect_equal([reply.raised, reply.status], [trial.sdk.errors[status], status])
    for wanted in [SENTENCES[status], CODES[trial.sdk.dialect][status]]:
        expect(wanted in reply.details, f"no {wanted!r} in {reply.details}")
    return reply


def expect_refusal(trial: Trial, reply: Reply, seconds: range) -> None:
    """A 429 of the gate's own. Not every SDK shows the head of an answer that it made an error of."""
    expect_error(trial, 429, reply)
    if reply.headers is not None:
        expect(int(reply.headers["retry-after"]) in seconds, str(reply.headers))
        expect_equal(reply.headers.get("x-should-retry"), "false" if seconds[0] > 59 else None)
        shown = [reply.headers.get(name) for name in ["x-ratelimit-remaining", "x-ratelimit-source"]]
        expect_equal(shown, ["0", "tollgate"])


@case("plain")
def _(trial: Trial) -> None:
    reply = expect_answer(trial.call())
    if reply.headers is not None:
        expect_equal(reply.headers.get("x-ratelimit-limit"), "1000")
        expect(0 <= int(reply.headers["x-ratelimit-remaining"]) < 1000, str(reply.headers))


@case("base URL")
def _(trial: Trial) -> None:
    """With a version or without, with a slash or without: what people write leads to the same path."""
    bases = [None, "", "/"]
    # google-genai has the version as a setting of its own.
    if trial.sdk.adapter != "google-genai":
        version = "/v1beta" if trial.sdk.dialect == "gemini" else "/v1"
        bases += [version, f"{version}/"]
    targets = set()
    for base in bases:
        model = f"base-{uuid.uuid4()}"
        expect_answer(trial.call(model=model, base=base, retries=0))
        targets |= {got.target.replace(model, "MODEL") for got in trial.upstream.of_model(model)}
    expect(len(targets) == 1, f"they led to {targets}")


def expect_stream(trial: Trial, script: str) -> None:
    reply = expect_answer(trial.stream(script))
    expect_equal(reply.pieces, PIECES)


@case("stream")
def _(trial: Trial) -> None:
    expect_stream(trial, "one-by-one")


@case("gzip")
def _(trial: Trial) -> None:
    expect_stream(trial, "gzip")


@case("keepalive")
def _(trial: Trial) -> None:
    """A sign of life that the upstream sends passes, and no SDK takes it for a part of the answer."""
    expect_stream(trial, "keepalive")


@case(KEEPALIVE_CASE)
def _(trial: Trial) -> None:
    """The proxy itself gives signs of life while the upstream is silent."""
    expect_stream(trial, "silent")


def expect_cut(trial: Trial, script: str) -> None:
    """What came before the cut must arrive, and then an error. A clean end would pass for a whole answer."""
    reply = trial.stream(script)
    expect(reply.raised, f"the cut stream ended as if it were whole, after {reply.pieces!r}")
    expect_equal(reply.pieces, PIECES[:PIECES_BEFORE_CUT])


@case("cut")
def _(trial: Trial) -> None:
    expect_cut(trial, "cut-between-events")


@case("cut inside")
def _(trial: Trial) -> None:
    expect_cut(trial, "cut-inside-event")


@case("401")
def _(trial: Trial) -> None:
    model = f"wrong-key-{uuid.uuid4()}"
    expect_error(trial, 401, trial.call(tier="wrong", model=model))
    expect_equal(trial.upstream.of_model(model), [])


@case("413")
def _(trial: Trial) -> None:
    expect_error(trial, 413, trial.call(size=TOO_LARGE))


@case("500")
def _(trial: Trial) -> None:
    expect_error(trial, 500, trial.call(model="fails", retries=0))


@case("private CA")
def _(trial: Trial) -> None:
    """An authority of one's own is trusted when the variable names it, and not before."""
    reply = trial.call(gate=trial.private_gate, retries=0)
    expect(reply.raised and not reply.status, f"it took a certificate of nobody it knows: {reply}")
    expect(re.search("certificate", reply.details, re.IGNORECASE), f"it failed by something else: {reply.details}")
    expect_answer(trial.call(gate=trial.private_gate, program=trial.insider))


@case("429 1s")
def _(trial: Trial) -> None:
    """An SDK that retries waits by itself, as long as it is told, and succeeds.

    Most SDKs' own pauses are shorter at first, and would get them refused a second time.
    """
    for _ in range(MOST_CALLS_TO_A_REFUSAL):
        reply = trial.call(tier="second")
        if reply.raised:
            expect(not trial.sdk.retries, f"it raised {reply.raised} {reply.details}")
            expect_refusal(trial, reply, range(1, 2))
            time.sleep(int(re.search(r"try again in (\d+)s", reply.details)[1]))
            reply = trial.call(tier="second")
        expect_answer(reply)
        if trial.refusals("second"):
            return expect_equal(trial.refusals("second"), 1)
    raise AssertionError(f"{MOST_CALLS_TO_A_REFUSAL} calls in a row, and none was refused")


@case("429 1h")
def _(trial: Trial) -> None:
    """Nobody waits for an hour, and nobody hammers."""
    expect_answer(trial.call(tier="hour"))
    expect_refusal(trial, trial.call(tier="hour"), range(3500, 3601))
    refusals = trial.gate.wait_for_refusals(trial.ids["hour"], trial.sdk.tries_for_an_hour)
    expect_equal(refusals, trial.sdk.tries_for_an_hour)


@case("429 20MB")
def _(trial: Trial) -> None:
    """A refusal in the middle of an upload is read as what it is."""
    trial.call(tier="hour", retries=0)
    for _ in range(UPLOADS):
        reply = trial.call("upload", size=ALLOWED_SIZE, tier="hour", retries=0)
        expect_refusal(trial, reply, range(3000, 3601))


@case("429 59s")
def _(trial: Trial) -> None:
    """The longest wait that all SDKs take as it is: one that retries holds still.

    The last case, for its program has to be stopped.
    """
    expect_answer(trial.call(tier="minute"))
    expect_refusal(trial, trial.call(tier="minute", retries=0), range(30, 60))
    if not trial.sdk.retries:
        return
    program = trial.begin(tier="minute")
    trial.gate.wait_for_refusals(trial.ids["minute"], 2)
    try:
        event = program.event(HOLDS_STILL_S)
    except Hangs:
        expect_equal(trial.refusals("minute"), 2)
    else:
        raise AssertionError(f"it did not wait: {event}")
    finally:
        program.stop()
