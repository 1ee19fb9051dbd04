"""Real SDKs against the real binary, over TLS with the development certificate.

    python3 tests/sdk/suite.py --tollgate target/debug/tollgate --node PATH --node-modules FOLDER

Starts a scripted upstream and Tollgate, each on a port that the system picks, then one program for each SDK. Prints a line for each
case, a table by SDK and, last, `N passed, M failed`. `tests/run` prepares what it needs and calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

from upstream import PIECES, PIECES_BEFORE_CUT, USAGE, Upstream

HERE = Path(__file__).resolve().parent

# How long things may take on a slow machine before they count as hanging.
START_TIMEOUT_S = 60
PROGRAM_TIMEOUT_S = 180
STOP_TIMEOUT_S = 30

TIERS = {
    "roomy": '{ requests = 1000, per = "1m" }',
    "tiny": '{ requests = 2, per = "2s" }',
    "hourly": '{ requests = 1, per = "1h" }',
}

CONFIG = """
[server]
listen = "127.0.0.1:0"

[server.tls]
certificate = "{folder}/certs/server.crt"
private_key = "{folder}/certs/server.key"

[admin]
listen = "127.0.0.1:0"

[limiter]
store = "memory"

[[upstreams]]
name = "openai"
url = "{upstream}"
paths = ["/v1"]
credential = {{ header = "authorization", value = "Bearer {credential}" }}

[[upstreams]]
name = "anthropic"
url = "{upstream}"
paths = ["/v1/messages"]
credential = {{ header = "x-api-key", value = "{credential}" }}
"""

# What the scripted upstream answers, for the programs to compare with.
SCRIPT = {"pieces": PIECES, "pieces_before_cut": PIECES_BEFORE_CUT, "usage": USAGE}

# Settings of the caller's own that would lead a client elsewhere.
FOREIGN_VARIABLES = ("OPENAI_", "ANTHROPIC_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_DIR", "NODE_OPTIONS")


@dataclass
class Sdk:
    """One client library: the program with its cases, and its keys by tier."""

    name: str
    program: list[str]
    keys: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0

    def ok(self, case: str) -> None:
        self.passed += 1
        print(f"ok {self.name}: {case}", flush=True)

    def fail(self, case: str, reason: str) -> None:
        self.failed += 1
        print(f"FAILED {self.name}: {case}: {reason}", flush=True)

    def check(self, case: str, problem: str | None) -> None:
        if problem:
            self.fail(case, problem)
        else:
            self.ok(case)

    def make_keys(self) -> str:
        """Makes a key for each tier, so that no SDK uses up another's limit. The answer is their configuration."""
        self.keys = {tier: f"sk-tg-{self.name}-{tier}-{secrets.token_hex(32)}" for tier in [*TIERS, "wrong"]}
        return "".join(
            f'[[keys]]\nid = "{self.name}-{tier}"\nhash = "sha256:{sha256(self.keys[tier])}"\ntier = "{tier}"\n' for tier in TIERS
        )


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    arguments = parse_arguments()
    # Without this, a plain `kill` would leave the children behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sdks = [
        Sdk("openai-python", python("openai_cases.py")),
        Sdk("anthropic-python", python("anthropic_cases.py")),
        Sdk("openai-node", [arguments.node, str(HERE / "openai_cases.cjs")]),
        Sdk("anthropic-node", [arguments.node, str(HERE / "anthropic_cases.cjs")]),
        Sdk("curl", python("curl_cases.py")),
    ]
    credential = f"upstream-{secrets.token_hex(32)}"
    with tempfile.TemporaryDirectory(prefix="tollgate-sdk-") as folder, Upstream() as upstream:
        config = write_config(Path(folder), upstream.url, credential, sdks)
        with Proxy(arguments.tollgate, config) as proxy:
            told = {"url": proxy.url(), "upstream": upstream.url, **SCRIPT}
            environment = environment_trusting(Path(folder) / "certs" / "server.crt", arguments.node_modules)
            for sdk in sdks:
                run_program(sdk, {**environment, "SDK_SUITE": json.dumps({**told, "keys": sdk.keys})})
        whole = Sdk("every SDK", [])
        check_secrets(whole, sdks, upstream, credential, proxy.log)
        whole.check("Tollgate stops on SIGTERM with code 0", None if proxy.returncode == 0 else f"code {proxy.returncode}")
        return report([*sdks, whole], proxy.log)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Real SDKs against the real binary.")
    parser.add_argument("--tollgate", required=True, help="the binary")
    parser.add_argument("--node", required=True, help="node, version 22 or later")
    parser.add_argument("--node-modules", required=True, help="the folder that `npm ci` made of package.json beside this file")
    return parser.parse_args()


