"""The load: wrk for throughput, the project's own client for what wrk can't do."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).parent / "completion.lua"


@dataclass
class Throughput:
    """What wrk saw, over one slot or several."""

    requests: int = 0
    seconds: float = 0.0
    refused: int = 0
    socket_errors: int = 0
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def add(self, result: dict) -> None:
        self.requests += result["requests"]
        self.seconds += result["micros"] / 1e6
        self.refused += result["not_2xx"]
        self.socket_errors += result["socket_errors"]
        self.p50.append(result["p50"])
        self.p99.append(result["p99"])

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def wrk(url: str, key: str, connections: int, seconds: float) -> dict:
    """One closed loop: each connection sends its next request when it has its answer."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "15s", "--latency"]
    command += ["-s", str(SCRIPT), "-H", f"X-API-Key: {key}", url]
    output = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60).stdout
    for line in output.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"wrk said nothing of use: {output}")


class LoadClient:
    """The binary `load`."""

    def __init__(self, binary: Path):
        self.binary = binary

    def _command(self, load: str, url: str, key: str, options: dict) -> list[str]:
        command = [str(self.binary), load, "--url", url, "--key", key]
        return command + [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def run(self, load: str, url: str, key: str, timeout: float = 180, **options) -> dict:
        command = self._command(load, url, key, options)
        output = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if output.returncode:
            raise RuntimeError(f"the load client failed: {output.stderr[-500:]}")
        return json.loads(output.stdout.splitlines()[-1])

    def idle(self, url: str, key: str, connections: int) -> "Idle":
        return Idle(self._command("idle", url, key, {"connections": connections}))


class Idle:
    """Connections that stay open and do nothing until it is left."""

    def __init__(self, command: list[str]):
        self.command = command

    def __enter__(self) -> "Idle":
        self.child = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.open = json.loads(self.child.stdout.readline())["open"]
        return self

    def __exit__(self, *_) -> None:
        self.child.communicate()
