"""A real HTTP server on this machine that answers with given statuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import requests


class Server:
    """Answers with its `statuses` one after another, the last one for ever.

    A status of 0 closes the connection without an answer, and -1 answers after half a second.
    """

    def __init__(self, *statuses: int, headers: Mapping[str, str] = {}) -> None:
        self.statuses = list(statuses)
        self.headers = dict(headers)
        self.requests = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                at = min(server.requests, len(server.statuses) - 1)
                server.requests += 1
                status = server.statuses[at]
                if status == 0:
                    self.connection.close()
                    return
                if status == -1:
                    time.sleep(0.5)
                body = b"{}"
                self.send_response(200 if status == -1 else status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on the console."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def by_requests(url: str) -> str:
    requests.get(url, timeout=5).raise_for_status()
    return "done"


def by_httpx(url: str) -> str:
    httpx.get(url, timeout=5).raise_for_status()
    return "done"


@contextmanager
def serving(*statuses: int, headers: Mapping[str, str] = {}) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(*statuses, headers=headers)
    try:
        yield server
    finally:
        server.close()
