"""Uploads of files through the gate, by Google's SDKs for Python and Node: the start with a key, the rest without.

`checks` runs them all, against an upstream that speaks Google's resumable protocol as far as these need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Iterator

from check import expect, outcome, run
from gate import Gate

# More than the 8 MiB that the SDKs send at a time.
FILE_BYTES = 20_000_000

CONFIG = """
[server]
listen = "127.0.0.1:0"
[server.tls]
certificate = "server.crt"
private_key = "server.key"
[admin]
listen = "127.0.0.1:0"
[tiers.two]
limits = [{{ requests = 2, per = "1h" }}]
[[keys]]
id = "caller"
hash = "sha256:{digest}"
tier = "two"
[[upstreams]]
name = "gemini"
url = "{url}"
paths = ["/v1beta", "/upload"]
credential = {{ header = "x-goog-api-key", value = "{credential}" }}
"""

PYTHON = """
import sys
from google import genai
url, key, path = sys.argv[1:]
client = genai.Client(api_key=key, http_options={"base_url": url})
print(client.files.upload(file=path).name)
"""

NODE = """
const { GoogleGenAI } = require('@google/genai');
const [url, key, path] = process.argv.slice(1);
const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: url } });
client.files.upload({ file: path, config: { mimeType: 'text/plain' } }).then(
    (file) => console.log(file.name),
    (error) => { console.log(error); process.exitCode = 1; },
);
"""


class Google(BaseHTTPRequestHandler):
    """Keeps what came, in `server.seen`, and the bytes of each session, in `server.files`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silent: the suite prints what matters."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        command = self.headers.get("x-goog-upload-command", "")
        self.server.seen.append((self.path, list(self.headers.items()), command))
        if command == "start":
            session = str(uuid.uuid4())
            self.server.files[session] = b""
            origin = f"http://127.0.0.1:{self.server.server_address[1]}"
            url = f"{origin}/upload/v1beta/files?upload_id={session}&upload_protocol=resumable"
            return self.reply({}, {"x-goog-upload-url": url, "x-goog-upload-status": "active"})
        session = self.path.partition("upload_id=")[2].partition("&")[0]
        self.server.files[session] += body
        if "finalize" not in command:
            return self.reply({}, {"x-goog-upload-status": "active"})
        self.reply({"file": {"name": f"files/{session}"}}, {"x-goog-upload-status": "final"})

    def reply(self, payload: dict, headers: dict[str, str]) -> None:
        body = json.dumps(payload).encode()
        self.send_response(200)
        for name, value in {**headers, "content-type": "application/json", "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def checks(tollgate: str, python: str, node: str, node_modules: str) -> dict[str, str]:
    """Nothing, or why it failed, by the name of each check."""
    programs = {
        "google-genai (Python)": [python, "-B", "-c", PYTHON],
        "@google/genai (Node)": [node, "-e", NODE, "--"],
    }
    return {
        f"a file is uploaded by {name}": outcome(lambda: upload(tollgate, program, node_modules))
        for name, program in programs.items()
    }


@contextlib.contextmanager
def google() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Google)
    server.daemon_threads, server.seen, server.files = True, [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def upload(tollgate: str, program: list[str], node_modules: str) -> None:
    """An upload in several pieces counts once, and all of it comes through the gate."""
    key, credential = (f"sk-tg-caller-{secrets.token_hex(32)}", f"upstream-{secrets.token_hex(32)}")
    with tempfile.TemporaryDirectory(prefix="tollgate-files-") as folder, google() as upstream:
        contents = secrets.token_bytes(FILE_BYTES)
        path = Path(folder) / "file.txt"
        path.write_bytes(contents)
        digest, url = hashlib.sha256(key.encode()).hexdigest(), f"http://127.0.0.1:{upstream.server_address[1]}"
        config = CONFIG.format(digest=digest, url=url, credential=credential)
        (Path(folder) / "proxy.toml").write_text(config)
        with Gate(tollgate, Path(folder)) as gate:
            certificate = str(Path(folder) / "server.crt")
            trust = {"SSL_CERT_FILE": certificate, "NODE_EXTRA_CA_CERTS": certificate, "NODE_PATH": node_modules}
            # A second one is admitted too: the pieces of the first have not counted.
            names = [uploaded_name([*program, gate.url, key, str(path)], {**os.environ, **trust}) for _ in range(2)]
        for name in names:
            uploaded = upstream.files.get(name.partition("/")[2])
            expect(uploaded == contents, f"{name} is not what was sent")
        expect(len(upstream.seen) > 4, f"only {len(upstream.seen)} requests came")
        for target, headers, _ in upstream.seen:
            text = json.dumps([target, headers])
            expect(key not in text and "tollgate" not in text, f"too much in {text}")
            expect(credential in text, f"no credential in {text}")
        expect("tollgate-upload" not in "".join(gate.log), "a signature is in the log")


def uploaded_name(command: list[str], environment: dict[str, str]) -> str:
    ran = run(command, environment)
    expect(ran.returncode == 0, f"{ran.stdout} {ran.stderr}")
    return ran.stdout.strip()
