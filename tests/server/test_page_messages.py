"""Messages of the chat page: files, long pastes, reasoning while it is written, continued answers, the context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_server import PATIENCE, Live, wait_until
from page_driver import Page, Tabs, expect, needs_chromium, stored
from scripted import Play, ScriptedSource, say

pytestmark = needs_chromium
Serve = Callable[..., Live]
Open = Callable[..., Page]
PNG = b"\x89PNG\r\n\x1a\n\0\0\0"


def question(live: Live) -> str:
    """The last user message as the model saw it."""
    return live.source.prompts()[-1].rpartition("<|start|>user<|message|>")[2].partition("<|end|>")[0]


def test_files_go_with_a_message(open_page: Open, live: Live, tmp_path: Path) -> None:
    p = open_page()
    (tmp_path / "plain.py").write_text("print('grüße')\n", encoding="utf-8")
    p.page.set_input_files("#file", str(tmp_path / "plain.py"))
    expect(p.page.locator("#chips .name")).to_have_text("plain.py")
    p.drop(("notes.md", b"# dropped\n"))
    p.drop(("pasted.txt", b"from the clipboard"), on="#prompt", event="paste")
    expect(p.page.locator("#chips .name")).to_have_text(["plain.py", "notes.md", "pasted.txt"])
    p.page.click("[aria-label='Remove pasted.txt']")
    p.page.fill("#prompt", "What is in it?")
    p.shot("files-box-light")
    p.page.press("#prompt", "Enter")
    p.answered()
    fence = "```"
    assert question(live) == (
        f"File: plain.py\n{fence}py\nprint('grüße')\n{fence}\n\nFile: notes.md\n{fence}md\n# dropped\n{fence}\n\n"
        "What is in it?"
    )
    assert p.page.locator("#chips li").count() == 0
    assert p.page.locator(".bubble").all_inner_texts() == ["What is in it?"]
    p.page.click(".file summary >> nth=1")
    expect(p.page.locator(".file pre").nth(1)).to_have_text("# dropped\n")
    p.shot("files-light")
    p.page.reload()
    assert p.page.locator(".file .name").all_inner_texts() == ["plain.py", "notes.md"]
    p.page.focus("#prompt")
    p.page.keyboard.press("ArrowUp")
    p.page.click("[aria-label='Remove plain.py']")
    p.page.press("textarea.edit", "Enter")
    p.answered()
    assert question(live).startswith("File: notes.md")
    assert p.page.locator(".file .name").all_inner_texts() == ["notes.md"]


def test_files_with_long_names_fit_a_phone(open_page: Open) -> None:
    p = open_page(viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True, color_scheme="dark")
    p.drop((f"{'name_' * 30}.txt", b"x" * 500 + b"\n"))
    p.ask("plain")
    p.drop((f"{'name_' * 30}.txt", b"x" * 500 + b"\n"))
    p.answered()
    p.page.click(".file summary")
    expect(p.page.locator(".file pre")).to_be_visible()
    p.shot("files-phone-dark")
    assert p.page.evaluate("document.documentElement.scrollWidth") == 360
    for part in ("#chips .chip", ".file", ".box", ".tools", ".bar"):
        box = p.page.locator(part).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    assert p.page.locator(".send").bounding_box()["width"] >= 32


def test_what_is_no_text_or_too_much_is_refused_with_a_sentence(open_page: Open, live: Live) -> None:
    p = open_page()
    toast = p.page.locator("#toast")
    p.drop(("photo.png", PNG))
    expect(toast).to_contain_text("“photo.png” is a picture")
    p.drop(("photo.png", PNG), ("fine.txt", b"text"), ("paper.pdf", b"%PDF-1.4"))
    expect(toast).to_contain_text("1 more")
    expect(p.page.locator("#chips .name")).to_have_text("fine.txt")
    p.drop(("shot.png", PNG), on="#prompt", event="paste")
    expect(toast).to_contain_text("“shot.png” is a picture")
    p.drop(("big.txt", b"x" * 1_000_001))
    expect(toast).to_contain_text("“big.txt” is larger than")
    p.shot("refused-light")
    p.drop(*((f"{n}.txt", b"text %d" % n) for n in range(11)))
    expect(p.page.locator("#chips li")).to_have_count(10)
    expect(toast).to_contain_text("10 files")
    assert live.source.requests == []


def paste(p: Page, text: str) -> None:
    p.page.evaluate(
        """(text) => {
             const moved = new DataTransfer();
             moved.setData("text/plain", text);
             const event = new ClipboardEvent("paste", { clipboardData: moved, bubbles: true, cancelable: true });
             document.querySelector("#prompt").dispatchEvent(event);
           }""",
        text,
    )


def test_long_pastes_are_folded(open_page: Open, live: Live) -> None:
    p = open_page()
    text = "\n".join(f"line {n}" for n in range(100))
    paste(p, "short")  # stays with the browser
    expect(p.page.locator("#chips")).to_be_hidden()
    paste(p, text)
    expect(p.page.locator("#chips .name")).to_have_text("Pasted text, 100 lines")
    assert p.page.input_value("#prompt") == ""
    p.page.fill("#prompt", "plain")
    p.page.press("#prompt", "Enter")
    p.answered()
    assert question(live) == f"{text}\n\nplain"
    paste(p, text)
    p.page.click("[aria-label^='Put Pasted text']")
    assert p.page.input_value("#prompt") == text
    p.page.press("#prompt", "Enter")
    p.answered(2)
    long = p.page.locator(".bubble.long")
    button = long.locator("button")
    assert button.get_attribute("aria-expanded") == "false"
    assert "100 lines" in button.inner_text()
    folded = long.bounding_box()["height"]
    assert folded < 360
    p.shot("folded-light")
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert long.bounding_box()["height"] > 2 * folded


def test_reasoning_is_seen_as_it_is_written(open_page: Open) -> None:
    p = open_page()
    p.ask("ponder")
    body = p.page.locator(".thought .body")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("li")).to_have_text(["one", "two"])
    assert body.is_visible()
    wait_until(lambda: p.page.evaluate("document.querySelector('.thought .body').scrollTop") > 0)  # its end is in view
    p.shot("thinking-light")
    p.answered()
    expect(body).to_be_hidden()  # the answer is what counts now
    p.ask("ponder once more")
    second = p.page.locator(".thought .body").nth(1)
    expect(second).to_be_visible()
    p.page.locator(".thought summary").nth(1).click()
    expect(second).to_be_hidden()  # a person's choice
    p.page.locator(".thought summary").nth(1).click()
    p.answered(2)
    expect(second).to_be_visible()


def test_a_cut_answer_goes_on_in_the_same_message(open_page: Open, live: Live) -> None:
    p = open_page()
    p.page.keyboard.press("Control+,")
    p.page.fill("#s-max", "40")
    p.page.click("#s-save")
    p.ask("a long story")
    p.answered()
    expect(p.page.locator(".note")).to_have_text("The answer was cut off at its token limit.")
    before = p.page.locator(".md").inner_text()
    p.shot("cut-light")
    p.page.click("text=Continue")
    expect(p.page.locator(".note")).to_be_hidden(timeout=1000 * PATIENCE)
    p.answered()
    assert p.page.locator(".md").inner_text() == f"{before} and the rest."
    assert p.page.locator(".turn.assistant").count() == 1
    assert p.page.locator(".go-on").count() == 0
    prompt = live.source.prompts()[-1]
    assert prompt.endswith(f"Counting.<|end|><|start|>assistant<|channel|>final<|message|>{before}")
    total = sum(r["stats"]["earlier"] + r["stats"]["tokens"] for r in stored(p) if r["role"] == "assistant")
    assert f"{total} tokens" in p.page.locator(".stat").inner_text()
    assert total > 40
    p.page.reload()
    assert p.page.locator(".md").inner_text() == f"{before} and the rest."


def test_reasoning_that_was_cut_goes_on(open_page: Open, live: Live) -> None:
    p = open_page()
    p.page.keyboard.press("Control+,")
    p.page.fill("#s-max", "20")
    p.page.click("#s-save")
    p.ask("ponder")
    p.answered()
    assert p.page.locator(".md").inner_text() == ""
    p.page.click("text=Continue")
    expect(p.page.locator(".md")).to_have_text("At last.", timeout=1000 * PATIENCE)
    p.answered()
    p.page.click(".thought summary")
    assert "so it goes on." in p.page.locator(".thought .body").inner_text()


def test_what_was_stopped_failed_or_left_goes_on(open_page: Open, live: Live) -> None:
    p = open_page()
    p.ask("a long story")
    expect(p.page.locator(".md")).to_contain_text("word word word")
    p.page.keyboard.press("Escape")
    p.answered()
    p.page.click("text=Continue")
    expect(p.page.locator(".md")).to_contain_text("and the rest.", timeout=1000 * PATIENCE)
    p.answered()
    p.ask("it breaks")
    p.answered(2)
    expect(p.page.locator(".note[role=alert]")).to_contain_text("the scripted engine failed")
    two = Tabs(p, live).another()
    two.page.click("text=Continue")  # in another tab than the one that wrote it
    for tab in (two, p):
        expect(tab.page.locator(".md").nth(1)).to_contain_text("half of it")
        expect(tab.page.locator(".md").nth(1)).to_contain_text("and the rest.", timeout=1000 * PATIENCE)
        expect(tab.page.locator(".note:visible")).to_have_count(0)
    p.ask("a long story again")
    expect(p.page.locator(".md").nth(2)).to_contain_text("word word word")
    p.page.reload()
    p.page.click("text=Continue")
    expect(p.page.locator(".md").nth(2)).to_contain_text("and the rest.", timeout=1000 * PATIENCE)


def test_a_lost_connection_leaves_what_came_and_a_way_on(browser: Any, serve: Serve) -> None:
    source = ScriptedSource(lambda r, i: Play(say("word " * 3000), delay=0.005), model="gpt-oss-20b")
    live = serve(source)
    p = Page(browser, live)
    p.ask("plain")
    expect(p.page.locator(".md")).to_contain_text("word word word")
    live.server.force_exit = live.server.should_exit = True
    expect(p.page.locator(".note[role=alert]")).to_be_visible(timeout=1000 * PATIENCE)
    assert "word word word" in p.page.locator(".md").inner_text()
    expect(p.page.locator(".go-on")).to_be_visible()
    p.shot("lost-light")
    p.problems.clear()  # the browser's own lines about the requests that failed
    p.close()


def test_the_meter_shows_what_the_server_counted_and_warns(browser: Any, serve: Serve) -> None:
    source = ScriptedSource(lambda r, i: Play(say("ok " * 100)), model="gpt-oss-20b", max_context=600)
    p = Page(browser, serve(source))
    meter, room = p.page.locator("#meter"), p.page.locator("#room")
    expect(meter).to_be_hidden()
    p.ask("hello")
    p.answered()
    (answer,) = [m for m in stored(p) if m["role"] == "assistant"]
    total = len(source.requests[0].prompt) + answer["stats"]["tokens"]
    assert meter.get_attribute("aria-valuenow") == str(total)
    assert meter.get_attribute("aria-valuetext") == f"{total} of 600 tokens"
    expect(room).to_be_hidden()
    p.page.fill("#prompt", "1 2 3 4 5 6 7 8 9 " * 20)  # digits: a token each, which no guess by length knows
    expect(room).to_contain_text("tokens", timeout=1000 * PATIENCE)
    p.shot("near-light")
    p.page.fill("#prompt", "1 2 3 4 5 6 7 8 9 " * 60)
    expect(room).to_contain_text("too long", timeout=1000 * PATIENCE)
    p.page.fill("#prompt", "")
    expect(room).to_be_hidden()
    p.ask("again " * 230)
    p.answered(2)
    expect(room).to_contain_text("context of 600 tokens")
    p.page.click("#room-new")
    expect(room).to_be_hidden()
    p.close()


def test_task_lists_and_the_gap_after_a_question(open_page: Open) -> None:
    for width in (1180, 390):
        p = open_page(viewport={"width": width, "height": 844}, has_touch=width == 390)
        p.ask("tasks")
        p.answered()
        boxes = p.page.locator(".md li.task input")
        assert [boxes.nth(n).is_checked() for n in range(2)] == [True, False]
        assert boxes.first.is_disabled()
        question, answer = (p.page.locator(s).bounding_box() for s in (".bubble", ".turn.assistant"))
        assert 8 <= answer["y"] - question["y"] - question["height"] <= 36
        p.page.locator(".turn.user").hover()
        acts = p.page.locator(".turn.user .acts").bounding_box()
        assert acts["y"] + acts["height"] <= answer["y"] + 1
        p.shot(f"tasks-{width}")
