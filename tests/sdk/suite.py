"""Real SDKs against the real binary, over TLS.

    python3 tests/sdk/suite.py --tollgate target/debug/tollgate --node PATH --node-modules FOLDER --previous FOLDER

Starts a scripted upstream and Tollgate, each on a port that the system picks, then puts each SDK of sdks.py through
each case of cases.py. Prints what failed, a table of SDKs by cases and, last, `N passed, M failed`. `tests/run` prepares
what it needs and calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import gemini_files
import realtime
from cases import CASES, KEEPALIVE_CASE, MAX_BODY_SIZE
from gate import Gate, make_private_certificate
from sdks import LEGEND, SDKS, Sdk
from trial import TIERS, Ended, Hangs, Program, Trial
from upstream import Received, Upstream, format_of

HERE = Path(__file__).resolve().parent

# Most of the time an SDK waits for something, so more of them run than there are processors.
AT_A_TIME = 6

CONFIG = """
[server]
listen = "127.0.0.1:0"
max_body_size = "{max_body_size}"
[server.tls]
certificate = "server.crt"
private_key = "server.key"
[admin]
listen = "127.0.0.1:0"
[limiter]
store = "memory"
"""

UPSTREAM = """
[[upstreams]]
name = "{name}"
url = "{url}"
paths = {paths}
credential = {{ header = "{header}", value = "{value}" }}
"""

# The paths of each upstream, and one by which the script tells what credential it wants.
UPSTREAMS = {
    "openai": ('["/v1"]', "/v1/responses"),
    "anthropic": ('["/v1/messages"]', "/v1/messages"),
    "gemini": ('["/v1beta", "/v1/models"]', "/v1beta/models/any:generateContent"),
}

# Settings of the caller's own that would lead a client elsewhere.
FOREIGN_VARIABLES = (
    "OPENAI_", "ANTHROPIC_", "GOOGLE_", "GEMINI_", "LANGSMITH_", "LANGCHAIN_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
    "SSL_CERT_", "NODE_", "PYTHONPATH",
)


def main() -> int:
    arguments = parse_arguments()
    # Without this, a plain `kill` would leave the children behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if not arguments.keepalive:
        del CASES[KEEPALIVE_CASE]
    credential = f"upstream-{secrets.token_hex(32)}"
    trials = [Trial(sdk, number) for number, sdk in enumerate(SDKS) if arguments.only in sdk.name]
    with tempfile.TemporaryDirectory(prefix="tollgate-sdk-") as folder, Upstream() as upstream:
        development, private = Path(folder) / "development", Path(folder) / "private"
        for certificates in [development, private]:
            certificates.mkdir()
            write_config(certificates, upstream.url, credential, trials, arguments.keepalive)
        authority = make_private_certificate(private)
        with Gate(arguments.tollgate, development) as gate, Gate(arguments.tollgate, private) as private_gate:
            for trial in trials:
                command = command_of(trial.sdk, arguments.node)
                trial.upstream, trial.gate, trial.private_gate = upstream, gate, private_gate
                trial.program = Program(command, environment(development / "server.crt", trial.sdk, arguments))
                trial.insider = Program(command, environment(authority, trial.sdk, arguments))
            run_all(trials)
        checks = check_secrets(trials, upstream, credential, gate.log + private_gate.log)
    # The packages that these need are pinned for this Python and later ones.
    if not arguments.only and sys.version_info >= (3, 11):
        checks |= realtime.checks(arguments.tollgate, arguments.node, arguments.node_modules)
        checks |= gemini_files.checks(arguments.tollgate, sys.executable, arguments.node, arguments.node_modules)
    checks["Tollgate stops on SIGTERM with code 0"] = "" if gate.returncode == 0 else f"code {gate.returncode}"
    return report(trials, checks, gate.log + private_gate.log)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Real SDKs against the real binary.")
    parser.add_argument("--tollgate", required=True, help="the binary")
    parser.add_argument("--node", required=True, help="node, version 22 or later")
    parser.add_argument("--node-modules", required=True, help="the folder that `npm ci` made of package.json")
    parser.add_argument("--previous", required=True, help="a folder with a folder for each line of previous.txt")
    parser.add_argument("--only", default="", help="a part of the names of the SDKs to run")
    parser.add_argument("--keepalive", help="configure this `keepalive`, below 3s, and run its case")
    return parser.parse_args()


def write_config(folder: Path, url: str, credential: str, trials: list[Trial], keepalive: str | None) -> None:
    text = CONFIG.format(max_body_size=MAX_BODY_SIZE)
    for name, (paths, path) in UPSTREAMS.items():
        header, value = format_of(path).credential
        text += UPSTREAM.format(name=name, url=url, paths=paths, header=header, value=value.format(credential))
        text += f'keepalive = "{keepalive}"\n' if keepalive else ""
    text += "".join(f"[tiers.{name}]\nlimits = [{limit}]\n" for name, limit in TIERS.items())
    for trial in trials:
        for tier, id in trial.ids.items():
            digest = hashlib.sha256(trial.keys[tier].encode()).hexdigest()
            text += f'[[keys]]\nid = "{id}"\nhash = "sha256:{digest}"\ntier = "{tier}"\n'
    (folder / "proxy.toml").write_text(text)


def command_of(sdk: Sdk, node: str) -> list[str]:
    if sdk.runtime == "node":
        return [node, str(HERE / "clients.cjs"), sdk.adapter, *filter(None, [sdk.pin])]
    # `-B`: nothing is written beside the sources.
    return [sys.executable, "-B", str(HERE / "clients.py"), sdk.adapter]


def environment(certificate: Path, sdk: Sdk, arguments: argparse.Namespace) -> dict[str, str]:
    """This process's environment, with a certificate in each variable that a client looks at."""
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith(FOREIGN_VARIABLES)}
    for name in ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE"]:
        variables[name] = str(certificate)
    if sdk.runtime == "node":
        return {**variables, "NODE_PATH": arguments.node_modules}
    previous = str(Path(arguments.previous) / sdk.pin) if sdk.pin else ""
    return {**variables, "PYTHONPATH": previous, "PYTHONIOENCODING": "utf-8"}


