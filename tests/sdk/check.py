"""What the checks beside the matrix share: how one is judged, and how it runs a program of an SDK."""

from __future__ import annotations

import subprocess
from typing import Callable

PROGRAM_TIMEOUT_S = 120


def outcome(case: Callable[[], None]) -> str:
    """Nothing, or why it failed, in one line."""
    try:
        case()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def expect(condition: object, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", timeout=PROGRAM_TIMEOUT_S, check=False
    )
