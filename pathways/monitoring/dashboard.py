"""What a port of the dashboard serves: the page, which tells of no cluster, and the stream, which wants the secret."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable

from pathways.monitoring.feed import Feed
from pathways.monitoring.local_server import Answer, Request, Resource

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def resources(feed: Feed) -> dict[str, Resource]:
    """By path. The page asks for no secret, because a browser brings none when it opens an address."""
    folder = importlib.resources.files("pathways.monitoring") / "page"
    found = {}
    for path, (name, kind) in _FILES.items():
        found[path] = Resource(_always(Answer((folder / name).read_bytes(), kind)), is_open=True)

    def stream(request: Request) -> Answer:
        return Answer(feed.stream(request.query.get("log", "")), "text/event-stream; charset=utf-8")

    return {**found, "/stream": Resource(stream)}


def _always(answer: Answer) -> Callable[[Request], Answer]:
    return lambda _: answer
