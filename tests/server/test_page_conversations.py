"""Conversations of the chat page: search, names, files to and from the disk, addresses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import PATIENCE, Live
from page_driver import Page, Tabs, expect, needs_chromium, stored, titles

pytestmark = needs_chromium
Open = Callable[..., Page]


def talk(p: Page, *questions: str) -> None:
    """A conversation for each question."""
    for text in questions:
        p.page.keyboard.press("Control+Shift+O")
        p.ask(text)
        p.answered()


def bubbles(p: Page) -> list[str]:
    return p.page.locator(".bubble").all_inner_texts()


def test_search(open_page: Open) -> None:
    p = open_page()
    expect(p.page.locator("#search")).to_be_hidden()  # nothing to search
    talk(p, "plain Zürich", "plain other", "plain third")
    p.ask("plain needle in the middle")
    p.answered(2)
    p.page.keyboard.press("Control+k")
    p.page.keyboard.type("zurich")
    expect(p.page.locator(".item")).to_have_count(1)
    expect(p.page.locator("#hits")).to_have_text("1 conversation")
    expect(p.page.locator(".snippet mark")).to_have_text("Zürich")
    p.page.keyboard.press("Enter")
    assert bubbles(p) == ["plain Zürich"]
    p.page.fill("#search", "needle")
    expect(p.page.locator(".snippet mark")).to_have_text("needle")
    p.shot("search-light")
    p.page.focus("#search")
    p.page.keyboard.press("ArrowDown")
    p.page.keyboard.press("Enter")
    assert bubbles(p) == ["plain third", "plain needle in the middle"]
    expect(p.page.locator(".turn.hit .bubble")).to_have_text("plain needle in the middle")
    p.page.fill("#search", "nowhere")
    expect(p.page.locator("#hits")).to_have_text("Nothing has these words.")
    p.page.focus("#search")
    p.page.keyboard.press("Escape")
    expect(p.page.locator(".item")).to_have_count(3)


def test_search_turns_to_the_branch_that_has_the_words(open_page: Open) -> None:
    p = open_page()
    talk(p, "plain first wording")
    p.page.focus("#prompt")
    p.page.keyboard.press("ArrowUp")
    p.page.fill("textarea.edit", "plain second")
    p.page.keyboard.press("Enter")
    p.answered()
    p.page.fill("#search", "wording")
    expect(p.page.locator(".snippet mark")).to_have_text("wording")
    p.page.click(".item button >> nth=0")
    assert bubbles(p) == ["plain first wording"]


def test_rename(open_page: Open, live: Live) -> None:
    p = open_page()
    talk(p, "plain one", "plain two")
    two = Tabs(p, live).another()
    p.menu("plain one", "Rename")
    field = p.page.locator("input.name")
    expect(field).to_be_focused()
    p.page.keyboard.type("Mine <b>&")
    two.ask("plain meanwhile")  # the other tab draws the list here, which must not take the field away
    two.answered(2)
    p.page.keyboard.press("Enter")
    for tab in (p, two):
        expect(tab.page.locator(".item", has_text="Mine <b>&")).to_have_count(1)
    p.page.reload()
    assert titles(p) == ["Mine <b>&", "plain two"]
    p.page.click(".item button >> text=Mine")
    expect(p.page).to_have_title("Mine <b>& · halfbyte")
    p.page.focus("#prompt")  # asking the first question anew keeps the name
    p.page.keyboard.press("ArrowUp")
    p.page.fill("textarea.edit", "plain else")
    p.page.keyboard.press("Enter")
    p.answered()
    assert "Mine <b>&" in titles(p)
    p.page.locator(".item button", has_text="plain two").focus()
    p.page.keyboard.press("F2")
    p.page.keyboard.type("never")
    p.page.keyboard.press("Escape")
    assert titles(p) == ["Mine <b>&", "plain two"]


def test_export_and_import(open_page: Open, browser: Any, live: Live, tmp_path: Path) -> None:
    p = open_page()
    talk(p, "plain one", "plain two")
    p.page.click("[aria-label=Regenerate]")
    p.answered()
    name, markdown = p.download(lambda: p.menu("plain two", "Export as markdown"))
    assert name.startswith("plain-two-")
    assert name.endswith(".md")
    assert "## You\n\nplain two\n\n## Assistant\n\nJust a line.\n" in markdown
    name, one = p.download(lambda: p.menu("plain one", "Export as JSON"))
    assert [c["title"] for c in json.loads(one)["conversations"]] == ["plain one"]
    p.page.keyboard.press("Control+,")
    p.shot("settings-light")
    name, everything = p.download(lambda: p.page.click("#s-export"))
    file = tmp_path / name
    file.write_text(everything, encoding="utf-8")
    p.page.keyboard.press("Escape")
    p.page.set_input_files("#s-file", str(file))
    p.page.keyboard.press("Control+,")

    other = Page(browser, live)
    other.ask("plain three")
    other.answered()
    other.page.keyboard.press("Control+,")
    expect(other.page.locator("#s-done")).to_be_hidden()
    other.page.set_input_files("#s-file", str(file))
    expect(other.page.locator("#s-done")).to_have_text("Imported: 2 new.")
    other.page.set_input_files("#s-file", str(file))
    expect(other.page.locator("#s-done")).to_have_text("Imported: 2 already here.")
    other.shot("imported-light")
    other.page.keyboard.press("Escape")
    assert titles(other) == ["plain one", "plain three", "plain two"]
    assert bubbles(other) == ["plain three"]
    kept = {m["id"] for m in json.loads(everything)["conversations"] for m in m["nodes"].values()}
    assert kept < {m["id"] for m in stored(other)}
    other.page.click(".item button >> text=plain two")
    expect(other.page.locator(".turn.assistant .branches")).to_have_text("2 / 2")
    other.ask("plain more")  # what is done here outlives another import, and what is deleted comes back
    other.answered(2)
    other.page.click("[aria-label='Delete plain one']")
    other.page.keyboard.press("Control+,")
    other.page.set_input_files("#s-file", str(file))
    expect(other.page.locator("#s-done")).to_have_text("Imported: 1 with news, 1 already here.")
    other.page.reload()
    assert titles(other) == ["plain one", "plain three", "plain two"]
    assert bubbles(other) == ["plain two", "plain more"]
    other.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"format": "halfbyte.conversations", "version": 1, "conv', "damaged"),
        ('[{"title": "x", "mapping": {}}]', "no export"),
        ("\0\1\2", "no export"),
    ],
)
def test_a_file_that_cannot_be_imported(open_page: Open, tmp_path: Path, text: str, sentence: str) -> None:
    p = open_page()
    talk(p, "plain one")
    before = stored(p)
    (tmp_path / "file.json").write_text(text)
    p.page.keyboard.press("Control+,")
    p.page.set_input_files("#s-file", str(tmp_path / "file.json"))
    expect(p.page.locator("#s-bad")).to_contain_text(sentence)
    p.shot(f"bad-import-{sentence.replace(' ', '-')}")
    assert stored(p) == before


def fill_up(p: Page, writes: int) -> None:
    """End the transaction of this write and of later ones as a browser without room does."""
    p.page.evaluate(
        """(writes) => {
             const { put } = IDBObjectStore.prototype;
             let count = 0;
             IDBObjectStore.prototype.put = function (value) {
               const request = put.call(this, value);
               if (++count >= writes) this.transaction.abort();
               return request;
             };
             const full = new DOMException("full", "QuotaExceededError");
             Object.defineProperty(IDBTransaction.prototype, "error", { get: () => full });
           }""",
        writes,
    )


def test_a_full_browser_goes_on_and_says_what_is_lost(open_page: Open) -> None:
    p = open_page()
    fill_up(p, 1)
    p.drop(("notes.txt", b"some notes"))
    p.ask("plain one")
    p.answered()
    expect(p.page.locator("#toast")).to_contain_text("no room left")
    p.shot("full-light")
    assert bubbles(p) == ["plain one"]
    _, text = p.download(lambda: p.menu("plain one", "Export as JSON"))  # the way out that the sentence names
    assert "some notes" in text


def test_a_full_browser_imports_nothing_and_says_so(open_page: Open, tmp_path: Path) -> None:
    p = open_page()
    talk(p, "plain one", "plain two")
    p.page.keyboard.press("Control+,")
    _, text = p.download(lambda: p.page.click("#s-export"))
    raw = json.loads(text)
    for conversation in raw["conversations"]:
        conversation["id"] += "x"
    (tmp_path / "file.json").write_text(json.dumps(raw))
    fill_up(p, 2)
    p.page.set_input_files("#s-file", str(tmp_path / "file.json"))
    expect(p.page.locator("#s-bad")).to_contain_text("no room left", timeout=1000 * PATIENCE)
    p.page.reload()
    expect(p.page.locator(".item")).to_have_count(2)


def test_every_conversation_has_an_address(open_page: Open, live: Live) -> None:
    p = open_page()
    assert p.page.url.endswith("#/new")
    p.ask("plain one")
    p.answered()
    one = p.page.url
    assert "#/c/" in one
    p.page.keyboard.press("Control+Shift+O")
    assert p.page.url.endswith("#/new")
    p.ask("plain two")
    p.answered()
    two = p.page.url
    assert two != one
    p.page.go_back()
    assert bubbles(p) == ["plain one"]
    assert p.page.url == one
    p.page.go_forward()
    assert bubbles(p) == ["plain two"]
    p.page.go_back()
    p.page.reload()
    assert bubbles(p) == ["plain one"]
    expect(p.page).to_have_title("plain one · halfbyte")
    tab = Tabs(p, live).another()
    tab.page.goto(two)
    expect(tab.page.locator(".bubble")).to_have_text("plain two")
    assert bubbles(p) == ["plain one"]  # each tab has its own
    p.page.click("[aria-label='Delete plain one']")
    p.page.go_back()
    expect(p.page.locator("#missing")).to_be_visible()
    expect(p.page.locator("#toast")).to_contain_text("is deleted")
    p.page.click("#undo")
    assert bubbles(p) == ["plain one"]
    expect(p.page.locator("#missing")).to_be_hidden()


def test_an_address_that_nothing_has(open_page: Open, live: Live) -> None:
    p = open_page()
    talk(p, "plain one")
    p.page.goto(f"{live.url}/#/c/nothing-here")
    expect(p.page.locator("#missing")).to_be_visible()
    assert bubbles(p) == []
    p.shot("missing-light")
    p.page.reload()
    expect(p.page.locator("#missing")).to_be_visible()
    p.ask("plain two")
    p.answered()
    expect(p.page.locator("#missing")).to_be_hidden()
    assert "nothing-here" not in p.page.url
    assert titles(p) == ["plain one", "plain two"]
    p.page.keyboard.press("Control+Shift+O")
    p.page.evaluate("document.querySelector('.skip').click()")  # a link within the page is no address
    assert p.page.url.endswith("#/new")
    expect(p.page.locator("#prompt")).to_be_focused()


def test_the_menu_works_with_keys_and_fits_a_phone(open_page: Open) -> None:
    p = open_page(viewport={"width": 390, "height": 844}, has_touch=True, color_scheme="dark")
    talk(p, "plain one")
    p.page.click("#menu")
    p.page.locator("[aria-label='More for plain one']").focus()
    p.page.keyboard.press("Enter")
    menu = p.page.locator("#more")
    expect(menu).to_be_visible()
    p.shot("phone-menu-dark")
    box = menu.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    p.page.keyboard.press("ArrowDown")
    expect(p.page.locator("#more button").nth(1)).to_be_focused()
    p.page.keyboard.press("ArrowUp")
    p.page.keyboard.press("ArrowUp")
    expect(p.page.locator("#more button").last).to_be_focused()
    p.page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(p.page.locator("[aria-label='More for plain one']")).to_be_focused()
