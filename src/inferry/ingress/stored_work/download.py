"""Stored content as a streamed response: read as fast as the client reads, and never as a whole."""

import asyncio
import logging
from collections.abc import AsyncIterator

from inferry.ingress.http.reply import Reply

log = logging.getLogger(__name__)


async def send_stream(reply: Reply, headers: bytes, chunks: AsyncIterator[bytes]) -> None:
    """Send the chunks. Ends early where the client disconnects; a failure resets the connection."""
    writable = asyncio.Event()
    reply.on_writable = reply.on_disconnect = writable.set
    if reply.request.method == b"HEAD":
        reply.respond(200, headers, b"")
        return
    reply.begin(headers)
    try:
        async for chunk in chunks:
            if reply.is_disconnected:
                return
            reply.write(chunk)
            while reply.is_paused and not reply.is_disconnected:
                writable.clear()
                await writable.wait()
    except Exception as error:
        log.warning("stored content could not be sent to its end: %s", type(error).__name__)
        # A response that ended normally would look complete.
        reply.abort()
        return
    if not reply.is_disconnected:
        reply.end(b"")
