"""A real HTTP server on this machine that answers with given statuses."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import requests


class Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        server = self.server
        status = server.statuses[min(server.requests, len(server.statuses) - 1)]
        server.requests += 1
        if status == 0:
            self.connection.close()
            return
        if status == -1:
            time.sleep(0.5)
        self.send_response(200 if status == -1 else status)
        for name, value in {**server.headers, "Content-Length": "2"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the console."""


@contextmanager
def serving(*statuses: int, headers: Mapping[str, str] = {}) -> Iterator[Any]:
    """Gives the statuses in turn, the last for ever. 0 closes the connection, -1 answers late."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.statuses, server.headers, server.requests = statuses, headers, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def by_requests(url: str) -> str:
    requests.get(url, timeout=5).raise_for_status()
    return "done"


def by_httpx(url: str) -> str:
    httpx.get(url, timeout=5).raise_for_status()
    return "done"
