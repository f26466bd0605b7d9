"""One JSON object sent to a server."""

from __future__ import annotations


def post(url: str, content: str, token: str, certificate: str, seconds: float) -> None:
    """Sends JSON by POST, with a bearer's token if there is one. It follows no redirect, which would carry the token
    to another host. `certificate`: the file of an authority that is trusted; empty: the system's. Raises OSError or
    ValueError if the server does not take it in so many seconds."""
    import ssl  # other runs need nothing of the web
    from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

    class Stays(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    opener = build_opener(Stays, HTTPSHandler(context=ssl.create_default_context(cafile=certificate or None)))
    with opener.open(Request(url, content.encode(), headers, method="POST"), timeout=seconds) as answer:
        answer.read(1 << 16)
