"""Starts everything on loopback, measures, prints. `benches/run` calls it with what it has built and installed."""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import measure
import report
from loads import LoadClient
from peers import WIDE, Peer, Stage, all_peers, tollgate
from processes import Process

PARTS = ["throughput", "latency", "refusals", "streams", "bursts", "growth"]
SLOW = {"litellm", "tutorial"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benches/run", description=__doc__)
    parser.add_argument("--binaries", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tollgate", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="+", help="only these; `floor` is always among them")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these tables")
    parser.add_argument("--slots", type=int, default=3, help="turns of each peer, of which the median counts")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a turn takes")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A throw-away one for `localhost`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "certificate.pem", folder / "private-key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "9"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-out", *paths[:1], "-keyout", *paths[1:]], check=True, capture_output=True)
    return paths


class Bench:
    """Everything that is up. What was started is ended, whatever happens."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, []
        upstream_port, redis_port = free_port(), free_port()
        chain, private_key = certificate(options.run)
        self.stage = Stage(
            options.binaries, options.tollgate, options.tools, options.run, chain, private_key, upstream_port, redis_port
        )
        load = LoadClient(options.binaries / "load")
        upstream = self.keep(
            Process("upstream", [options.binaries / "upstream", "--listen", f"127.0.0.1:{upstream_port}"], options.run)
        )
        command = ["redis-server", "--port", redis_port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        redis = self.keep(Process("redis", command, options.run))
        for port in (upstream_port, redis_port):
            _wait_for(port)
        self.rig = measure.Rig(upstream, redis, redis_port, load, options.slots, options.seconds)

    def keep(self, process: Process) -> Process:
        self.started.append(process)
        return process

    def start(self, peer: Peer) -> float:
        """Starts a peer: the seconds until it has answered its first request."""
        peer.port = free_port()
        begun = time.monotonic()
        peer.process = self.keep(peer.start(self.stage, peer, self.stage.run / peer.name))
        _wait_for(peer.port, peer.process)
        ready = time.monotonic() - begun
        deadline = time.monotonic() + 60
        while (seen := self.rig.load.run("one", peer.url, WIDE)).get("status") != 200:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{peer.name} does not serve: {seen}\n{peer.process.last_words()}")
            time.sleep(0.2)
        return ready

    def end(self) -> None:
        for process in reversed(self.started):
            process.end()


def _wait_for(port: int, process: Process | None = None) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process and not process.is_running():
            raise RuntimeError(f"{process.name} ended: {process.last_words()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.002)
    raise RuntimeError(f"nobody listens at port {port}")


def chosen(options: argparse.Namespace, stage: Stage) -> list[Peer]:
    peers = all_peers()
    if options.peers:
        unknown = set(options.peers) - {peer.name for peer in peers}
        if unknown:
            sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(peer.name for peer in peers)}")
        peers = [peer for peer in peers if peer.name in {"floor", *options.peers}]
    there = []
    for peer in peers:
        if missing := peer.missing(stage):
            print(f"not measured: {peer.name}, for {missing}")
        else:
            there.append(peer)
    return there


def start_all(bench: Bench, peers: list[Peer]) -> tuple[list[Peer], dict[str, float]]:
    """Those that serve, and the seconds that each took. A peer that does not start is one less; ours must."""
    ready = {}
    for peer in peers:
        try:
            ready[peer.name] = bench.start(peer)
        except RuntimeError as error:
            if peer.name.startswith(("floor", "tollgate")):
                raise
            print(f"not measured: {peer.name}: {error}")
    return [peer for peer in peers if peer.name in ready], ready


def run(bench: Bench) -> dict:
    options, rig = bench.options, bench.rig
    peers, ready = start_all(bench, chosen(options, bench.stage))
    print(report.machine())
    print(f"medians of {rig.slots} turns of {rig.seconds:g} s; all on loopback, TLS and keep-alive; CPU is the whole process tree's")
    memory = measure.idle_memory(peers)
    report.sizes(ready, memory)
    figures = {"ready": ready, "idle_mib": memory}
    measure.throughput(rig, peers, 16)
    parts = {name: part for name, part in MEASURED.items() if name in options.parts}
    for name, part in parts.items():
        figures[name] = part(bench, peers)
    return figures


def throughput(bench: Bench, peers: list[Peer]) -> dict:
    figures = {}
    for connections in bench.options.connections:
        figures[connections] = measure.throughput(bench.rig, peers, connections)
        report.throughput(connections, figures[connections])
    return figures


def latency(bench: Bench, peers: list[Peer]) -> dict:
    fast = [peer for peer in peers if peer.name != "litellm"]
    figures = measure.steady(bench.rig, fast, 96)
    report.steady(96, figures)
    return figures


def refusals(bench: Bench, peers: list[Peer]) -> dict:
    floor = measure.throughput(bench.rig, peers[:1], 16)["floor"]["cpu_us"]
    over, unknown = measure.refusals(bench.rig, peers), measure.strangers(bench.rig, peers)
    report.refused("Refusals of a key over its limit, 16 connections", over, floor)
    report.refused("Refusals of a wrong key, 16 connections", unknown, floor)
    return {"floor_cpu_us": floor, "over": over, "unknown": unknown}


def streams(bench: Bench, peers: list[Peer]) -> dict:
    few = measure.streams(bench.rig, peers, 200, rounds=2, ramp=200, events=100, pace=20)
    report.streams(200, few)
    fast = [peer for peer in peers if peer.name not in SLOW]
    many = measure.streams(bench.rig, fast, 2000, ramp=2000, events=12, pace=500)
    report.streams(2000, many)
    return {200: few, 2000: many}


def bursts(bench: Bench, peers: list[Peer]) -> dict:
    figures = measure.bursts(bench.rig, peers)
    report.bursts({peer.name: peer.limit for peer in peers}, figures)
    return figures


def growth(bench: Bench, peers: list[Peer]) -> dict:
    variants = [("10 keys, 1 limit", 1, 5), ("1 000 000 keys, 1 limit", 1, 999_995), ("10 keys, 10 limits", 10, 5)]
    grown = [(name, Peer(f"tollgate-{limits}-{keys}", tollgate("memory", limits, keys))) for name, limits, keys in variants]
    figures = measure.growth(bench.rig, grown, bench.start)
    report.growth(figures)
    alone = [peer for peer in peers if peer.name == "tollgate-memory"]
    if not alone:
        return figures
    # A client takes a descriptor for itself and one for its upstream, and no more may be open than the system allows.
    most = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 500)
    crowds = {count: measure.crowded(bench.rig, alone[0], count) for count in (0, 1000, most)}
    report.crowded(crowds)
    return {"configuration": figures, "connections": crowds}


MEASURED = {
    "throughput": throughput,
    "latency": latency,
    "refusals": refusals,
    "streams": streams,
    "bursts": bursts,
    "growth": growth,
}


def main() -> None:
    options = arguments()
    bench = Bench(options)
    try:
        figures = run(bench)
    finally:
        bench.end()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
