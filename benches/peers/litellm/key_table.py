"""Keys and their requests a minute for LiteLLM, which has keys of its own only with a database beside it. A hook that
returns `UserAPIKeyAuth` is its documented way to bring one's own."""

import os

from fastapi import HTTPException, Request
from litellm.proxy._types import UserAPIKeyAuth, hash_token

with open(os.environ["KEYS"]) as rows:
    LIMITS = {key: int(limit) for key, limit, _ in (row.split("\t") for row in rows)}


async def check(request: Request, api_key: str) -> UserAPIKeyAuth:
    key = request.headers.get("x-api-key", "")
    if key not in LIMITS:
        raise HTTPException(status_code=401, detail="unknown key")
    return UserAPIKeyAuth(api_key=hash_token(key), rpm_limit=LIMITS[key])
