"""One SDK on trial: the program that drives it, its keys, and its calls."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass, field

from gate import Gate
from sdks import BASES, Sdk
from upstream import Upstream

# How long a call may take on a slow machine before it counts as hanging.
CALL_TIMEOUT_S = 60

TIERS = {
    "roomy": '{ requests = 1000, per = "1m" }',
    "second": '{ requests = 1, per = "1s" }',
    "minute": '{ requests = 1, per = "59s" }',
    "hour": '{ requests = 1, per = "1h" }',
}


class Hangs(Exception):
    """The program said nothing for too long."""


class Ended(Exception):
    """The program ended in the middle of a call."""


@dataclass
class Reply:
    """What an SDK gave back: the pieces of a stream, and then an answer or an error."""

    pieces: list[str] = field(default_factory=list)
    text: str = ""
    tokens: int | None = None
    raised: str | None = None
    status: int | None = None
    details: str = ""
    headers: dict[str, str] | None = None


class Program:
    """A process that makes one SDK's calls. It starts with the first."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.command, self.environment = command, environment
        self.process: subprocess.Popen | None = None
        self.version: str | None = None
        # What it says beside its protocol: warnings, and the reason of a crash.
        self.noise: list[str] = []

    def start(self) -> None:
        self.events: queue.Queue[dict | None] = queue.Queue()
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", start_new_session=True,
        )
        threading.Thread(target=self.read, args=(self.process, self.events), daemon=True).start()
        self.version = self.event()["version"]
        if self.version is None:
            raise Ended("the SDK is not installed")

    def read(self, process: subprocess.Popen, events: queue.Queue[dict | None]) -> None:
        for line in process.stdout:
            # An object that Node shows in a stack trace begins otherwise.
            if line.startswith('{"'):
                events.put(json.loads(line))
            else:
                self.noise.append(line)
        events.put(None)

    def send(self, call: dict) -> None:
        if self.process is None:
            self.start()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(call), file=self.process.stdin, flush=True)

    def event(self, timeout: float = CALL_TIMEOUT_S) -> dict:
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            raise Hangs(f"nothing for {timeout} s") from None
        if event is None:
            raise Ended("".join(self.noise[-5:]))
        return event

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process = None


class Trial:
    """One SDK's calls, and how its cases went: nothing, or why one failed.

    `program` trusts the certificate of `gate`, `insider` the private authority behind `private_gate`.
    """

    upstream: Upstream
    gate: Gate
    private_gate: Gate
    program: Program
    insider: Program

    def __init__(self, sdk: Sdk, number: int) -> None:
        self.sdk = sdk
        self.ids = {tier: f"{number}-{tier}" for tier in TIERS}
        self.keys = {tier: f"sk-tg-{number}-{tier}-{secrets.token_hex(32)}" for tier in [*TIERS, "wrong"]}
        self.results: dict[str, str] = {}

    @property
    def name(self) -> str:
        pin = (self.sdk.pin or "").rpartition("=")[2]
        return f"{self.sdk.name} {self.program.version or pin}".rstrip()

    @property
    def unavailable(self) -> str | None:
        """Why the SDK cannot be here, if it cannot. One that is missing without a reason fails its cases."""
        if sys.version_info >= self.sdk.python:
            return None
        return f"needs Python {'.'.join(map(str, self.sdk.python))}, and this is {sys.version.split()[0]}"

    def begin(
        self, do: str = "plain", *, tier: str = "roomy", model: str = "plain", retries: int | None = None,
        size: int = 0, gate: Gate | None = None, program: Program | None = None, base: str | None = None,
    ) -> Program:
        """Starts a call. `base` takes the place of what the base URL has behind the origin."""
        program, gate = program or self.program, gate or self.gate
        url = gate.url + (BASES[self.sdk.adapter] if base is None else base)
        program.send({
            "do": do, "url": url, "key": self.keys[tier], "model": model, "retries": retries, "size": size,
        })
        return program

    def call(self, do: str = "plain", *, model: str = "plain", **options: object) -> Reply:
        """Makes a call. A stream's next piece leaves the upstream only when the SDK has handed out the one before."""
        program, pieces = self.begin(do, model=model, **options), []
        while True:
            event = program.event()
            if "piece" not in event:
                return Reply(pieces, **event)
            pieces.append(event["piece"])
            self.upstream.release(model.partition(".")[2]).release()

    def stream(self, script: str) -> Reply:
        return self.call("stream", model=f"{script}.{uuid.uuid4()}")

    def refusals(self, tier: str) -> int:
        """How often the gate refused the key of this tier so far."""
        return self.gate.refusals[self.ids[tier]]

    def stop(self) -> None:
        self.program.stop()
        self.insider.stop()