def python(program: str) -> list[str]:
    # `-B`: nothing is written beside the sources.
    return [sys.executable, "-B", str(HERE / program)]


def write_config(folder: Path, upstream: str, credential: str, sdks: list[Sdk]) -> Path:
    (folder / "certs").mkdir()
    text = CONFIG.format(folder=folder, upstream=upstream, credential=credential)
    text += "".join(f"[tiers.{name}]\nlimits = [{limit}]\n" for name, limit in TIERS.items())
    text += "".join(sdk.make_keys() for sdk in sdks)
    path = folder / "proxy.toml"
    path.write_text(text)
    return path


class Proxy:
    """The binary while the `with` block runs, and its log."""

    def __init__(self, binary: str, config: Path) -> None:
        self.log: list[str] = []
        self.returncode: int | None = None
        self.addresses: queue.Queue[str | None] = queue.Queue()
        command = [binary, "serve", "--config", str(config), "--log-format", "json"]
        # A process group of its own: Ctrl-C reaches the suite alone, which then ends its children in order.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.returncode = self.process.wait()
        self.reader.join()

    def url(self) -> str:
        """Where it listens, once it does."""
        try:
            address = self.addresses.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            address = None
        if address is None:
            sys.exit("Tollgate did not start to listen. Its log:\n" + "".join(self.log))
        return f"https://localhost:{address.rpartition(':')[2]}"

    def read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            with contextlib.suppress(ValueError):
                fields = json.loads(line).get("fields", {})
                if fields.get("message") == "listening":
                    self.addresses.put(fields["address"])
        self.addresses.put(None)


def run_program(sdk: Sdk, environment: dict[str, str]) -> None:
    """Runs all cases of one SDK. A program that dies or hangs is one failed case more."""
    with program_running(sdk.program, environment) as program:
        for line in program.stdout:
            count(sdk, line.rstrip("\n"))
    if program.returncode != 0:
        sdk.fail("runs to its end", f"exit code {program.returncode}")
    elif sdk.passed + sdk.failed == 0:
        sdk.fail("runs its cases", "it ran none")


@contextlib.contextmanager
def program_running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    program = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True
    )
    alarm = threading.Timer(PROGRAM_TIMEOUT_S, program.kill)
    alarm.start()
    try:
        yield program
        program.wait()
    finally:
        alarm.cancel()
        if program.poll() is None:
            program.kill()
        program.wait()


def environment_trusting(certificate: Path, node_modules: str) -> dict[str, str]:
    """This process's environment, with the development certificate in each variable that a client looks at."""
    environment = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(FOREIGN_VARIABLES)
    }
    for variable in ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE"]:
        environment[variable] = str(certificate)
    return {**environment, "NODE_PATH": node_modules, "PYTHONIOENCODING": "utf-8"}


def count(sdk: Sdk, line: str) -> None:
    verdict, _, rest = line.partition(" ")
    case, _, reason = rest.partition(": ")
    if verdict == "ok":
        sdk.ok(rest)
    elif verdict == "FAILED":
        sdk.fail(case, reason)
    else:
        print(f"   {line}", flush=True)


def check_secrets(whole: Sdk, sdks: list[Sdk], upstream: Upstream, credential: str, log: list[str]) -> None:
    """Client keys stay in front of the gate, the upstream's credential behind it, and neither is logged."""
    keys = {key: f"{sdk.name}'s {tier} key" for sdk in sdks for tier, key in sdk.keys.items()}
    leaked = {f"{name} in {got.target}" for key, name in keys.items() for got in upstream.received if got.contains(key)}
    whole.check("no client key reaches the upstream", "; ".join(sorted(leaked)))

    wanted = {"/v1/messages": ("x-api-key", credential)}
    bare = {
        got.target for got in upstream.received
        for name, value in [wanted.get(got.target.partition("?")[0], ("authorization", f"Bearer {credential}"))]
        if got.header(name) != value
    }
    nothing = None if upstream.received else "it received nothing"
    whole.check("every request carries the upstream's credential", nothing or "; ".join(sorted(bare)))

    text = "".join(log)
    logged = [name for secret, name in {**keys, credential: "the upstream's credential"}.items() if secret in text]
    whole.check("no secret is in the log", "; ".join(logged))


def report(sdks: list[Sdk], log: list[str]) -> int:
    passed, failed = sum(sdk.passed for sdk in sdks), sum(sdk.failed for sdk in sdks)
    if failed:
        print("\nTollgate's log:\n" + "".join(log))
    print(f"\n{'SDK':<20}{'passed':>8}{'failed':>8}")
    for sdk in sdks:
        print(f"{sdk.name:<20}{sdk.passed:>8}{sdk.failed:>8}")
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