def run_all(trials: list[Trial]) -> None:
    """Runs several at a time, and says in order how they went."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for trial, _ in zip(trials, pool.map(run, trials)):
            failures = [f"FAILED {trial.name}: {case}: {reason}\n" for case, reason in trial.results.items() if reason]
            passed = f"{len(trial.results) - len(failures)} of {len(trial.results)} passed"
            print(f"{trial.name}: {trial.unavailable or passed}\n" + "".join(failures), end="", flush=True)


def run(trial: Trial) -> None:
    """Runs every case of one SDK. A failed one does not stop the next."""
    if not trial.unavailable:
        trial.results = {name: outcome(trial, body) for name, body in CASES.items()}
    trial.stop()


def outcome(trial: Trial, body: Callable[[Trial], None]) -> str:
    """Nothing, or why the case failed."""
    try:
        body(trial)
    except Exception as error:
        if isinstance(error, (Hangs, Ended)):
            trial.stop()
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def check_secrets(trials: list[Trial], upstream: Upstream, credential: str, log: list[str]) -> dict[str, str]:
    """Client keys stay in front of the gate, the upstream's credential behind it, and neither is logged."""
    keys = {key: f"{trial.name}'s {tier} key" for trial in trials for tier, key in trial.keys.items()}
    text = "".join(log)
    got = upstream.received
    leaked = {f"{name} in {each.target}" for key, name in keys.items() for each in got if each.contains(key)}
    bare = {each.target for each in got if not is_credited(each, credential)} if got else {"it received nothing"}
    logged = {name for secret, name in {**keys, credential: "the upstream's credential"}.items() if secret in text}
    return {
        "no client key reaches the upstream": "; ".join(sorted(leaked)),
        "every request carries the upstream's credential": "; ".join(sorted(bare)),
        "no secret is in the log": "; ".join(sorted(logged)),
    }


def is_credited(got: Received, credential: str) -> bool:
    header, value = format_of(got.target.partition("?")[0]).credential
    return got.header(header) == value.format(credential)


def report(trials: list[Trial], checks: dict[str, str], log: list[str]) -> int:
    for check, reason in checks.items():
        print(f"FAILED every SDK: {check}: {reason}" if reason else f"ok every SDK: {check}")
    reasons = [*checks.values(), *(reason for trial in trials for reason in trial.results.values())]
    passed, failed = reasons.count(""), len(reasons) - reasons.count("")
    if failed:
        print("\nTollgate's log:\n" + "".join(log))
    print_table(trials)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


def print_table(trials: list[Trial]) -> None:
    widths = {case: max(len(case), len("FAIL")) + 2 for case in CASES}
    print(f"\n{'SDK':<34}" + "".join(f"{case:>{width}}" for case, width in widths.items()))
    for trial in trials:
        cells = {case: {None: "–", "": "ok"}.get(trial.results.get(case), "FAIL") for case in CASES}
        print(f"{trial.name:<34}" + "".join(f"{cells[case]:>{width}}" for case, width in widths.items()))
    print("\n" + LEGEND, end="")
    untried = [trial for trial in trials if trial.unavailable]
    for trial in untried:
        print(f"– {trial.name} {trial.unavailable}")
    if untried:
        print(f"{len(untried)} of {len(trials)} SDKs were not tried")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
