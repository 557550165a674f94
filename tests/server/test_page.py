"""The chat page in a real browser: Debian's chromium, driven by Playwright. Set SHOTS to a folder to keep pictures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import PATIENCE, Live, wait_until
from scripted import Play, ScriptedSource, call, say

from halfbyte.server.settings import ServerSettings

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]
Serve = Callable[..., Live]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]

ANSWER = """A sliding-window layer looks back **128 tokens** and no further, so its cache stops growing there.

1. Even layers slide, odd layers see everything.
2. Each head has a learned *sink*:
   - it joins the softmax,
   - it adds nothing to the output.

| layer | reads at 32k |
|---|---:|
| sliding | 128 tokens |
| full | 32,768 tokens |

```python
def visible(layer: int, at: int) -> range:
    # even layers slide
    start = max(0, at - 127) if layer % 2 == 0 else 0
    return range(start, at + 1)
```

More in `docs/numerics.md`. <script>alert("no")</script> [bad](javascript:alert(1))"""
FORMULAS = r"""The sink $s$ joins the softmax, so that $\sum_i p_i < 1$:

$$
p_i = \frac{e^{z_i}}{e^{s} + \sum_{j} e^{z_j}}
$$

It costs $5, or $6 with a sink.

| operation | what it computes | which kernel runs it on the machine that serves you |
|---|---|---|
| attention | \(QK^T/\sqrt{d}\) and its softmax | cuda.flash_attention_with_sinks_and_a_long_name |
| misunderstanding | unbelievable | triton.attention |
"""
THOUGHT = "The user asks about attention in gpt-oss. Even layers slide over 128 tokens; mention sinks and give code."


def script(request: Any, index: int) -> Play:
    tokenizer = source_tokenizer
    prompt = tokenizer.decode(request.prompt)
    last = prompt.rpartition("<|start|>user<|message|>")[2]
    if "to=assistant<|channel|>commentary<|message|>" in last:
        return Play(say("It is **21 °C** and sunny in Bern."), delay=0.002)
    if "weather" in last:
        return Play(call("functions.get_weather", '{"place": "Bern"}', "I need the weather."), delay=0.002)
    if "long" in last:
        return Play(say("word " * 3000, "Counting."), delay=0.005)
    if "formulas" in last:
        return Play(say(FORMULAS), delay=0.002)
    if "plain" in last:
        return Play(say("Just a line."), delay=0.002)
    return Play(say(ANSWER, THOUGHT), delay=0.004)


source_tokenizer: Any = None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        chrome = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chrome
        chrome.close()


@pytest.fixture
def live(serve: Serve) -> Live:
    global source_tokenizer
    source = ScriptedSource(script, model="gpt-oss-20b", max_context=131072)
    source_tokenizer = source.tokenizer
    return serve(source)


class Page:
    """The page and what went wrong on it."""

    def __init__(self, browser: Any, live: Live, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1180, "height": 820}, **context})
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.watch()
        self.page.goto(live.url)
        expect(self.page.locator("#model")).to_have_text("gpt-oss-20b")

    def watch(self) -> None:
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda d: (self.problems.append(f"dialog: {d.message}"), d.dismiss()))

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answered(self, count: int = 1) -> None:
        expect(self.page.locator(".turn.assistant .acts:not([hidden])")).to_have_count(count, timeout=1000 * PATIENCE)

    def shot(self, name: str) -> None:
        if folder := os.environ.get("SHOTS"):
            self.page.wait_for_timeout(250)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        self.context.close()
        assert self.problems == []


@pytest.fixture
def open_page(browser: Any, live: Live) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def start(**context: Any) -> Page:
        pages.append(Page(browser, live, **context))
        return pages[-1]

    yield start
    for page in pages:
        page.close()


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


def test_key_is_asked_for(browser: Any, serve: Serve) -> None:
    source = ScriptedSource(lambda r, i: Play(say("ok")), model="gpt-oss-20b")
    live = serve(source, ServerSettings(min_available_bytes=0, api_keys=("sesame",)))
    context = browser.new_context()
    page = context.new_page()
    page.goto(live.url)
    page.wait_for_selector("#sheet[open]")
    page.fill("#s-key", "sesame")
    page.click("#s-save")
    expect(page.locator("#model")).to_have_text("gpt-oss-20b")
    context.close()


# ---- a page that loses nothing ---------------------------------------------------------------------------------------


class Tabs:
    """Several tabs of one browser."""

    def __init__(self, p: Page, live: Live) -> None:
        self.pages = [p]
        self.live = live

    def another(self) -> Page:
        first = self.pages[0]
        page = first.context.new_page()
        tab = Page.__new__(Page)
        tab.context, tab.page, tab.problems = first.context, page, first.problems
        tab.watch()
        page.goto(self.live.url)
        expect(page.locator("#model")).to_have_text("gpt-oss-20b")
        self.pages.append(tab)
        return tab


def titles(p: Page) -> list[str]:
    return sorted(p.page.locator(".item > button:first-child").all_inner_texts())


def stored(p: Page) -> list[dict[str, Any]]:
    """Every message in the browser's database, of all conversations and all their branches."""
    found: list[dict[str, Any]] = p.page.evaluate(
        """() => new Promise((give) => {
             const opened = indexedDB.open("halfbyte");
             opened.onsuccess = () => {
               const all = opened.result.transaction("conversations").objectStore("conversations").getAll();
               all.onsuccess = () => give(all.result.flatMap((c) => Object.values(c.nodes)));
             };
           })"""
    )
    return found


