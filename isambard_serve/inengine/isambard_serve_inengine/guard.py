"""An ASGI middleware that demands the API key on every route but ``/health``.

vLLM's own key guards some prefixes only: ``/invocations``, ``/tokenize`` and ``/metrics`` answer without it.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from . import facts

OPEN = "/health"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets through what carries ``Authorization: Bearer KEY``; answers 401 to all else.

    The key is ``$VLLM_API_KEY``. Without one nothing but ``/health`` is let through: a guard without a key is an
    error, and must not look like a guarded server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get("VLLM_API_KEY", "").strip().encode()
        facts.report_api_server()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] not in ("http", "websocket") or scope.get("path") == OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        wanted = b"Bearer " + self._key
        return bool(self._key) and len(given) == 1 and hmac.compare_digest(given[0], wanted)


async def _refuse(send: Send) -> None:
    body = json.dumps({"error": "Unauthorized"}).encode()
    await send({"type": "http.response.start", "status": 401, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer")]})
    await send({"type": "http.response.body", "body": body})
