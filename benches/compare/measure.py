"""What is measured. Every figure of every peer comes from slots that take turns: what else happens on the machine
meets all of them alike, and the medians over the slots are given."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from statistics import median
from typing import Callable, Iterator

from loads import LoadClient, Throughput, wrk
from peers import BURSTS, STRANGER, TIGHT, WIDE, Peer
from processes import Cost, CostMeter, Peak, Process, resident_bytes

Figures = dict[str, float]


class Rig:
    """The parts that all peers share."""

    def __init__(self, upstream: Process, redis: Process, redis_port: int, load: LoadClient, slots: int, seconds: float):
        self.upstream, self.redis, self.redis_port = upstream, redis, redis_port
        self.load, self.slots, self.seconds = load, slots, seconds

    def cost_of(self, peer: Peer) -> CostMeter:
        return CostMeter(peer.process, self.upstream, self.redis)

    def empty_redis(self) -> None:
        command = ["redis-cli", "-p", str(self.redis_port), "flushall"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def turns(self, peers: list[Peer]) -> Iterator[Peer]:
        """Each peer once a slot, each slot begun by another."""
        for slot in range(self.slots):
            shift = slot % len(peers)
            for peer in peers[shift:] + peers[:shift]:
                self.empty_redis()
                yield peer


def _median_of(slots: dict[str, list[Figures]]) -> dict[str, Figures]:
    return {
        name: {figure: median(slot[figure] for slot in figures) for figure in figures[0]}
        for name, figures in slots.items()
    }


def _per_request(seen: Throughput, cost: Cost) -> Figures:
    return {
        "per_second": seen.per_second,
        "p50_ms": median(seen.p50),
        "p99_ms": median(seen.p99),
        "cpu_us": cost.proxy * 1e6 / seen.requests,
        "redis_us": cost.redis * 1e6 / seen.requests,
        "of_upstream": cost.proxy / cost.upstream if cost.upstream else 0.0,
        "failed": seen.socket_errors,
        "refused": seen.refused,
        "requests": seen.requests,
    }


def _slot(rig: Rig, peer: Peer, key: str, connections: int) -> Figures:
    seen = Throughput()
    with rig.cost_of(peer) as meter:
        seen.add(wrk(peer.url, key, connections, rig.seconds))
    return _per_request(seen, meter.cost)


def throughput(rig: Rig, peers: list[Peer], connections: int) -> dict[str, Figures]:
    """Admitted requests in a closed loop."""
    slots = defaultdict(list)
    for peer in rig.turns(peers):
        slots[peer.name].append(_slot(rig, peer, WIDE, connections))
    return _median_of(slots)


def steady(rig: Rig, peers: list[Peer], rate: int) -> dict[str, Figures]:
    """Latency at a rate that leaves everybody idle most of the time."""
    slots = defaultdict(list)
    for peer in rig.turns(peers):
        seen = rig.load.run("rate", peer.url, WIDE, connections=16, rate=rate, seconds=3)
        slots[peer.name].append({name: seen["latency_ms"][name] or 0.0 for name in ("p50", "p99")})
    return _median_of(slots)


def refusals(rig: Rig, peers: list[Peer]) -> dict[str, Figures]:
    """A key that floods far over its 100 a minute."""
    slots = defaultdict(list)
    for peer in rig.turns([peer for peer in peers if peer.limit]):
        slots[peer.name].append(_slot(rig, peer, TIGHT, 16))
    return _median_of(slots)


def strangers(rig: Rig, peers: list[Peer]) -> dict[str, Figures]:
    """A key that nobody knows."""
    slots = defaultdict(list)
    for peer in rig.turns([peer for peer in peers if peer.checks_keys]):
        slots[peer.name].append(_slot(rig, peer, STRANGER, 16))
    return _median_of(slots)


def streams(rig: Rig, peers: list[Peer], connections: int, **shape: int) -> dict[str, Figures]:
    """Event streams that all run at the same time. `shape`: `rounds`, `ramp`, `events` and `pace` of the load client."""
    slots = defaultdict(list)
    for peer in rig.turns(peers):
        ids = peer.process.ids()
        before = resident_bytes(ids)
        with rig.cost_of(peer) as meter, Peak(ids) as peak:
            seen = rig.load.run("streams", peer.url, WIDE, connections=connections, **shape)
        slots[peer.name].append(
            {
                "first_p50_ms": seen["first_ms"]["p50"] or 0.0,
                "first_p99_ms": seen["first_ms"]["p99"] or 0.0,
                "delay_p50_ms": seen["under_way_ms"]["p50"] or 0.0,
                "delay_p99_ms": seen["under_way_ms"]["p99"] or 0.0,
                "cpu_us_per_event": meter.cost.proxy * 1e6 / max(1, seen["events"]),
                "kib_per_stream": max(0, peak.bytes - before) / 1024 / connections,
                "failed": seen["failed"],
            }
        )
    return _median_of(slots)


def bursts(rig: Rig, peers: list[Peer]) -> dict[str, list[int]]:
    """How many of 1000 requests at once are admitted where 100 should be, three times with a fresh key."""
    admitted = {}
    for peer in peers:
        if peer.limit:
            rig.empty_redis()
            seen = [rig.load.run("burst", peer.url, key, connections=64, requests=1000) for key in BURSTS]
            admitted[peer.name] = [burst["statuses"].get("200", 0) for burst in seen]
    return admitted


def idle_memory(peers: list[Peer]) -> dict[str, float]:
    """MiB before the first load."""
    return {peer.name: resident_bytes(peer.process.ids()) / 2**20 for peer in peers}


def growth(rig: Rig, variants: list[tuple[str, Peer]], start: Callable[[Peer], float]) -> dict[str, Figures]:
    """What a request costs Tollgate as keys and limits grow. The variants take turns and none but one is up at a time:
    a million keys are a lot of memory."""
    slots = defaultdict(list)
    for _ in range(rig.slots):
        for name, peer in variants:
            rig.empty_redis()
            ready = start(peer)
            try:
                memory = resident_bytes(peer.process.ids()) / 2**20
                _slot(rig, peer, WIDE, 64)
                slots[name].append(_slot(rig, peer, WIDE, 64) | {"ready_ms": ready * 1000, "memory_mib": memory})
            finally:
                peer.process.end()
    return _median_of(slots)


def crowded(rig: Rig, peer: Peer, connections: int) -> Figures:
    """What a request costs while so many other connections are open, and what one of those weighs."""
    ids = peer.process.ids()
    before = resident_bytes(ids)
    with rig.load.idle(peer.url, WIDE, connections) as idle:
        time.sleep(0.5)
        weight = (resident_bytes(ids) - before) / 1024 / max(1, idle.open)
        slots = [_slot(rig, peer, WIDE, 64) for _ in range(rig.slots)]
    return _median_of({"": slots})[""] | {"open": idle.open, "kib_per_connection": weight}
