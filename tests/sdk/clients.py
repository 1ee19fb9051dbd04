"""Drives one Python SDK, or curl: `python3 clients.py ADAPTER`. A line of input is a call, a line of output an event.

    {"do": "plain" | "stream" | "upload", "url": ..., "key": ..., "model": ..., "retries": null | number, "size": bytes}

A call ends with `{"text", "tokens", "headers"}` or with `{"raised", "status", "details", "headers"}`; a stream tells
`{"piece"}` before. Without `retries` an SDK does what it does by default; a `size` other than 0 makes the question so
long.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator, Mapping

QUESTION = "Grüße?"
TIMEOUT_S = 30


class Sdk:
    """How one SDK is used. A stream yields its pieces of text and, as a number, the output tokens."""

    package: str

    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        raise NotImplementedError

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        """The text, the output tokens, and the head where the SDK shows it."""
        raise NotImplementedError

    def stream(self, model: str) -> Iterator[str | int | None]:
        raise NotImplementedError

    def upload(self, model: str, size: int) -> None:
        """Sends that many bytes: as a file where the SDK sends files, else as a question."""
        self.plain(model, "x" * size)


class OpenAiChat(Sdk):
    package = "openai"

    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        import openai

        self.client = openai.OpenAI(api_key=key, base_url=url, timeout=TIMEOUT_S, **options)

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        raw = self.client.chat.completions.with_raw_response.create(model=model, messages=[user(question)])
        answer = raw.parse()
        return answer.choices[0].message.content, answer.usage.completion_tokens, raw.headers

    def stream(self, model: str) -> Iterator[str | int | None]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in self.client.chat.completions.create(model=model, messages=[user(QUESTION)], **options):
            yield from (choice.delta.content for choice in chunk.choices)
            yield chunk.usage and chunk.usage.completion_tokens

    def upload(self, model: str, size: int) -> None:
        self.client.files.create(file=("batch.jsonl", b"x" * size), purpose="batch")


class OpenAiResponses(OpenAiChat):
    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        raw = self.client.responses.with_raw_response.create(model=model, input=question)
        answer = raw.parse()
        return answer.output_text, answer.usage.output_tokens, raw.headers

    def stream(self, model: str) -> Iterator[str | int | None]:
        for event in self.client.responses.create(model=model, input=QUESTION, stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta
            elif event.type == "response.completed":
                yield event.response.usage.output_tokens


class Anthropic(Sdk):
    package = "anthropic"

    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        import anthropic

        self.client = anthropic.Anthropic(api_key=key, base_url=url, timeout=TIMEOUT_S, **options)

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        raw = self.client.messages.with_raw_response.create(model=model, max_tokens=100, messages=[user(question)])
        answer = raw.parse()
        return answer.content[0].text, answer.usage.output_tokens, raw.headers

    def stream(self, model: str) -> Iterator[str | int | None]:
        for event in self.client.messages.create(model=model, max_tokens=100, messages=[user(QUESTION)], stream=True):
            if event.type == "content_block_delta":
                yield event.delta.text
            elif event.type == "message_delta":
                yield event.usage.output_tokens


class AnthropicStream(Anthropic):
    """By the SDK's own gathering of a stream."""

    def stream(self, model: str) -> Iterator[str | int | None]:
        with self.client.messages.stream(model=model, max_tokens=100, messages=[user(QUESTION)]) as stream:
            yield from stream.text_stream
            yield stream.get_final_message().usage.output_tokens


class GoogleGenAi(Sdk):
    package = "google-genai"

    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        from google import genai

        # It does not retry unless told to, so there is nothing to switch off.
        self.client = genai.Client(api_key=key, http_options={"base_url": url, "timeout": TIMEOUT_S * 1000})

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        answer = self.client.models.generate_content(model=model, contents=question)
        return answer.text, answer.usage_metadata.candidates_token_count, answer.sdk_http_response.headers

    def stream(self, model: str) -> Iterator[str | int | None]:
        for chunk in self.client.models.generate_content_stream(model=model, contents=QUESTION):
            yield chunk.text
            yield chunk.usage_metadata.candidates_token_count


class LangChain(Sdk):
    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        self.options = {"api_key": key, "base_url": url, "timeout": TIMEOUT_S, "max_tokens": 100, **options}

    def chat(self, model: str) -> object:
        raise NotImplementedError

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        answer = self.chat(model).invoke(question)
        return str(answer.text), answer.usage_metadata["output_tokens"], None

    def stream(self, model: str) -> Iterator[str | int | None]:
        for chunk in self.chat(model).stream(QUESTION):
            yield str(chunk.text)
            yield chunk.usage_metadata and chunk.usage_metadata["output_tokens"]


class LangChainOpenAi(LangChain):
    package = "langchain-openai"

    def chat(self, model: str) -> object:
        from langchain_openai import ChatOpenAI

        # With a base URL it does not ask for the usage of a stream by itself.
        return ChatOpenAI(model=model, stream_usage=True, **self.options)


class LangChainAnthropic(LangChain):
    package = "langchain-anthropic"

    def chat(self, model: str) -> object:
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=model, **self.options)


