"""Tries one container image: `tests/image/run` builds it and calls this with its name."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "sdk"))
from upstream import PIECES, Upstream  # noqa: E402

USER = "65532"
START_TIMEOUT_S = 60
DRAIN_TIMEOUT_S = 60

CONFIG = """
[server]
listen = "127.0.0.1:0"
[server.tls]
certificate = "certs/server.crt"
private_key = "certs/server.key"
[admin]
listen = "127.0.0.1:{admin}"
[log]
format = "json"
[limiter]
store = "memory"
[tiers.roomy]
limits = [{{ requests = 1000, per = "1m" }}]
[[keys]]
id = "alice"
hash = "sha256:{hash}"
tier = "roomy"
[[upstreams]]
name = "scripted"
url = "{upstream}"
credential = {{ header = "authorization", value = "Bearer upstream" }}
"""


def main() -> None:
    image = sys.argv[1]
    check_shipped_configurations(image)
    key = f"sk-tg-alice-{secrets.token_hex(32)}"
    with Upstream() as upstream, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "proxy.toml"
        digest = hashlib.sha256(key.encode()).hexdigest()
        config.write_text(CONFIG.format(admin=free_port(), hash=digest, upstream=upstream.url))
        Path(folder).chmod(0o755)
        with container(image, config) as name:
            wait_until_healthy(name)
            check_process(name)
            certificate = Path(folder) / "server.crt"
            docker("cp", f"{name}:/etc/tollgate/certs/server.crt", str(certificate))
            gate = Gate(listening_port(name), certificate, key)
            check_answer(gate)
            check_drain(name, gate, upstream)


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout.strip()


def inspect(name: str, what: str) -> str:
    return docker("inspect", "--format", "{{" + what + "}}", name)


def expect(condition: object, otherwise: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {otherwise}")


def free_port() -> int:
    """`tollgate health` reads the admin port from the configuration, so this one can't be left to Tollgate."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_shipped_configurations(image: str) -> None:
    """What the image carries, and what compose.yaml mounts in its place, with its secret."""
    docker("run", "--rm", "--network=none", image, "check")
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write("sk-upstream")
        secret.flush()
        Path(secret.name).chmod(0o644)
        mounts = {REPOSITORY / "deploy/proxy.toml": "/etc/tollgate/proxy.toml", secret.name: "/run/secrets/openai_api_key"}
        volumes = [f"--volume={host}:{inside}:ro" for host, inside in mounts.items()]
        docker("run", "--rm", "--network=none", *volumes, image, "check")
    print("ok: the image's configuration and compose.yaml's are valid")


@contextlib.contextmanager
def container(image: str, config: Path) -> Iterator[str]:
    """Runs the image as compose.yaml does, and removes it and its volume at the end."""
    name = f"tollgate-check-{secrets.token_hex(4)}"
    docker(
        "run", "--detach", "--name", name, "--network=host", "--read-only", "--user", f"{USER}:{USER}", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--volume", f"{config}:/etc/tollgate/proxy.toml:ro",
        "--volume", f"{name}:/etc/tollgate/certs", image,
    )
    try:
        yield name
    except BaseException:
        subprocess.run(["docker", "logs", name])
        raise
    finally:
        docker("rm", "--force", name)
        docker("volume", "rm", name)


def wait_until_healthy(name: str) -> None:
    command = [
        "docker", "events", "--since", inspect(name, ".Created"), "--until", str(int(time.time()) + START_TIMEOUT_S),
        "--filter", f"container={name}", "--format", "{{.Status}}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as events:
        for status in events.stdout:
            if status.startswith("health_status") or status.startswith("die"):
                events.terminate()
                break
    expect(inspect(name, ".State.Health.Status") == "healthy", "not healthy")
    print("ok: the health check turns healthy")


def check_process(name: str) -> None:
    status = Path(f"/proc/{inspect(name, '.State.Pid')}/status").read_text()
    fields = {line.split(":")[0]: line.split()[1:] for line in status.splitlines()}
    expect(fields["Uid"] == [USER] * 4, f"runs as {fields['Uid']}")
    expect(fields["CapEff"] == ["0" * 16], f"has capabilities {fields['CapEff']}")
    print(f"ok: runs as {USER} without capabilities, on a read-only root")
    resident, anonymous = (int(fields[field][0]) / 1024 for field in ["VmRSS", "RssAnon"])
    print(f"idle memory: {resident:.1f} MiB resident, {anonymous:.1f} MiB of it its own (the rest is the binary and libraries)")


def listening_port(name: str) -> int:
    logs = subprocess.run(["docker", "logs", name], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, encoding="utf-8").stderr
    for line in logs.splitlines():
        fields = json.loads(line).get("fields", {})
        if fields.get("message") == "listening":
            return int(fields["address"].rpartition(":")[2])
    raise SystemExit(f"FAILED: no line `listening` in the log:\n{logs}")


class Gate:
    """Tollgate as a client sees it."""

    def __init__(self, port: int, certificate: Path, key: str) -> None:
        self.port = port
        self.trust = ssl.create_default_context(cafile=str(certificate))
        self.headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, model: str, stream: bool) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("localhost", self.port, context=self.trust, timeout=DRAIN_TIMEOUT_S)
        body = json.dumps({"model": model, "stream": stream, "messages": [{"role": "user", "content": "?"}]})
        connection.request("POST", "/v1/chat/completions", body, self.headers)
        return connection.getresponse()

    def is_open(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True


def check_answer(gate: Gate) -> None:
    answer = gate.ask("plain", stream=False)
    text = json.load(answer)["choices"][0]["message"]["content"]
    expect((answer.status, text) == (200, "".join(PIECES)), f"answered {answer.status}: {text}")
    expect(answer.headers["x-ratelimit-limit"] == "1000", f"no limit in {answer.headers}")
    print("ok: answers over TLS, with the limit in the head")


def check_drain(name: str, gate: Gate, upstream: Upstream) -> None:
    """`docker stop` in the middle of a stream: no new connection is taken, and the stream goes on to its end."""
    answer = gate.ask("one-by-one.drain", stream=True)
    lines = [answer.readline()]
    with subprocess.Popen(["docker", "stop", "-t", str(DRAIN_TIMEOUT_S), name], stdout=subprocess.DEVNULL) as stop:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S / 2
        # Nothing announces from outside that a listener closed.
        while gate.is_open():
            expect(time.monotonic() < deadline, "still takes connections after SIGTERM")
            time.sleep(0.05)
        expect(stop.poll() is None, "ended in the middle of a stream")
        for _ in PIECES:
            upstream.release("drain").release()
        lines += answer.readlines()
    pieces = [line for line in lines if b'"delta": {"content"' in line]
    expect(len(pieces) == len(PIECES) and lines[-2] == b"data: [DONE]\n", f"the stream is not whole: {lines}")
    code = inspect(name, ".State.ExitCode")
    expect(code == "0", f"exit code {code}")
    print("ok: `docker stop` lets an open stream finish, then ends with code 0")


main()
