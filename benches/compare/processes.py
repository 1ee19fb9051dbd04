"""Processes that the benchmark starts, and what the kernel says they cost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

# A proxy of the machine's own must not get between the parts.
PROXY_VARIABLES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}


class Process:
    """A process with its children. Ended by its own id, whatever happens."""

    def __init__(self, name: str, command: list, folder: Path, environment: dict | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, folder / f"{name}.log"
        inherited = {key: value for key, value in os.environ.items() if key.lower() not in PROXY_VARIABLES}
        with open(self.log, "wb") as log:
            self.child = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env=inherited | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ids(self) -> list[int]:
        """Its own and those of all its descendants."""
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (fields := _stat(int(entry))):
                children.setdefault(int(fields[1]), []).append(int(entry))
        found, ahead = [], [self.child.pid]
        while ahead:
            found.append(ahead.pop())
            ahead += children.get(found[-1], [])
        return found

    def is_running(self) -> bool:
        return self.child.poll() is None

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        ids = self.ids()
        if self.is_running():
            self.child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and any(_is_alive(pid) for pid in ids):
            self.child.poll()
            time.sleep(0.05)
        for pid in filter(_is_alive, ids):
            os.kill(pid, signal.SIGKILL)
        self.child.wait()


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, or nothing if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def cpu_seconds(ids: list[int]) -> float:
    """User and system time of these processes and of the children that they have waited for."""
    fields = filter(None, map(_stat, ids))
    return sum(int(value) for stat in fields for value in stat[11:15]) / TICKS


def resident_bytes(ids: list[int]) -> int:
    """Memory in use; what processes share counts once for all of them (proportional set size)."""
    total = 0
    for pid in ids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class Peak(threading.Thread):
    """Watches memory while a load runs."""

    def __init__(self, ids: list[int]):
        super().__init__(daemon=True)
        self.ids, self.bytes, self.over = ids, 0, threading.Event()

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.bytes = max(self.bytes, resident_bytes(self.ids))


def _busy_seconds() -> float:
    """What all processors have done since the machine started."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


@dataclass
class Cost:
    """CPU seconds over a stretch of time."""

    proxy: float
    upstream: float
    redis: float
    wall: float
    cores_of_all: float

    def __add__(self, other: "Cost") -> "Cost":
        wall = self.wall + other.wall
        cores = (self.cores_of_all * self.wall + other.cores_of_all * other.wall) / wall
        return Cost(
            self.proxy + other.proxy, self.upstream + other.upstream, self.redis + other.redis, wall, cores
        )


class CostMeter:
    """What a stretch of work costs the three that take part in it."""

    def __init__(self, proxy: Process, upstream: Process, redis: Process):
        self.parts = [process.ids() for process in (proxy, upstream, redis)]

    def __enter__(self) -> "CostMeter":
        self.before, self.busy, self.begun = self._read(), _busy_seconds(), time.monotonic()
        return self

    def __exit__(self, *_) -> None:
        wall = time.monotonic() - self.begun
        spent = [after - before for after, before in zip(self._read(), self.before)]
        self.cost = Cost(*spent, wall, (_busy_seconds() - self.busy) / wall)

    def _read(self) -> list[float]:
        return [cpu_seconds(ids) for ids in self.parts]
