"""The floor: an extender on the same HTTP server that reads a request as gpumgr does, and answers with the first name.

`python -m tests.bench.extender_floor` prints its URL and serves until standard input ends.
"""

import asyncio
import sys

import msgspec
from aiohttp import web

from gpumgr.cluster.scheduler.wire import FilterArgs, FilterResult
from tests.bench.children import serve


async def first(request: web.Request) -> web.Response:
    names = msgspec.json.decode(await request.read(), type=FilterArgs).names()
    return web.Response(body=msgspec.json.encode(FilterResult(node_names=list(names[:1]))), content_type="application/json")


async def nothing(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b"[]", content_type="application/json")


if __name__ == "__main__":
    application = web.Application(client_max_size=1 << 27)
    application.add_routes([web.post("/scheduler/filter", first), web.post("/scheduler/prioritize", nothing)])
    asyncio.run(serve(application, sys.stdin.read))
