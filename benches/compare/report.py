"""The tables, in Markdown."""

from __future__ import annotations

import platform
import time
from pathlib import Path

Rows = dict[str, dict[str, float]]


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    cores = sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return f"{time.strftime('%Y-%m-%d')}, {cores} cores of {model}, Linux {platform.release()}"


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Prints one table."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def _ratio(value: float, floor: float | None) -> str:
    return f"{value / floor:.2f}" if floor else "–"


def throughput(connections: int, rows: Rows) -> None:
    floor = rows.get("floor", {}).get("cpu_us")
    head = ["proxy", "requests/s", "p50 ms", "p99 ms", "CPU µs", "x floor", "x upstream", "Redis CPU µs", "failed"]
    table(
        f"Admitted requests, {connections} connections",
        head,
        [
            [
                name,
                f"{row['per_second']:,.0f}",
                f"{row['p50_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['cpu_us']:.1f}",
                _ratio(row["cpu_us"], floor),
                f"{row['of_upstream']:.2f}",
                f"{row['redis_us']:.1f}",
                f"{row['failed'] + row['refused']:.0f}",
            ]
            for name, row in rows.items()
        ],
    )


def steady(rate: int, rows: Rows) -> None:
    table(
        f"Latency at {rate} requests/s",
        ["proxy", "p50 ms", "p99 ms"],
        [[name, f"{row['p50']:.3f}", f"{row['p99']:.3f}"] for name, row in rows.items()],
    )


def refused(title: str, rows: Rows, floor: float | None) -> None:
    """`floor`: what the yardstick needs for a request that it passes on."""
    table(
        title,
        ["proxy", "refused/s", "p99 ms", "CPU µs", "x floor's pass", "Redis CPU µs", "let through"],
        [
            [
                name,
                f"{row['per_second'] * row['refused'] / row['requests']:,.0f}",
                f"{row['p99_ms']:.2f}",
                f"{row['cpu_us']:.1f}",
                _ratio(row["cpu_us"], floor),
                f"{row['redis_us']:.2f}",
                f"{row['requests'] - row['refused']:.0f}",
            ]
            for name, row in rows.items()
        ],
    )


def streams(connections: int, rows: Rows) -> None:
    floor = rows.get("floor", {}).get("cpu_us_per_event")
    head = ["proxy", "first event p50 ms", "p99 ms", "event delay p50 ms", "p99 ms", "CPU µs an event", "x floor"]
    table(
        f"{connections} streams at once",
        [*head, "KiB a stream", "failed"],
        [
            [
                name,
                f"{row['first_p50_ms']:.2f}",
                f"{row['first_p99_ms']:.2f}",
                f"{row['delay_p50_ms']:.2f}",
                f"{row['delay_p99_ms']:.2f}",
                f"{row['cpu_us_per_event']:.1f}",
                _ratio(row["cpu_us_per_event"], floor),
                f"{row['kib_per_stream']:.0f}",
                f"{row['failed']:.0f}",
            ]
            for name, row in rows.items()
        ],
    )


def bursts(limits: dict[str, str], admitted: dict[str, list[int]]) -> None:
    rows = [[name, limits[name], ", ".join(map(str, counts))] for name, counts in admitted.items()]
    table("A burst of 1000 at a limit of 100 a minute", ["proxy", "limit", "admitted, three bursts"], rows)


def sizes(ready: dict[str, float], memory: dict[str, float]) -> None:
    rows = [[name, f"{ready[name] * 1000:.0f}", f"{memory[name]:.1f}"] for name in memory]
    table("At rest", ["proxy", "ready after ms", "memory MiB"], rows)


def growth(rows: Rows) -> None:
    table(
        "Tollgate as its configuration grows, memory store, 64 connections",
        ["", "CPU µs", "x upstream", "ready after ms", "memory MiB"],
        [
            [
                name,
                f"{row['cpu_us']:.1f}",
                f"{row['of_upstream']:.2f}",
                f"{row['ready_ms']:.0f}",
                f"{row['memory_mib']:.1f}",
            ]
            for name, row in rows.items()
        ],
    )


def crowded(rows: Rows) -> None:
    table(
        "Tollgate with idle connections beside 64 busy ones",
        ["idle connections", "CPU µs", "x upstream", "p99 ms", "KiB an idle connection"],
        [
            [
                f"{row['open']:,.0f}",
                f"{row['cpu_us']:.1f}",
                f"{row['of_upstream']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['kib_per_connection']:.1f}" if row["open"] else "–",
            ]
            for row in rows.values()
        ],
    )
