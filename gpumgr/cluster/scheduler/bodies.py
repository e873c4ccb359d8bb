"""The memory that the bodies of requests take, before anything in them is checked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

#: A request with whole nodes has up to 128 MB.
BODY_SECONDS: Final = 30.0


class Bodies:
    """Each body has at most `most_bytes`, and all that are in memory have at most `total_bytes` together."""

    def __init__(self, most_bytes: int, total_bytes: int) -> None:
        self._most_bytes, self._total_bytes = most_bytes, total_bytes
        self._total = 0

    @asynccontextmanager
    async def of(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The whole body, as long as it is needed.

        Raises HTTPRequestEntityTooLarge, HTTPServiceUnavailable if the bodies take too much together, HTTPRequestTimeout if the body has
        not arrived in BODY_SECONDS, and ConnectionError if the client has gone.
        """
        size, chunks = 0, list[bytes]()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    self._total += len(chunk)
                    if size > self._most_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._most_bytes)
                    if self._total > self._total_bytes:
                        raise web.HTTPServiceUnavailable(
                            text=f"the bodies of all requests together have more than {self._total_bytes >> 20} MiB; try again\n"
                        )
                    chunks.append(chunk)  # a bytearray would take 22 MiB more for 600 bodies, since it grows by copies
            data = b"".join(chunks)
            chunks.clear()
            yield data
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive in {BODY_SECONDS:g} s\n") from error
        finally:
            self._total -= size