class CurlError(Exception):
    """What curl shows of an answer that is not a success, or its own message."""

    def __init__(self, message: str, status: int | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status_code, self.headers = status, headers


class Curl(Sdk):
    """What the README shows, over HTTP/2, which no SDK here speaks."""

    package = "curl"
    version = "2"

    def __init__(self, url: str, key: str, options: dict[str, int]) -> None:
        retries = str(options.get("max_retries", 2))
        # `-q` keeps a ~/.curlrc out of it. The certificate comes from CURL_CA_BUNDLE. Without a bound it would wait an hour
        # if told to.
        self.command = [
            "curl", "-q", "--silent", "--show-error", "--no-buffer", "--compressed", f"--http{self.version}",
            "--max-time", str(TIMEOUT_S), "--retry", retries, "--retry-max-time", "120", f"{url}/chat/completions",
            "-H", f"X-API-Key: {key}", "-H", "Content-Type: application/json", "--data-binary", "@-",
        ]

    def plain(self, model: str, question: str) -> tuple[str, int, object]:
        body = json.dumps({"model": model, "messages": [user(question)]}).encode()
        with tempfile.NamedTemporaryFile() as output:
            command = [*self.command, "--dump-header", "-", "--output", output.name]
            curl = subprocess.run(command, input=body, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            answer = Path(output.name).read_text()
        # A head for each try, and one for each `100 Continue`.
        if curl.returncode != 0:
            raise CurlError(curl.stderr.decode())
        version, _, head = re.split("^HTTP/", curl.stdout.decode(), flags=re.MULTILINE)[-1].partition(" ")
        headers = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if int(head[:3]) >= 400:
            raise CurlError(answer, int(head[:3]), headers)
        if version != self.version:
            raise CurlError(f"the answer came over HTTP/{version}")
        answer = json.loads(answer)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"], headers

    def stream(self, model: str) -> Iterator[str | int | None]:
        body = json.dumps({"model": model, "stream": True, "messages": [user(QUESTION)]}).encode()
        keepalives = 0
        with subprocess.Popen(
            [*self.command, "--fail"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as curl:
            with curl.stdin as stdin:
                stdin.write(body)
            for line in curl.stdout:
                keepalives += line.startswith(b":")
                yield from in_line(line)
        if curl.returncode != 0:
            raise CurlError(f"curl ended with {curl.returncode}")
        if model.startswith(("keepalive", "silent")) and not keepalives:
            raise CurlError("no keepalive came through")


class CurlHttp1(Curl):
    version = "1.1"


def in_line(line: bytes) -> Iterator[str | int | None]:
    """What one line of a streamed chat completion holds."""
    # Nothing is in an empty line, in a comment, in the end mark, and in what a cut left of an event.
    with contextlib.suppress(ValueError):
        chunk = json.loads(line[len(b"data: "):])
        yield from (choice["delta"].get("content") for choice in chunk["choices"])
        yield chunk["usage"] and chunk["usage"]["completion_tokens"]


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


ADAPTERS = {
    "openai": OpenAiChat,
    "openai-responses": OpenAiResponses,
    "anthropic": Anthropic,
    "anthropic-stream": AnthropicStream,
    "google-genai": GoogleGenAi,
    "langchain-openai": LangChainOpenAi,
    "langchain-anthropic": LangChainAnthropic,
    "curl": Curl,
    "curl-http1": CurlHttp1,
}


def main() -> None:
    adapter = ADAPTERS[sys.argv[1]]
    tell(version=version_of(adapter))
    client = functools.lru_cache(maxsize=None)(lambda url, key, retries: adapter(url, key, options(retries)))
    for line in sys.stdin:
        call = json.loads(line)
        try:
            make(call, client(call["url"], call["key"], call["retries"]))
        except Exception as error:
            tell(**told(error))


def version_of(adapter: type[Sdk]) -> str | None:
    """The version that is installed, if any is."""
    if issubclass(adapter, Curl):
        return subprocess.run(["curl", "--version"], stdout=subprocess.PIPE, encoding="utf-8").stdout.split()[1]
    try:
        return importlib.metadata.version(adapter.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def options(retries: int | None) -> dict[str, int]:
    return {} if retries is None else {"max_retries": retries}


def make(call: dict, client: Sdk) -> None:
    """Makes one call, and tells how it went on."""
    if call["do"] == "plain":
        text, tokens, headers = client.plain(call["model"], "x" * call["size"] or QUESTION)
        tell(text=text, tokens=tokens, headers=headers and lower_case(headers))
    elif call["do"] == "upload":
        client.upload(call["model"], call["size"])
        tell(text="", tokens=0, headers=None)
    else:
        text, tokens = "", None
        for part in client.stream(call["model"]):
            if isinstance(part, int):
                tokens = part
            elif part:
                text += part
                tell(piece=part)
        tell(text=text, tokens=tokens, headers=None)


def told(error: Exception) -> dict:
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    headers = getattr(getattr(error, "response", error), "headers", None)
    causes, cause = [], error
    while cause:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return {
        "raised": type(error).__name__,
        "status": status if isinstance(status, int) else None,
        "details": f"{'; '.join(causes)} {getattr(error, 'body', None)}",
        "headers": headers and lower_case(headers),
    }


def lower_case(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
