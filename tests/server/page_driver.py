"""The chat page as a person uses it, through Playwright and Debian's chromium, and what the model says there.

Set SHOTS to a folder to keep pictures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import PATIENCE, Live
from scripted import Play, ScriptedSource, call, say

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
MODEL = "gpt-oss-20b"
needs_chromium = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

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
TASKS = """To do:

- [x] write it
- [ ] *test* it
"""
MARKED_THOUGHT = "First **bold** steps:\n\n- one\n- two\n\n" + "More. " * 400
THOUGHT = "The user asks about attention in gpt-oss. Even layers slide over 128 tokens; mention sinks and give code."


def talkative() -> ScriptedSource:
    """Answers by a word of the last question."""

    def script(request: Any, index: int) -> Play:
        last = source.tokenizer.decode(request.prompt).rpartition("<|start|>user<|message|>")[2]
        if "to=assistant<|channel|>commentary<|message|>" in last:
            return Play(say("It is **21 °C** and sunny in Bern."), delay=0.002)
        if "<|channel|>final<|message|>" in last:  # an answer that was cut
            return Play(" and the rest.<|return|>", delay=0.002)
        if "<|channel|>analysis<|message|>" in last:
            return Play(" so it goes on.<|end|><|start|>assistant" + say("At last."), delay=0.002)
        if "breaks" in last:
            return Play(say("half of it is here, but not more", "Hm."), delay=0.002, fails_after=16)
        if "ponder" in last:
            return Play(say("Done.", MARKED_THOUGHT), delay=0.01)
        if "tasks" in last:
            return Play(say(TASKS), delay=0.002)
        if "weather" in last:
            return Play(call("functions.get_weather", '{"place": "Bern"}', "I need the weather."), delay=0.002)
        if "long" in last:
            return Play(say("word " * 3000, "Counting."), delay=0.005)
        if "formulas" in last:
            return Play(say(FORMULAS), delay=0.002)
        if "plain" in last:
            return Play(say("Just a line."), delay=0.002)
        return Play(say(ANSWER, THOUGHT), delay=0.004)

    source = ScriptedSource(script, model=MODEL, max_context=131072)
    return source


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("SHOTS"):
        page.wait_for_timeout(250)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


class Page:
    """The page and what went wrong on it."""

    def __init__(self, browser: Any, live: Live, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1180, "height": 820}, **context})
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.watch()
        self.page.goto(live.url)
        expect(self.page.locator("#model")).to_have_text(MODEL)

    def watch(self) -> None:
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda d: (self.problems.append(f"dialog: {d.message}"), d.dismiss()))

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answered(self, count: int = 1) -> None:
        expect(self.page.locator(".turn.assistant .acts:not([hidden])")).to_have_count(count, timeout=1000 * PATIENCE)

    def menu(self, title: str, entry: str) -> None:
        self.page.locator(".item", has_text=title).hover()
        self.page.click(f"[aria-label='More for {title}']")
        self.page.click(f"#more >> text={entry}")

    def download(self, click: Callable[[], None]) -> tuple[str, str]:
        """(name, text) of the file that a click gives."""
        with self.page.expect_download() as start:
            click()
        return start.value.suggested_filename, Path(start.value.path()).read_text(encoding="utf-8")

    def drop(self, *files: tuple[str, bytes], on: str = "#scroll", event: str = "drop") -> None:
        """Files that a person drops on the page (`event` "paste": pastes into the box)."""
        data = [{"name": name, "bytes": list(body)} for name, body in files]
        self.page.evaluate(
            """([files, on, event]) => {
                 const moved = new DataTransfer();
                 for (const f of files) moved.items.add(new File([new Uint8Array(f.bytes)], f.name));
                 const extra = event === "paste" ? { clipboardData: moved } : { dataTransfer: moved };
                 const Kind = event === "paste" ? ClipboardEvent : DragEvent;
                 const target = document.querySelector(on);
                 target.dispatchEvent(new Kind(event, { bubbles: true, cancelable: true, ...extra }));
               }""",
            [data, on, event],
        )

    def shot(self, name: str) -> None:
        shoot(self.page, name)

    def close(self) -> None:
        self.context.close()
        assert self.problems == []


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
        expect(page.locator("#model")).to_have_text(MODEL)
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
