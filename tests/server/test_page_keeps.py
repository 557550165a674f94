"""The chat page loses nothing: two tabs, deletions, branches, reloads, and a server that is gone or wants a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from live_server import PATIENCE, Live, wait_until
from page_driver import Page, Tabs, expect, needs_chromium, shoot, stored, titles
from scripted import Play, ScriptedSource, say

from halfbyte.server.settings import ServerSettings

pytestmark = needs_chromium
Serve = Callable[..., Live]


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
    two.shot("two-tabs-light")
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


def test_a_change_that_is_not_written_when_the_page_closes_is_kept(open_page: Callable[..., Page]) -> None:
    p = open_page()
    for n, text in enumerate(("plain one", "plain two")):
        p.ask(text)
        p.answered(n + 1)
    p.page.locator("[aria-label=Regenerate]").first.click()
    p.answered(1)
    # From here on no transaction of this page ends, as on a machine that is busy while the page closes.
    p.page.evaluate("IDBDatabase.prototype.transaction = () => ({ objectStore: () => ({ get: () => ({}) }) })")
    p.page.click("[aria-label='Previous version']")
    p.page.reload()
    expect(p.page.locator(".bubble")).to_have_text(["plain one", "plain two"])
    p.page.reload()
    expect(p.page.locator(".bubble")).to_have_text(["plain one", "plain two"])


def test_a_reload_keeps_half_an_answer(open_page: Callable[..., Page], live: Live) -> None:
    p = open_page()
    p.ask("a long story")
    expect(p.page.locator(".md")).to_contain_text("word word word word word word")
    shown = len(p.page.locator(".md").inner_text())
    p.page.reload()
    expect(p.page.locator(".note")).to_have_text("Cut off: the page was closed while this was being written.")
    assert len(p.page.locator(".md").inner_text()) >= shown
    p.shot("reloaded-light")
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
    live.close()  # the server itself ends
    expect(p.page.locator("#state")).to_have_text("server gone", timeout=1000 * PATIENCE)
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
    shoot(page, "wrong-key-light")
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
