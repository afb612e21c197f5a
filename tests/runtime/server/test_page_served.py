"""The page against `engine serve` itself, with real engines: what the fake server of `test_page.py` says, the real one does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import enginewright
from tests import engines
from tests.passes.architectures import folder

from .browser import Browser, open_browser
from .served import served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enginewright.optimize(folder("llama"), "fp32", tmp_path_factory.mktemp("engines") / "llama").path


def answer(page: Any) -> Any:
    return page.locator(".turn:not(.user):not(.busy)").last


def set_up(page: Any, **settings: str) -> None:
    page.locator("summary").click()
    for name, value in settings.items():
        page.locator(f"[name={name}]").fill(value)


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_conversation_with_smollm2(browser: Browser, tmp_path: Path) -> None:
    engine = engines.built("smollm2", "int4")
    with enginewright.load(engine) as loaded:
        wanted = loaded.generate("What is the capital of France?", max_tokens=24, chat=True)[0]
    speculating = ("--speculate", "ngram", "--draft-tokens", "4")
    with served(engine, tmp_path / "log", *speculating) as address, browser.page(address) as page:
        page.get_by_text("connected", exact=True).wait_for()
        set_up(page, temperature="0", max_tokens="24")
        say(page, "What is the capital of France?")
        answer(page).wait_for()
        assert answer(page).locator(".said").inner_text() == wanted.text.strip()
        assert f"{len(wanted.token_ids)} tokens" in answer(page).locator(".measured").inner_text()
        say(page, "And of Italy?")
        page.locator(".turn:not(.user):not(.busy)").nth(1).wait_for()
        assert page.locator(".failed").count() == 0
        # The first turn's pages are known when the second comes; the live view tells so.
        page.locator("#hits", has_text=re.compile(r"[1-9]\d*(\.\d)?%")).wait_for()
        assert re.fullmatch(r"0 of \d+", page.locator("#running").inner_text())
        assert "drafts by ngram" in page.locator("#policy").inner_text()
        assert re.fullmatch(r"[1-4]\.\d\d", page.locator("#each").inner_text())


def test_a_stopped_answer_frees_its_pages(browser: Browser, tmp_path: Path) -> None:
    with served(engines.built("smollm2", "int4"), tmp_path / "log") as address, browser.page(address) as page:
        page.get_by_text("connected", exact=True).wait_for()
        set_up(page, temperature="0", max_tokens="7000")
        page.locator("[value=completion]").check()
        # The model counts up to the limit: the answer is not over before it is stopped.
        say(page, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,")
        page.locator("#requests td", has_text="running").wait_for()
        assert page.locator("#maps figcaption", has_text=re.compile(r"[1-9]\d* used")).count() == 1
        page.keyboard.press("Escape")
        answer(page).get_by_text("stopped").wait_for()
        page.locator("#requests td", has_text="none").wait_for()
        page.locator("#maps figcaption", has_text="0 shared, 0 used").wait_for()


def test_a_model_without_a_chat_template_and_a_key(browser: Browser, tiny: Path, tmp_path: Path) -> None:
    options = ("--api-key", "sesame", "--served-model-name", "tiny")
    with served(tiny, tmp_path / "log", *options) as address, browser.page(address) as page:
        page.get_by_text("the server wants an API key").wait_for()
        set_up(
            page,
            key="sesame",
            temperature="0",
            max_tokens="5",
            seed="3",
            min_p="0.01",
            repetition_penalty="1.1",
        )
        page.get_by_text("connected", exact=True).wait_for()
        assert "tiny (llama)" in page.locator("#model").inner_text()
        say(page, "w5 w6 w7")
        page.get_by_role("button", name="Send as plain completion").click()
        page.locator(".turn.text:not(.busy) .said", has_text=re.compile(r"w\d+")).wait_for()
        assert "5 tokens" in answer(page).locator(".measured").inner_text()