def test_two_tabs_lose_nothing(open_page: Callable[..., Page], live: Live) -> None:
    one = open_page()
    two = Tabs(one, live).another()
    one.ask("plain from one")
    one.answered()
    two.ask("plain from two")
    two.answered()
    for p in (one, two):  # each is told of the other's
        expect(p.page.locator(".item")).to_have_count(2)
        assert titles(p) == ["plain from one", "plain from two"]
    two.page.close()  # the last to close does not win
    one.page.reload()
    expect(one.page.locator(".item")).to_have_count(2)
    three = Tabs(one, live).another()
    three.page.click(".item button >> text=plain from one")
    one.page.click(".item button >> text=plain from one")
    one.ask("plain again one")
    three.ask("plain again three")  # both go on in one conversation, at the same time
    for p, text in ((one, "plain again one"), (three, "plain again three")):
        expect(p.page.locator(".acts:not([hidden])").last).to_be_visible(timeout=1000 * PATIENCE)
        assert text in p.page.locator(".bubble").all_inner_texts()
    asked = {"plain from one", "plain from two", "plain again one", "plain again three"}
    wait_until(lambda: asked == {m["text"] for m in stored(one) if m["role"] == "user"})
    one.page.close()
    three.page.reload()
    expect(three.page.locator(".item")).to_have_count(2)
    assert asked == {m["text"] for m in stored(three) if m["role"] == "user"}
    assert all(m["text"] == "Just a line." for m in stored(three) if m["role"] == "assistant")


def test_an_answer_that_is_written_in_another_tab_is_seen_to_grow(open_page: Callable[..., Page], live: Live) -> None:
    one = open_page()
    one.ask("a long story")
    expect(one.page.locator(".md")).to_contain_text("word word word")
    two = Tabs(one, live).another()
    expect(two.page.locator(".note")).to_have_text("Being written in another tab.")
    before = len(two.page.locator(".md").inner_text())
    wait_until(lambda: len(two.page.locator(".md").inner_text()) > before)
    one.page.keyboard.press("Escape")
    expect(two.page.locator(".note")).to_have_text("Stopped.")
    assert two.page.locator(".md").inner_text() == one.page.locator(".md").inner_text()


