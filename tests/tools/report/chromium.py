"""A real browser, without a window and without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
needs_browser = pytest.mark.skipif(
    not FOUND, reason="no chromium here (apt-get install chromium): pages are not opened"
)

# Nothing is looked up: a page that asks for something gets an error, which it logs.
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
)
_BROWSER_S_OWN = r"https?://[\w.-]+\.(google|googleapis|gstatic|gvt1)\.com/"


class Opened:
    """A page as the browser showed it.

    Attributes:
        dom: its elements, after its scripts have run.
        console: what they have written there, errors of the page's own among them.
        asked: addresses that were asked for besides the file.
    """

    def __init__(self, dom: str, log: str, net_log: str) -> None:
        self.dom = dom
        self.console = re.findall(r".*CONSOLE.*", log)
        urls = re.findall(r'"url":\s*"([^"]*)"', net_log)
        asked = {url for url in urls if re.match(r"(https?|wss?|ftp):", url)}
        # The browser itself asks its maker for the time and for news, whatever the page.
        self.asked = sorted(url for url in asked if not re.match(_BROWSER_S_OWN, url))

    def data(self, name: str) -> str:
        """The value of a data attribute of the body, which the page's script has set."""
        found = re.search(rf'<body[^>]*data-{name}="([^"]*)"', self.dom)
        assert found, f"the script has not set data-{name}"
        return found[1]


def open_page(page: Path, folder: Path, *, width: int = 1280) -> Opened:
    """Opens a page, and waits for its scripts.

    Args:
        page: the file.
        folder: for the browser's own files.
        width: of the window, in pixels; the least is 500.
    """
    log = folder / "net.json"
    done = _run(
        folder, f"--window-size={width},900", f"--log-net-log={log}", "--dump-dom", str(page)
    )
    return Opened(done.stdout, done.stderr, log.read_text() if log.exists() else "")


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    rules = "--host-resolver-rules=MAP * ~NOTFOUND"
    own = f"--user-data-dir={folder / 'browser'}"
    command = [FOUND, *_ARGUMENTS, rules, own, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
