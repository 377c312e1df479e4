"""The page in a real browser: it asks for nothing, and it fits."""

from __future__ import annotations

from healcore.tools.report.page import render
from healcore.tools.report.runs import read_reports
from tests.tools.report.chromium import needs_browser, open_page
from tests.tools.report.test_page import hostile

pytestmark = needs_browser


def test_it_asks_for_nothing_and_has_no_error(healed, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(render([*read_reports(healed), hostile()]), encoding="utf-8")
    opened = open_page(page, tmp_path)
    assert opened.console == []
    assert opened.asked == []


def test_a_page_that_asks_would_be_seen(tmp_path):
    page = tmp_path / "asks.html"
    page.write_text('<img src="http://tracker.example/1.png"><script>nonsense(</script>')
    opened = open_page(page, tmp_path)
    assert opened.asked == ["http://tracker.example/1.png"]
    assert opened.console


def test_nothing_overflows_on_a_phone(stopped, tmp_path):
    long = hostile()._replace(title="x" * 300, policy_name="y" * 300)
    text = render([*read_reports(stopped), long])
    # The page's own policy forbids scripts, so the test's script is in a page without the policy.
    script = "document.body.dataset.found = document.documentElement.scrollWidth <= innerWidth;"
    text = text.replace("Content-Security-Policy", "x").replace(
        "</body>", f"<script>{script}</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    assert open_page(page, tmp_path, width=500).data("found") == "true"