def test_deleting_can_be_undone(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("plain one")
    p.answered()
    p.page.keyboard.press("Control+Shift+O")
    p.ask("plain two")
    p.answered()
    p.page.click("[aria-label='Delete plain one']")
    assert titles(p) == ["plain two"]
    expect(p.page.locator("#toast")).to_contain_text("Deleted “plain one”.")
    p.shot("undo-light")
    p.page.click("#undo")
    assert titles(p) == ["plain one", "plain two"]
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one"]
    p.page.click("[aria-label='Delete plain one']")
    p.page.reload()  # the offer is gone, the conversation is not
    expect(p.page.locator(".item")).to_have_count(1)
    p.page.keyboard.press("Control+,")
    p.page.click("#s-bin summary")
    p.shot("bin-light")
    p.page.click("#s-bin >> text=Restore")
    p.page.keyboard.press("Escape")
    assert titles(p) == ["plain one", "plain two"]
    p.page.keyboard.press("Control+,")
    p.page.click("#s-wipe")
    assert titles(p) == []
    p.page.click("#undo")
    assert titles(p) == ["plain one", "plain two"]
    p.page.click("[aria-label='Delete plain one']")
    p.page.keyboard.press("Control+,")
    p.page.click("#s-bin summary")
    p.page.click("text=Delete for good")
    expect(p.page.locator("#s-bin")).to_be_hidden()
    p.page.reload()
    expect(p.page.locator(".item")).to_have_count(1)


def test_asking_an_early_question_again_keeps_what_followed(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    for n, text in enumerate(("plain one", "plain two", "plain three")):
        p.ask(text)
        p.answered(n + 1)
    p.page.locator("[aria-label=Regenerate]").first.click()
    p.answered(1)
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one"]
    expect(p.page.locator(".turn.assistant .branches")).to_have_text("2 / 2")
    p.shot("branch-light")
    p.page.click("[aria-label='Previous version']")
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one", "plain two", "plain three"]
    p.page.reload()
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one", "plain two", "plain three"]
    p.page.locator(".turn.user").nth(1).hover()
    p.page.locator("[aria-label=Edit]").nth(1).click()
    p.page.fill("textarea.edit", "plain other")
    p.page.keyboard.press("Enter")
    p.answered(2)
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one", "plain other"]
    assert "plain three" not in live.source.prompts()[-1]
    p.page.click(".turn.user [aria-label='Previous version']")
    assert p.page.locator(".bubble").all_inner_texts() == ["plain one", "plain two", "plain three"]


def test_a_reload_keeps_half_an_answer(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("a long story")
    expect(p.page.locator(".md")).to_contain_text("word word word word word word")
    shown = len(p.page.locator(".md").inner_text())
    p.page.reload()
    expect(p.page.locator(".note")).to_have_text("Cut off: the page was closed while this was being written.")
    assert len(p.page.locator(".md").inner_text()) >= shown
    assert p.page.locator(".bubble").all_inner_texts() == ["a long story"]
    p.page.click("[aria-label=Regenerate]")
    expect(p.page.locator(".md")).to_contain_text("word word word")
    p.page.keyboard.press("Escape")
    p.answered()


def test_the_header_says_when_the_server_is_gone(browser: Any, serve: Serve) -> None:
    source = ScriptedSource(lambda r, i: Play(say("ok")), model="gpt-oss-20b")
    live = serve(source)
    p = Page(browser, live)
    assert p.page.locator("#state").is_hidden()
    p.ask("hello")
    p.answered()
    p.context.set_offline(True)
    expect(p.page.locator("#state")).to_have_text("server gone", timeout=1000 * PATIENCE)
    p.shot("gone-light")
    p.context.set_offline(False)
    expect(p.page.locator("#state")).to_be_hidden(timeout=1000 * PATIENCE)
    source.ready = False
    p.page.evaluate("dispatchEvent(new Event('online'))")
    expect(p.page.locator("#state")).to_have_text("not ready", timeout=1000 * PATIENCE)
    p.problems.clear()  # the browser's own lines about the requests that failed
    p.close()


def test_a_wrong_key_is_called_wrong(browser: Any, serve: Serve) -> None:
    source = ScriptedSource(lambda r, i: Play(say("ok")), model="gpt-oss-20b")
    live = serve(source, ServerSettings(min_available_bytes=0, api_keys=("sesame",)))
    context = browser.new_context()
    page = context.new_page()
    page.goto(live.url)
    expect(page.locator("#s-bad")).to_have_text("This server asks for an API key.")
    page.fill("#s-key", "mustard")
    page.click("#s-save")
    expect(page.locator("#s-bad")).to_have_text("This API key is wrong.")
    page.fill("#s-key", "sesame")
    page.click("#s-save")
    expect(page.locator("#model")).to_have_text("gpt-oss-20b")
    expect(page.locator("#sheet")).to_be_hidden()
    context.close()


def test_what_an_earlier_page_kept_is_still_there(browser: Any, live: Live) -> None:
    context = browser.new_context()
    messages = [{"role": "user", "text": "old question"}, {"role": "assistant", "text": "old answer"}]
    old = [{"id": "a", "at": 1, "title": "old", "messages": messages}]
    context.add_init_script(f"localStorage.setItem('halfbyte.conversations', {json.dumps(json.dumps(old))})")
    page = context.new_page()
    page.goto(live.url)
    expect(page.locator(".bubble")).to_have_text("old question")
    expect(page.locator(".md")).to_have_text("old answer")
    context.close()


# ---- how it looks ------------------------------------------------------------------------------------------------


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
