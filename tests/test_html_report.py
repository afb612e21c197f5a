"""The page about an engine: self-contained, complete, and the same in a browser; its pictures hold what they are made of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from enginewright.cli import engine, optimize
from enginewright.html_report.charts import bars, shares
from enginewright.html_report.graphs import draw_layer, first_layer
from enginewright.passes.capture import capture
from tests.passes.architectures import folder
from tests.runtime.server.browser import Browser, open_browser

SECTIONS = [
    "Engine",
    "Verification",
    "Figures",
    "Divergence by position",
    "Error by layer",
    "Sizes",
    "Memory to serve it",
    "Passes",
    "The first layer, before and after",
    "Provenance",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    arguments = [folder("llama"), "-r", "int8", "-o", root / "engine", "--html", root / "build.html"]
    result = CliRunner(env={"COLUMNS": None}).invoke(optimize, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return root


def test_both_commands_write_the_page(built: Path) -> None:
    result = CliRunner(env={"COLUMNS": None}).invoke(
        engine, ["verify", str(built / "engine"), "--html", str(built / "verify.html")]
    )
    assert result.exit_code == 0, result.output
    manifest = json.loads((built / "engine" / "engine.json").read_text())
    for name in ("build.html", "verify.html"):
        text = (built / name).read_text()
        assert re.findall(r"<h2>(.*?)</h2>", text) == SECTIONS
        assert "<script" not in text and not re.search(r"(src|href)=|url\(", text)
        assert manifest["manifest_sha256"] in text and "preemption" in text
        assert f"{manifest['verification']['mean_kl']:.4g}" in text
        chart = text.split('aria-label="error by layer"')[1].split("</svg>")[0]
        for name, error in manifest["verification"]["matrices"].items():
            assert f"<title>{name}: {error:.4g}</title>" in chart
    assert "every file is what was built" in (built / "verify.html").read_text()


def test_a_browser_shows_it_whole(built: Path) -> None:
    with open_browser() as browser:
        check_in(browser, built / "build.html")


def check_in(browser: Browser, page_file: Path) -> None:
    with browser.page(page_file.as_uri()) as page:
        assert (
            page.locator("h1").inner_text().endswith("int8")
            and page.locator(".verdict").inner_text() == "passed"
        )
        assert page.locator("td.failed").count() == 0 and page.locator("td.passed").count() >= 8
        bars = page.get_by_role("img", name="mean KL divergence by position").locator("rect.bar")
        assert (
            bars.count() == page.locator("h2:has-text('Divergence') ~ table").first.locator("tr").count() - 1
        )
        after = page.get_by_role("img", name="the first layer as lowered")
        assert after.get_by_text("paged_attention", exact=True).is_visible()
        page.get_by_text("as it was captured").click()
        assert page.get_by_role("img", name="the first layer as captured").is_visible()
        boxes = after.locator("rect").evaluate_all(
            "all => all.map(box => box.getBoundingClientRect().toJSON())"
        )
        for i, one in enumerate(boxes):
            for other in boxes[i + 1 :]:
                apart = one["right"] <= other["left"] or other["right"] <= one["left"]
                assert apart or one["bottom"] <= other["top"] or other["bottom"] <= one["top"], (
                    "boxes overlap"
                )


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixtral"])
def test_the_first_layer_is_one_attention_and_what_belongs_to_it(arch: str) -> None:
    layer = first_layer(capture(folder(arch)))
    assert [node["op"] for node in layer].count("ew::attention") == 1
    names = [node["name"] for node in layer]
    assert len(set(names)) == len(names)
    assert all(source in names for node in layer for source in node["inputs"])
    drawn = draw_layer(layer, "a <layer>")
    assert drawn.count("<g class=") == len(layer) and "a &lt;layer&gt;" in drawn


@given(
    st.lists(st.tuples(st.text(max_size=20), st.floats(0, 1e9)), max_size=40), st.booleans(), st.booleans()
)
def test_charts_hold_every_value_and_no_markup_of_its_name(
    values: list[tuple[str, float]], log: bool, limited: bool
) -> None:
    named = [(f"<{label}>", value) for label, value in values]
    drawn = bars(named, "title", limit=1.0 if limited else None, log=log)
    if any(value > 1e-30 or not log for _, value in values):
        assert drawn.count('<rect class="bar') == len(values)
        for label, _ in named:
            assert label not in drawn
    assert not re.search(r'="-?(nan|inf)', drawn)
    assert shares(named, "title").count("<rect") == len(values)
