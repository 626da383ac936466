"""Chromium for tests of the dashboard."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 120_000
"""How long to wait for what must happen, however slow the machine is."""

HERE = Path(__file__).parent


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Viewer:
    """A page of the dashboard. `errors` are what the console said and what scripts threw."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **context})
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.is_closed = False
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url + "/")

    def _on_console(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    def close(self) -> None:
        """Close the page, before its gateway: without one it reports errors. Its console must have been silent."""
        if not self.is_closed:
            self.is_closed = True
            self.context.close()
            assert self.errors == []

    def until_live(self) -> None:
        self.page.wait_for_selector("#connection[data-state=live]")
        self.page.wait_for_selector("#main:not([hidden])")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. The page's policy forbids scripts from texts, so it is polled."""
        while not self.page.evaluate(expression):
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def overlapping_texts(self) -> list[str]:
        """Pieces of text that cover each other or leave the window."""
        found: list[str] = self.page.evaluate((HERE / "overlapping_texts.js").read_text())
        return found

    def faint_texts(self) -> list[str]:
        """Texts with less contrast than WCAG AA asks for."""
        found: list[str] = self.page.evaluate((HERE / "faint_texts.js").read_text())
        return found
