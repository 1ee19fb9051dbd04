"""One case at a time: run it, and say in one line how it went. For the Python programs of the suite."""

from __future__ import annotations

import json
import os
import urllib.parse
import urllib.request
import uuid
from typing import Callable, Iterable

# What suite.py tells its programs: the proxy's URL, the upstream's, this SDK's keys, and the pieces of the scripted text.
SUITE = json.loads(os.environ["SDK_SUITE"])
URL, UPSTREAM, PIECES, USAGE = SUITE["url"], SUITE["upstream"], SUITE["pieces"], SUITE["usage"]
TEXT = "".join(PIECES)
PIECES_BEFORE_CUT = PIECES[: SUITE["pieces_before_cut"]]
ROOMY, TINY, HOURLY, WRONG = (SUITE["keys"][tier] for tier in ["roomy", "tiny", "hourly", "wrong"])

# The tiny tier has room for two. On a very slow machine room may appear again before a third call, so a few more are tried.
MOST_CALLS_TO_A_REFUSAL = 8


def case(name: str) -> Callable[[Callable[[], None]], None]:
    """Runs the function below it now. A failed case does not stop the next."""

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {name}: {reason}", flush=True)
        else:
            print(f"ok {name}", flush=True)

    return run


def expect(condition: object, otherwise: str) -> None:
    """An assertion that is not optimized away, and that says what it saw."""
    if not condition:
        raise AssertionError(otherwise)


def expect_equal(seen: object, wanted: object) -> None:
    expect(seen == wanted, f"expected {wanted!r}, got {seen!r}")


def expect_raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The error that `call` raises, which must be of this kind."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the answer {result!r}")


def new_stream(script: str = "one-by-one") -> str:
    """A model whose stream waits for `release` between its pieces."""
    return f"{script}/{uuid.uuid4()}"


def release(model: str) -> None:
    """Lets the upstream send this stream's next piece."""
    stream = model.partition("/")[2]
    urllib.request.urlopen(f"{UPSTREAM}/control/release/{stream}", data=b"", timeout=10).close()


def received(model: str) -> list[dict[str, str]]:
    """The headers of each request for this model that reached the upstream, names in lower case."""
    query = urllib.parse.urlencode({"model": model})
    with urllib.request.urlopen(f"{UPSTREAM}/control/received?{query}", timeout=10) as answer:
        return [{name.lower(): value for name, value in headers.items()} for headers in json.load(answer)]


def expect_cut(script: str, pieces_of: Callable[[str], Iterable[str]]) -> None:
    """Reads a stream that breaks off: what came before must arrive, and then an error. A clean end would pass for a whole answer."""
    model, pieces = new_stream(script), []
    try:
        for piece in pieces_of(model):
            pieces.append(piece)
            release(model)
    except Exception:
        return expect_equal(pieces, PIECES_BEFORE_CUT)
    raise AssertionError(f"the cut stream ended as if it were whole, after {pieces!r}")


def expect_sdk_to_wait(call: Callable[[str], str]) -> None:
    """Calls until the tiny tier refuses one: the SDK must wait by itself, as long as `Retry-After` says, and then succeed.

    Its own back-off would not do: two retries of at most 0.5 s and 1 s are over before the window of 2 s has moved on.
    """
    for number in range(MOST_CALLS_TO_A_REFUSAL):
        model = f"patient-{uuid.uuid4()}"
        expect_equal(call(model), TEXT)
        arrived = received(model)
        expect_equal(len(arrived), 1)
        if int(arrived[0]["x-stainless-retry-count"]) > 0:
            return expect(number >= 2, f"call {number + 1} was refused although two are allowed")
    raise AssertionError(f"{MOST_CALLS_TO_A_REFUSAL} calls in a row, and none was refused")
