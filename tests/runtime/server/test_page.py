"""The page at `/` in headless Chromium: against a server without a model here, against the real one in `test_page_served.py`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .browser import Browser, open_browser
from .fake_server import WORDS, Seen, make_app, serving

SENTENCE = " ".join(WORDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Any]:
    with serving(make_app(seen)) as address, browser.page(address) as opened:
        yield opened


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: Any) -> Any:
    return page.locator(".turn:not(.user)").last


def wait_for_answers(page: Any, count: int) -> None:
    """Until `count` answers stand there and none is on its way."""
    page.locator(".turn:not(.user):not(.busy)").nth(count - 1).wait_for()


# ------------------------------------------------------------------------------------------------- the files


def test_the_files_are_served_typed_and_revalidated() -> None:
    with serving(make_app(Seen())) as address, httpx.Client(base_url=address) as client:
        first = client.get("/")
        assert first.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:href|src)="([\w.]+\.(?:css|js))"', first.text)
        assert {"page.css", "page.js"} <= set(names)
        for name in names:
            answered = client.get(f"/{name}")
            assert (
                answered.status_code == 200
                and "default-src 'none'" in answered.headers["content-security-policy"]
            )
            tag = answered.headers["etag"]
            again = client.get(f"/{name}", headers={"If-None-Match": f'"other", W/{tag}'})
            assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
        assert client.head("/page.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/page.py").status_code == client.get("/../page.py").status_code == 404


def test_nothing_is_fetched_from_elsewhere() -> None:
    static = Path(__file__).resolve().parents[3] / "runtime" / "server" / "static"
    files = list(static.iterdir())
    assert len(files) > 3
    for path in files:
        assert not re.search(r"https?:|//\w+\.\w+|@import|url\(", path.read_text(encoding="utf-8")), path.name
    assert sum(path.stat().st_size for path in files) < 64_000


# -------------------------------------------------------------------------------------------- the playground


def test_a_conversation_streams_with_the_settings_that_were_made(page: Any, seen: Seen) -> None:
    page.get_by_text("connected", exact=True).wait_for()
    page.get_by_text("Settings", exact=False).first.click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Stop strings").fill("\nEND\n")
    page.get_by_label("Seed").fill("11")
    say(page, "What is the capital of France?")
    answer(page).get_by_text(SENTENCE).wait_for()
    answer(page).get_by_text(re.compile(r"^42 tokens · .*tokens/s · first after \d+ ms$")).wait_for()
    body = seen.bodies[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    assert body["model"] == "smollm2" and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert (body["temperature"], body["top_k"], body["seed"], body["stop"]) == (0.7, 40, 11, ["END"])
    assert body["max_tokens"] == 512
    assert not {"top_p", "min_p", "key", "system", "mode"} & set(
        body
    )  # what is not set is the server's to choose
    say(page, "And of Italy?")
    wait_for_answers(page, 2)
    assert [message["role"] for message in seen.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert seen.bodies[1]["messages"][2]["content"] == SENTENCE
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    say(page, "Hello")
    wait_for_answers(page, 1)
    assert len(seen.bodies[2]["messages"]) == 2


def test_a_plain_completion_goes_to_the_other_interface(page: Any, seen: Seen) -> None:
    page.get_by_text("Settings", exact=False).first.click()
    page.get_by_label("plain completion").check()
    say(page, "The capital of France is")
    answer(page).get_by_text(SENTENCE).wait_for()
    assert seen.bodies[0]["prompt"] == "The capital of France is" and "messages" not in seen.bodies[0]


@pytest.mark.parametrize("how", ["button", "escape", "new conversation"])
def test_stopping_leaves_the_server_at_once_and_keeps_what_was_said(page: Any, seen: Seen, how: str) -> None:
    say(page, "endless")
    answer(page).get_by_text("more more more").wait_for()
    if how == "new conversation":
        page.get_by_role("button", name="New conversation").click()
    elif how == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    page.locator("#send:enabled").wait_for()
    if how != "new conversation":
        answer(page).get_by_text("stopped").wait_for()
    say(page, "and now?")
    answer(page).get_by_text(SENTENCE).wait_for()
    assert seen.left == 1
    roles = [message["role"] for message in seen.bodies[1]["messages"]]
    assert roles == (["user"] if how == "new conversation" else ["user", "assistant", "user"])


def test_failures_are_told_and_can_be_tried_again(page: Any, seen: Seen) -> None:
    say(page, "break")
    answer(page).get_by_text("the request failed while it was computed").wait_for()
    assert "The capital of" in answer(page).inner_text()  # what came before the failure stays readable
    answer(page).get_by_role("button", name="Try again").click()
    wait_for_answers(page, 1)
    assert seen.bodies[0]["messages"] == seen.bodies[1]["messages"]
    say(page, "hang up")
    answer(page).get_by_text("the connection ended before the answer did").wait_for()
    assert len(seen.bodies[2]["messages"]) == 1  # the question that failed is not asked along
    say(page, "refuse")
    answer(page).get_by_role("button", name="Send as plain completion").click()
    answer(page).get_by_text(SENTENCE).wait_for()
    assert seen.bodies[-1]["prompt"] == "refuse"


def test_a_setting_that_cannot_be_is_not_sent(page: Any, seen: Seen) -> None:
    page.get_by_text("Settings", exact=False).first.click()
    page.get_by_label("Top-p").fill("7")
    say(page, "Hello")
    assert page.locator("input:invalid").count() == 1 and not seen.bodies
    page.get_by_role("button", name="Reset the settings").click()
    page.get_by_label("Message", exact=True).press("Enter")
    answer(page).get_by_text(SENTENCE).wait_for()
    assert "top_p" not in seen.bodies[0]


def test_what_a_model_says_is_text_and_nothing_else(page: Any) -> None:
    said = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    say(page, said)
    answer(page).get_by_text(said).wait_for()
    assert page.title() == "enginewright" and page.locator("#log img, #log script").count() == 0


def test_an_api_key_is_sent_and_never_kept(browser: Browser, seen: Seen) -> None:
    with serving(make_app(seen, "sesame")) as address, browser.page(address) as page:
        page.get_by_text("the server wants an API key").wait_for()
        page.get_by_text("Settings", exact=False).first.click()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("Min-p").fill("0.1")
        page.get_by_text("connected", exact=True).wait_for()
        say(page, "Hello")
        answer(page).get_by_text(SENTENCE).wait_for()
        assert seen.keys[-1] == "Bearer sesame"
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "0.1" in kept and "sesame" not in kept and "Hello" not in kept


# ---------------------------------------------------------------------------------------------- the live view


def test_the_live_view_shows_the_status(page: Any, seen: Seen) -> None:
    states = bytes([0, 1, 2, 3] * 50)
    seen.status = {
        "running": 5,
        "waiting": 101,
        "tokens_per_second": 123.4,
        "prefix_hit_rate": None,
        "ttft_ms": None,
        "kv_groups": [
            {
                "page_size": 16,
                "total": 200,
                "used": 100,
                "cached": 50,
                "map": base64.b64encode(states).decode(),
            }
        ],
        "requests": [
            {
                "id": "<b>r</b>",
                "state": "running",
                "prompt_tokens": 50,
                "computed": 30,
                "generated": 0,
                "age_s": 61.0,
            }
        ],
    }
    page.get_by_text("50 shared, 50 used, 50 cached, 50 free of 200 pages of 16 tokens").wait_for()
    assert page.locator("#running").inner_text() == "5 of 16" and page.locator("#rate").inner_text() == "123"
    assert page.locator("#hits").inner_text() == "–"
    cells = page.locator("#requests td").all_inner_texts()
    assert (
        cells[:2] == ["<b>r</b>", "running"]
        and cells[3:6] == ["50", "0", "1 min 1 s"]
        and cells[6] == "and 105 more"
    )
    assert page.locator("#requests progress").evaluate("bar => bar.value / bar.max") == pytest.approx(0.6)
    assert "p50 –" in page.get_by_role("img", name="First token").get_attribute("aria-label")


def test_speculation_is_shown_where_there_is_any(page: Any, seen: Seen) -> None:
    page.get_by_text("connected", exact=True).wait_for()
    assert page.get_by_text("drafts accepted").is_hidden() and page.get_by_text("tokens a step").is_hidden()
    assert page.locator("#policy").inner_text() == "policy latency"
    figures = {"drafter": "ngram", "acceptance_rate": 0.625, "tokens_per_step": 2.5}
    seen.status = {"speculation": figures}
    page.get_by_text("policy latency, drafts by ngram").wait_for()
    assert page.locator("#accepted").inner_text() == "63%" and page.locator("#each").inner_text() == "2.50"
    seen.status = {"speculation": {**figures, "acceptance_rate": None, "tokens_per_step": 1.0}}
    page.locator("#accepted", has_text="–").wait_for()
    assert page.locator("#each").inner_text() == "1.00"
    page.get_by_text("Settings", exact=False).first.click()
    page.get_by_label("Draft tokens").fill("0")
    say(page, "Hello")
    wait_for_answers(page, 1)
    seen.status = {}
    page.get_by_text("drafts accepted").wait_for(state="hidden")
    assert page.get_by_label("Draft tokens").is_hidden()
    say(page, "Hello again")
    wait_for_answers(page, 2)
    assert seen.bodies[0]["draft_tokens"] == 0 and "draft_tokens" not in seen.bodies[1]


def test_every_page_of_the_pool_has_its_colour_on_the_map(page: Any, seen: Seen) -> None:
    states = bytes([3] * 10 + [2] * 20 + [1] * 30 + [0] * 40)
    group = {
        "page_size": 16,
        "total": 100,
        "used": 30,
        "cached": 30,
        "map": base64.b64encode(states).decode(),
    }
    seen.status = {"kv_groups": [group]}
    page.get_by_text("10 shared, 20 used, 30 cached, 40 free of 100").wait_for()
    pixels = page.evaluate(COLOURS)
    assert len(pixels) == 4
    assert [count / pixels[0] for count in pixels] == [1, 2, 3, 4]
    many = base64.b64encode(bytes([2]) * 100_000).decode()
    seen.status = {
        "kv_groups": [{"page_size": 16, "total": 100_000, "used": 100_000, "cached": 0, "map": many}]
    }
    page.get_by_text("a square is 17 pages").wait_for()
    assert page.locator("#maps canvas").evaluate("c => c.clientHeight") < 400
    assert page.locator("#maps figure").count() == 1


COLOURS = """() => {
  const canvas = document.querySelector('#maps canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] !== 255) continue;
    const colour = [data[i], data[i + 1], data[i + 2]].join();
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  return Object.values(counts).sort((a, b) => a - b);
}"""


def test_a_server_that_is_gone_is_told_and_found_again(page: Any, seen: Seen) -> None:
    page.get_by_text("connected", exact=True).wait_for()
    page.route("**/status", lambda route: route.abort())
    page.get_by_text("The server does not answer").wait_for()
    assert page.locator("#link").inner_text() == "not connected"
    page.unroute("**/status")
    page.get_by_text("connected", exact=True).wait_for()
    assert page.locator("#problem").is_hidden()


def test_colours_follow_the_system_and_the_choice(page: Any) -> None:
    def brightness() -> int:
        return int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))

    page.emulate_media(color_scheme="dark")
    assert brightness() < 60
    page.get_by_label("Colours").select_option("light")
    assert brightness() > 200
    page.reload()
    assert brightness() > 200 and page.get_by_label("Colours").input_value() == "light"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Any, scheme: str) -> None:
    """WCAG 2.1, 1.4.3: 4.5 to 1 for text, against the nearest background behind it."""
    page.emulate_media(color_scheme=scheme)
    page.get_by_text("Settings", exact=False).first.click()
    say(page, "refuse")
    answer(page).get_by_role("button").wait_for()
    page.get_by_text("connected", exact=True).wait_for()
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 40
    assert min(ratio for ratio, _ in ratios) >= 4.5, sorted(ratios)[:5]


CONTRASTS = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = numbers(text).slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.disabled) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 80)]);
  }
  return found;
}"""


def test_the_keyboard_reaches_everything_and_every_field_has_a_name(page: Any) -> None:
    page.get_by_text("Settings", exact=False).first.click()
    page.locator("header").click()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
            )
        )
    wanted = {"message", "send", "clear", "theme", "log", "mode", "system", "temperature", "stop", "key"}
    assert wanted <= reached, wanted - reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button, canvas')]"
        ".filter((e) => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("width", [360, 800, 1500])
def test_no_width_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.get_by_text("Settings", exact=False).first.click()
    say(page, "x" * 300 + " <")
    answer(page).get_by_text("x" * 300).wait_for()
    page.get_by_text("connected", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
