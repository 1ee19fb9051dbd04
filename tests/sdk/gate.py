"""The binary, with its certificates, while a `with` block runs."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

# How long things may take on a slow machine before they count as hanging.
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
LOG_TIMEOUT_S = 20

AUTHORITY = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:localhost
authorityKeyIdentifier = keyid
subjectKeyIdentifier = hash
"""


class Gate:
    """Its URL, its log, and how often it refused each key."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.log: list[str] = []
        self.refusals: Counter[str] = Counter()
        self.logged = threading.Condition()
        self.returncode: int | None = None
        self.addresses: queue.Queue[str | None] = queue.Queue()
        command = [binary, "serve", "--config", str(folder / "proxy.toml"), "--log-format", "json"]
        # A process group of its own: Ctrl-C reaches the suite alone, which then ends its children in order.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()

    def __enter__(self) -> Gate:
        try:
            address = self.addresses.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            address = None
        if address is None:
            self.process.kill()
            sys.exit("Tollgate did not start to listen. Its log:\n" + "".join(self.log))
        self.url = f"https://localhost:{address.rpartition(':')[2]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.returncode = self.process.wait()
        self.reader.join()

    def read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            with contextlib.suppress(ValueError):
                fields = json.loads(line).get("fields", {})
                if fields.get("message") == "listening":
                    self.addresses.put(fields["address"])
                elif fields.get("status") == 429:
                    with self.logged:
                        self.refusals[fields["key"]] += 1
                        self.logged.notify_all()
        self.addresses.put(None)

    def wait_for_refusals(self, key: str, number: int) -> int:
        """Waits until the key was refused so often, and tells how often it was."""
        with self.logged:
            self.logged.wait_for(lambda: self.refusals[key] >= number, LOG_TIMEOUT_S)
            return self.refusals[key]


def make_private_certificate(folder: Path) -> Path:
    """Makes `server.crt` and `server.key`, signed by an authority that nobody knows. The answer is its certificate."""
    (folder / "openssl.cnf").write_text(AUTHORITY)
    new = "-newkey rsa:2048 -nodes -config openssl.cnf"
    for command in [
        f"req {new} -x509 -extensions authority -subj /CN=Private -keyout ca.key -out ca.crt",
        f"req {new} -subj /CN=localhost -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile openssl.cnf"
        " -extensions server -out server.crt",
    ]:
        made = subprocess.run(["openssl", *command.split()], cwd=folder, stderr=subprocess.PIPE, encoding="utf-8")
        if made.returncode != 0:
            sys.exit(f"openssl {command} failed:\n{made.stderr}")
    (folder / "server.key").chmod(0o600)
    return folder / "ca.crt"
