"""The page that chats in a browser, at /chat/ with --chat-page: three static files over the API beside it.

The files are public, as they hold nothing; what they send passes the gate like any request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

DIRECTORY = Path(__file__).parent / "chat_page"
# Nothing from elsewhere runs in the page or is sent to, and no other page can show it in a frame.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class ChatPage(StaticFiles):
    """An ASGI application for a mount."""

    def __init__(self) -> None:
        super().__init__(directory=DIRECTORY, html=True)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """With headers that keep the page to itself."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response
