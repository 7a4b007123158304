"""An ASGI middleware that asks the sidecar about each request, to copy beside refiller.py.

    app = RateLimit(app, sidecar=Sidecar(fallback="open"), limit="api")

Answers have the RateLimit and RateLimit-Policy headers of the IETF draft. A denied request gets 429 and a problem
document. While the sidecar is unavailable, requests pass or get 503, as its fallback says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from refiller import Sidecar

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def client_address(scope: Scope) -> str:
    """The address of the connection."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


class RateLimit:
    """Limits the requests of an ASGI application.

    limit is a name in the sidecar's file of limits. key says whose request it is, and tokens what it costs.
    """

    def __init__(
        self,
        app: App,
        *,
        sidecar: Sidecar,
        limit: str,
        key: Callable[[Scope], str] = client_address,
        tokens: Callable[[Scope], int] = lambda scope: 1,
    ) -> None:
        self.app, self.sidecar, self.limit = app, sidecar, limit
        self.key, self.tokens = key, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # The client blocks, so it runs in a thread of asyncio's pool.
        check = await asyncio.to_thread(self.sidecar.check, self.limit, self.key(scope), self.tokens(scope))
        headers = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in check["headers"].items()
            if name != "Content-Type" or not check["ok"]
        ]
        if not check["ok"]:
            await send({"type": "http.response.start", "status": check["status"], "headers": headers})
            await send({"type": "http.response.body", "body": check["body"]})
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        await self.app(scope, receive, send_with_headers)
