"""The sliding window as tutorials have it: FastAPI, a sorted set in Redis, first looked at and then written to, in two
round trips. What comes between them is what the benchmark's burst shows."""

import os
import time
import uuid
from contextlib import asynccontextmanager

import httpx
import redis.asyncio as redis
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import StreamingResponse

with open(os.environ["KEYS"]) as rows:
    LIMITS = {key: (int(limit), int(window)) for key, limit, window in (row.split("\t") for row in rows)}


@asynccontextmanager
async def lifespan(app: FastAPI):
    connections = httpx.Limits(max_connections=4096, max_keepalive_connections=512)
    app.state.redis = redis.Redis.from_url(os.environ["REDIS_URL"], max_connections=4096)
    app.state.upstream = httpx.AsyncClient(
        base_url=os.environ["UPSTREAM"], timeout=httpx.Timeout(300), limits=connections, trust_env=False
    )
    yield
    await app.state.upstream.aclose()
    await app.state.redis.aclose()


app = FastAPI(lifespan=lifespan)


async def admit(request: Request, x_api_key: str = Header(default="")) -> dict[str, str]:
    if x_api_key not in LIMITS:
        raise HTTPException(401, "unknown key")
    limit, window = LIMITS[x_api_key]
    log, now = f"ratelimit:{x_api_key}", time.time()
    async with request.app.state.redis.pipeline() as look:
        look.zremrangebyscore(log, 0, now - window)
        look.zcard(log)
        _, used = await look.execute()
    fields = {"X-RateLimit-Limit": str(limit), "X-RateLimit-Reset": str(window)}
    if used >= limit:
        fields |= {"X-RateLimit-Remaining": "0", "Retry-After": str(window)}
        raise HTTPException(429, "over the limit", fields)
    async with request.app.state.redis.pipeline() as record:
        record.zadd(log, {f"{now}:{uuid.uuid4().hex[:8]}": now})
        record.expire(log, window + 1)
        await record.execute()
    return fields | {"X-RateLimit-Remaining": str(limit - used - 1)}


@app.post("/v1/{path:path}")
async def forward(path: str, request: Request, fields: dict[str, str] = Depends(admit)) -> StreamingResponse:
    upstream: httpx.AsyncClient = request.app.state.upstream
    head = {"content-type": "application/json", "authorization": "Bearer upstream-secret"}
    asked = upstream.build_request("POST", f"/v1/{path}", content=await request.body(), headers=head)
    answer = await upstream.send(asked, stream=True)

    async def body():
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()

    return StreamingResponse(body(), answer.status_code, fields, answer.headers.get("content-type"))
