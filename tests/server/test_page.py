"""The chat page in a real browser: what a person does there, and how it looks."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from live_server import PATIENCE, Live, wait_until
from page_driver import THOUGHT, Page, expect, needs_chromium

pytestmark = needs_chromium
Serve = Callable[..., Live]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_send_and_stream(open_page: Callable[..., Page], scheme: str) -> None:
    p = open_page(color_scheme=scheme)
    p.shot(f"empty-{scheme}")
    p.ask("How does attention work in gpt-oss?")
    expect(p.page.locator("#live")).to_contain_text("tok/s")
    p.answered()
    assert p.page.locator(".thought .label").inner_text().startswith("Thought for")
    assert not p.page.locator(".thought .body").is_visible()  # folded
    p.page.click(".thought summary")
    assert p.page.locator(".thought .body").inner_text() == THOUGHT
    p.page.click(".thought summary")
    answer = p.page.locator(".turn.assistant .md")
    assert answer.locator("strong").inner_text() == "128 tokens"
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol ul li").count() == 2
    assert answer.locator("table td").count() == 4
    assert "# even layers slide" in answer.locator("pre code").inner_text()
    assert answer.locator("script").count() == 0
    assert answer.locator("a").count() == 0
    assert '<script>alert("no")</script>' in answer.inner_text()
    stats = p.page.locator(".acts .stat").inner_text()
    assert "tok/s" in stats
    assert "TTFT" in stats
    assert p.page.locator("html").get_attribute("data-theme") == scheme
    p.shot(f"chat-{scheme}")


def test_stop_and_regenerate(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("a long story")
    expect(p.page.locator(".md")).to_contain_text("word word word word word")
    p.page.keyboard.press("Escape")
    p.answered()
    assert p.page.locator(".note").inner_text() == "Stopped."
    wait_until(lambda: live.source.active == 0)
    assert live.source.cancelled
    p.page.click("[aria-label=Regenerate]")
    expect(p.page.locator(".md")).to_contain_text("word word word word word")
    p.page.click("[aria-label=Stop]")
    p.answered()
    assert p.page.locator(".turn.assistant").count() == 1
    assert len(live.source.requests) == 2


def test_conversation_survives_a_reload(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("plain one")
    p.answered(1)
    p.ask("plain two")
    p.answered(2)
    p.page.reload()
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one", "plain two"]
    assert p.page.locator(".item").count() == 1
    p.page.keyboard.press("Control+Shift+O")
    assert p.page.locator(".bubble").count() == 0
    p.page.click(".item button >> text=plain one")
    p.ask("plain three")
    p.answered(3)
    assert live.source.prompts()[-1].count("Just a line.") == 2


def test_edit_with_the_keyboard(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("plain first")
    p.answered()
    p.page.focus("#prompt")
    p.page.keyboard.press("ArrowUp")
    p.page.keyboard.type(" again")
    p.page.keyboard.press("Enter")
    p.answered()
    assert p.page.locator(".bubble").all_inner_texts() == ["plain first again"]
    p.page.keyboard.press("Control+/")
    assert p.page.locator("#keys").is_visible()


def test_tool_call(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.page.keyboard.press("Control+,")
    p.page.click("#s-example")
    p.page.click("#s-save")
    p.ask("What is the weather in Bern?")
    p.page.wait_for_selector(".call textarea")
    assert "get_weather" in p.page.locator(".call summary").inner_text()
    assert json.loads(p.page.locator(".call pre").first.inner_text()) == {"place": "Bern"}
    p.page.fill(".call textarea", "21 °C, sunny")
    p.shot("tool-light")
    p.page.click("text=Give result")
    p.answered(2)
    assert "21 °C" in p.page.locator(".md").last.inner_text()
    assert "21 °C, sunny" in live.source.prompts()[-1]


def test_phone(open_page: Callable[..., Page]) -> None:
    p = open_page(viewport={"width": 390, "height": 844}, device_scale_factor=2, has_touch=True, color_scheme="dark")
    p.ask("How does attention work?")
    p.answered()
    for part in (".md", ".bubble", ".box", ".bar"):
        box = p.page.locator(part).first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    p.shot("phone-dark")
    assert not p.page.locator("#side").is_visible()
    p.page.click("#menu")
    assert p.page.locator("#side").is_visible()
    p.shot("phone-side-dark")
    p.page.click("#new")
    assert not p.page.locator("#side").is_visible()


def test_effort_reaches_the_model(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.page.check("input[value=high]", force=True)
    p.ask("plain")
    p.answered()
    assert "Reasoning: high" in live.source.prompts()[0]
    p.page.reload()
    assert p.page.is_checked("input[value=high]")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1180), ("dark", 1180), ("light", 390), ("dark", 390)])
def test_tables_and_mathematics(open_page: Callable[..., Page], scheme: str, width: int) -> None:
    p = open_page(color_scheme=scheme, viewport={"width": width, "height": 844}, device_scale_factor=2)
    p.ask("formulas")
    p.answered()
    expect(p.page.locator(".katex").first).to_be_visible(timeout=1000 * PATIENCE)
    assert p.page.locator(".math.display .katex-display").count() == 1
    assert p.page.locator(".katex-error").count() == 0
    # A cell is at least as wide as its longest word: nothing breaks within one.
    broken = p.page.evaluate(
        """() => [...document.querySelectorAll('.md td, .md th')].filter((c) => {
             const range = document.createRange(); const bad = [];
             for (const text of c.childNodes) if (text.nodeType === 3) for (const w of text.data.matchAll(/\\S+/g)) {
               range.setStart(text, w.index); range.setEnd(text, w.index + w[0].length);
               if (range.getClientRects().length > 1) bad.push(w[0]);
             }
             return bad.length; }).map((c) => c.textContent)"""
    )
    assert broken == []
    assert p.page.evaluate("document.documentElement.scrollWidth") <= width
    assert p.page.locator("#effort-label").is_visible()
    p.shot(f"formulas-{scheme}-{width}")


def test_suggestions_are_asked(open_page: Callable[..., Page]) -> None:
    p = open_page()
    first = p.page.locator(".starters button").first
    text = first.inner_text()
    first.click()
    p.answered()
    assert p.page.locator(".bubble").all_inner_texts() == [text]
    expect(p.page.locator(".starters")).to_be_hidden()
