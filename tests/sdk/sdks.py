"""The rows of the matrix: which SDKs, in which versions, and what their users see of an error."""

from __future__ import annotations

from dataclasses import dataclass

STAINLESS = {401: "AuthenticationError", 429: "RateLimitError", 500: "InternalServerError"}
OPENAI = {**STAINLESS, 413: "APIStatusError"}
OPENAI_NODE = {**STAINLESS, 413: "APIError"}
ANTHROPIC = {**STAINLESS, 413: "ContentTooLargeError"}
ANTHROPIC_BEFORE_2 = {**STAINLESS, 413: "RequestTooLargeError"}
LANGCHAIN_OPENAI = {
    401: "OpenAIAuthenticationError", 413: "APIStatusError", 429: "OpenAIRateLimitError", 500: "OpenAIAPIError",
}
LANGCHAIN_ANTHROPIC = {
    401: "AnthropicAuthenticationError", 413: "ContentTooLargeError", 429: "AnthropicRateLimitError",
    500: "AnthropicAPIError",
}
GOOGLE = {401: "ClientError", 413: "ClientError", 429: "ClientError", 500: "ServerError"}
GOOGLE_NODE = dict.fromkeys(GOOGLE, "ApiError")
AI = dict.fromkeys(GOOGLE, "AI_APICallError")
CURL = dict.fromkeys(GOOGLE, "CurlError")


# What stands behind the origin in the base URL of an SDK, as its documentation writes it.
BASES = {
    **dict.fromkeys(["openai", "openai-responses", "langchain-openai", "curl-http1", "curl"], "/v1"),
    **dict.fromkeys(["anthropic", "anthropic-stream", "langchain-anthropic", "google-genai"], ""),
    "ai-openai": "/v1",
    "ai-anthropic": "/v1",
    "ai-google": "/v1beta",
}


# What the table says of those that differ.
LEGEND = """\
google-genai does not retry. A 429 must be raised at once, and the same call succeed after the time that was told.
ai does not know `x-should-retry`. Told to wait an hour, it must give up after three tries.
"""

# The pin of an npm package that is not the current one: it is installed under a name of its own.
PREVIOUS = "previous"


@dataclass(frozen=True)
class Sdk:
    """One SDK in one version."""

    name: str
    runtime: str
    adapter: str
    dialect: str
    # The class of error by status.
    errors: dict[int, str]
    # A version that is not the current one: a line of previous.txt.
    pin: str | None = None
    # The oldest Python that the package installs on.
    python: tuple[int, int] = (3, 9)
    retries: bool = True
    # How often it tries when it is told to wait an hour, and not to retry.
    tries_for_an_hour: int = 1


def python(adapter: str, dialect: str, errors: dict[int, str], pin: str | None = None, **traits: object) -> Sdk:
    return Sdk(f"{adapter} py", "python", adapter, dialect, errors, pin, **traits)


def node(adapter: str, dialect: str, errors: dict[int, str], pin: str | None = None, **traits: object) -> Sdk:
    return Sdk(f"{adapter} node", "node", adapter, dialect, errors, pin, **traits)


SDKS = [
    python("openai", "openai", OPENAI, "openai==1.109.1"),
    python("openai", "openai", OPENAI, "openai==2.54.0", python=(3, 10)),
    python("openai", "openai", OPENAI),
    python("openai-responses", "openai", OPENAI),
    python("anthropic", "anthropic", ANTHROPIC_BEFORE_2, "anthropic==0.125.0"),
    python("anthropic", "anthropic", ANTHROPIC_BEFORE_2, "anthropic==1.17.0", python=(3, 10)),
    python("anthropic", "anthropic", ANTHROPIC, python=(3, 10)),
    python("anthropic-stream", "anthropic", ANTHROPIC, python=(3, 10)),
    python("google-genai", "gemini", GOOGLE, "google-genai==2.34.0", python=(3, 11), retries=False),
    python("google-genai", "gemini", GOOGLE, python=(3, 11), retries=False),
    python("langchain-openai", "openai", LANGCHAIN_OPENAI, python=(3, 10)),
    python("langchain-anthropic", "anthropic", LANGCHAIN_ANTHROPIC, python=(3, 10)),
    node("openai", "openai", OPENAI_NODE, PREVIOUS),
    node("openai", "openai", OPENAI_NODE),
    node("openai-responses", "openai", OPENAI_NODE, PREVIOUS),
    node("openai-responses", "openai", OPENAI_NODE),
    node("anthropic", "anthropic", {**STAINLESS, 413: "APIError"}, PREVIOUS),
    node("anthropic", "anthropic", ANTHROPIC),
    node("google-genai", "gemini", GOOGLE_NODE, PREVIOUS, retries=False),
    node("google-genai", "gemini", GOOGLE_NODE, retries=False),
    node("ai-openai", "openai", AI, PREVIOUS, tries_for_an_hour=3),
    node("ai-openai", "openai", AI, tries_for_an_hour=3),
    node("ai-anthropic", "anthropic", AI, PREVIOUS, tries_for_an_hour=3),
    node("ai-anthropic", "anthropic", AI, tries_for_an_hour=3),
    node("ai-google", "gemini", AI, PREVIOUS, tries_for_an_hour=3),
    node("ai-google", "gemini", AI, tries_for_an_hour=3),
    Sdk("curl HTTP/1.1", "python", "curl-http1", "openai", CURL),
    Sdk("curl HTTP/2", "python", "curl", "openai", CURL),
]
