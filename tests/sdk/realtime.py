"""WebSockets through the gate, by the clients that people use: OpenAI's SDKs for Python and Node, and `websockets`.

`checks` runs them all, against an upstream that speaks OpenAI's Realtime API as far as these need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import ssl
import tempfile
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

from check import expect, outcome, run
from gate import Gate

PIECES = ["The ", "gate ", "öffnet."]
LARGE_BYTES = 10_000_000
# A client that is told to fall back does so at once; one that waits for something waits for longer.
AT_ONCE_S = 5

CONFIG = """
[server]
listen = "127.0.0.1:0"
[server.tls]
certificate = "server.crt"
private_key = "server.key"
[admin]
listen = "127.0.0.1:0"
[tiers.roomy]
limits = [{{ requests = 1000, per = "1m" }}]
[tiers.hour]
limits = [{{ requests = 1, per = "1h" }}]
[[keys]]
id = "roomy"
hash = "sha256:{roomy}"
tier = "roomy"
[[keys]]
id = "hour"
hash = "sha256:{hour}"
tier = "hour"
[[upstreams]]
name = "realtime"
url = "{url}"
paths = ["/v1"]
credential = {{ header = "authorization", value = "Bearer {credential}" }}
[[upstreams]]
name = "plain"
url = "{url}"
paths = ["/plain"]
websocket = false
"""

# The SDK has a client for each of Node's WebSockets. Node's own is that of browsers: it has no headers, so the key goes into
# a subprotocol. That of `ws` has headers, and agrees on an extension.
NODE_CLIENTS = {
    "as browsers do": "const { OpenAIRealtimeWebSocket: Realtime } = require('openai/realtime/websocket');",
    "by ws": "const { OpenAIRealtimeWS: Realtime } = require('openai/realtime/ws');",
}
NODE = r"""
const { OpenAI } = require('openai');
const [url, key] = process.argv.slice(1);
const client = new OpenAI({ apiKey: key, baseURL: url + '/v1', dangerouslyAllowBrowser: true });
const realtime = new Realtime({ model: 'm' }, client);
let text = '';
realtime.on('error', (error) => { console.log(error); process.exitCode = 1; });
realtime.on('session.created', () => realtime.send({ type: 'response.create' }));
realtime.on('response.output_text.delta', (event) => { text += event.delta; });
realtime.on('response.done', () => { console.log(text); realtime.close(); });
"""


class Scene:
    """The gate before its upstream, and what the upstream saw."""

    def __init__(self, gate: Gate, keys: dict[str, str], credential: str, certificate: Path, seen: list) -> None:
        self.gate, self.keys, self.credential, self.certificate, self.seen = gate, keys, credential, certificate, seen
        # Whatever proxy the caller of the suite has set, it is not for this.
        self.options = {"ssl": ssl.create_default_context(cafile=certificate), "proxy": None}
        self.base = f"{gate.url}/v1"
        self.socket = self.base.replace("https:", "wss:") + "/realtime?model=m"


def checks(tollgate: str, node: str, node_modules: str) -> dict[str, str]:
    """Nothing, or why it failed, by the name of each check."""
    with stage(tollgate) as scene:
        cases: dict[str, Callable[[], None]] = {
            "openai-python": lambda: openai_python(scene),
            **{
                f"openai-node, {name}": lambda client=client: openai_node(scene, node, node_modules, client)
                for name, client in NODE_CLIENTS.items()
            },
            "websockets, compressed and large": lambda: large(scene),
            "websockets, refused": lambda: refused(scene),
            "websockets, switched off": lambda: switched_off(scene),
            "websockets, a client that is gone": lambda: gone(scene),
        }
        results = {f"realtime by {name}": outcome(case) for name, case in cases.items()}
        results["realtime: no key passes, and the upstream's is set"] = outcome(lambda: no_key_passes(scene))
    return results


@contextlib.contextmanager
def stage(tollgate: str) -> Iterator[Scene]:
    keys = {tier: f"sk-tg-{tier}-{secrets.token_hex(32)}" for tier in ["roomy", "hour"]}
    credential = f"upstream-{secrets.token_hex(32)}"
    digests = {tier: hashlib.sha256(key.encode()).hexdigest() for tier, key in keys.items()}
    with tempfile.TemporaryDirectory(prefix="tollgate-realtime-") as folder, upstream() as (url, seen):
        text = CONFIG.format(url=url, credential=credential, **digests)
        (Path(folder) / "proxy.toml").write_text(text)
        with Gate(tollgate, Path(folder)) as gate:
            yield Scene(gate, keys, credential, Path(folder) / "server.crt", seen)


@contextlib.contextmanager
def upstream() -> Iterator[tuple[str, list]]:
    """Speaks Realtime, and keeps what each handshake said and how its connection ended."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    seen: list[dict] = []

    def talk(connection) -> None:
        request = connection.request
        mine = {"path": request.path, "headers": list(request.headers.raw_items()), "ended": threading.Event()}
        seen.append(mine)
        try:
            connection.send(json.dumps({"type": "session.created", "event_id": "e", "session": {"type": "realtime"}}))
            for message in connection:
                answer(connection, message)
        except ConnectionClosed:
            pass
        finally:
            mine["ended"].set()

    def chosen(connection, offered) -> str | None:
        return "realtime" if "realtime" in offered else None

    with serve(talk, "127.0.0.1", 0, select_subprotocol=chosen, max_size=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", seen
        server.shutdown()


def answer(connection, message: str | bytes) -> None:
    if isinstance(message, bytes):
        return connection.send(message)
    if json.loads(message)["type"] != "response.create":
        return
    place = {"event_id": "e", "response_id": "r", "item_id": "i", "output_index": 0, "content_index": 0}
    for piece in PIECES:
        connection.send(json.dumps({"type": "response.output_text.delta", "delta": piece, **place}))
    done = {"id": "r", "object": "realtime.response", "status": "completed", "output": []}
    connection.send(json.dumps({"type": "response.done", "event_id": "e", "response": done}))


def openai_python(scene: Scene) -> None:
    import openai

    client = openai.OpenAI(api_key=scene.keys["roomy"], base_url=scene.base)
    text = ""
    with client.realtime.connect(model="m", websocket_connection_options=scene.options) as connection:
        connection.response.create()
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.done":
                break
    expect(text == "".join(PIECES), f"it said {text!r}")


def openai_node(scene: Scene, node: str, node_modules: str, client: str) -> None:
    environment = {**os.environ, "NODE_PATH": node_modules, "NODE_EXTRA_CA_CERTS": str(scene.certificate)}
    command = [node, "-e", client + NODE, "--", scene.gate.url, scene.keys["roomy"]]
    ran = run(command, environment)
    expect(ran.stdout.strip() == "".join(PIECES), f"{ran.stdout} {ran.stderr}")
    offered = [value for name, value in scene.seen[-1]["headers"] if name.lower() == "sec-websocket-protocol"]
    expect(not any("insecure" in protocols for protocols in offered), f"the upstream was offered {offered}")
    expect(bool(offered) == ("/websocket'" in client), f"the subprotocols were {offered}")


def large(scene: Scene) -> None:
    from websockets.sync.client import connect

    headers = {"x-api-key": scene.keys["roomy"]}
    with connect(scene.socket, **scene.options, additional_headers=headers, max_size=None) as connection:
        expect(connection.protocol.extensions, "the extension was not agreed on")
        connection.recv()
        for frame in [b"x" * LARGE_BYTES, secrets.token_bytes(LARGE_BYTES)]:
            connection.send(frame)
            expect(connection.recv() == frame, "the frame came back changed")
        connection.ping().wait(AT_ONCE_S)


def refused(scene: Scene) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    for key, statuses in [("wrong", [401, 401]), (scene.keys["hour"], [101, 429])]:
        for status in statuses:
            try:
                with connect(scene.socket, **scene.options, additional_headers={"api-key": key}) as connection:
                    got = connection.response.status_code
            except InvalidStatus as error:
                got = error.response.status_code
                json.loads(error.response.body)
            expect(got == status, f"{got} in place of {status}")


def switched_off(scene: Scene) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    began = time.monotonic()
    try:
        connect(
            f"{scene.gate.url.replace('https:', 'wss:')}/plain/responses", **scene.options,
            additional_headers={"x-api-key": scene.keys["roomy"]},
        )
    except InvalidStatus as error:
        expect(error.response.status_code == 426, f"{error.response.status_code} in place of 426")
    else:
        raise AssertionError("it connected")
    expect(time.monotonic() - began < AT_ONCE_S, "it took its time")


def gone(scene: Scene) -> None:
    from websockets.sync.client import connect

    headers = {"x-goog-api-key": scene.keys["roomy"]}
    connection = connect(scene.socket, **scene.options, additional_headers=headers)
    connection.recv()
    connection.socket.close()
    expect(scene.seen[-1]["ended"].wait(AT_ONCE_S), "the upstream was not told")


def no_key_passes(scene: Scene) -> None:
    for got in scene.seen:
        text = json.dumps([got["path"], got["headers"]])
        expect(not any(key in text for key in scene.keys.values()), f"a key in {got['path']}")
        expect(f"Bearer {scene.credential}" in text, f"no credential in {got['path']}")
    log = "".join(scene.gate.log)
    expect(not any(secret in log for secret in [*scene.keys.values(), scene.credential]), "a secret is in the log")
