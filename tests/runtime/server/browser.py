"""Headless Chromium for the tests of the page: Debian's, driven by Playwright. Without either the tests skip, visibly."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One running Chromium; each page has storage of its own."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    @contextlib.contextmanager
    def page(self, address: str, **options: Any) -> Iterator[Any]:
        """The page at `address`, opened. Afterwards: it asked nobody else, and no script failed."""
        options = {"viewport": {"width": 1400, "height": 900}, **options}
        context = self._browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(15_000)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith((address, "data:")) or faults.append(request.url),
        )
        page.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
        try:
            page.goto(address)
            yield page
        finally:
            context.close()
        assert not faults, faults


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium, or skip the test that wants it."""
    program = next((found for found in map(shutil.which, _NAMES) if found), None)
    if program is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to run as root
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield Browser(browser)
        finally:
            browser.close()
