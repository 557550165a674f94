// The list of conversations: search, names, and a menu for each.

import { addressOf } from "./address.js";
import { messageText } from "./attachments.js";
import { button, copyText, download, el } from "./dom.js";
import { search, snippet } from "./search.js";
import * as store from "./store.js";
import * as tree from "./tree.js";
import { fileName, toJson, toMarkdown } from "./transfer.js";

const $ = (id) => document.getElementById(id);
const nameOf = (c) => c.title || "New conversation";

export class Sidebar {
  /** `actions`: {show(conversation, message), discard(conversations), notify(sentence), current()}. */
  constructor(actions) {
    this.actions = actions;
    this.list = $("list");
    this.field = $("search");
    this.menu = $("more");
    this.naming = null; // the conversation whose name is being written
    let soon = 0;
    this.field.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(() => this.draw(), 120); });
    this.field.addEventListener("keydown", (e) => {
      if (e.key === "Escape" && this.field.value) { e.stopPropagation(); this.field.value = ""; this.draw(); }
      if (e.key !== "Enter") return;
      this.draw(); // now, whatever the timer waits for
      this.list.querySelector(".item > button")?.click();
    });
    for (const area of [this.field, this.list]) area.addEventListener("keydown", (e) => this.step(e));
    this.menu.addEventListener("keydown", (e) => this.stepMenu(e));
    this.menu.addEventListener("toggle", (e) => {
      if (e.newState === "closed") this.list.querySelector("[aria-expanded=true]")?.setAttribute("aria-expanded", "false");
    });
  }

  draw() {
    if (this.naming) return; // drawn when the name is chosen
    const query = this.field.value;
    const all = store.conversations();
    this.field.parentElement.hidden = !all.length && !query;
    const results = search(all, query);
    $("hits").textContent = !query.trim() ? "" : results.length ? `${results.length} ${results.length === 1 ? "conversation" : "conversations"}` : "Nothing has these words.";
    const today = new Date().toDateString();
    const groups = new Map();
    for (const result of results) {
      const { at } = result.conversation;
      const day = query.trim() ? "" : new Date(at).toDateString() === today ? "Today" : Date.now() - at < 7 * 864e5 ? "This week" : "Earlier";
      groups.set(day, [...(groups.get(day) ?? []), result]);
    }
    const focus = document.activeElement?.closest?.(".item");
    const focusPlace = focus && { id: focus.dataset.id, index: [...focus.children].indexOf(document.activeElement) };
    this.list.replaceChildren(...[...groups].flatMap(([day, items]) => [day ? el("h2", { textContent: day }) : null, ...items.map((r) => this.item(r, query))]).filter(Boolean));
    if (focusPlace) this.itemOf(focusPlace.id)?.children[focusPlace.index]?.focus();
  }

  itemOf(id) { return [...this.list.querySelectorAll(".item")].find((i) => i.dataset.id === id); }

  item({ conversation: c, message }, query) {
    const open = el("button", { type: "button", textContent: nameOf(c), title: nameOf(c), onclick: () => this.actions.show(c, query.trim() ? message : null), ondblclick: () => this.rename(c) });
    const pieces = query.trim() && message ? snippet(messageText(message), query) : [];
    if (pieces.length) open.append(el("span", { className: "snippet" }, ...pieces.map(([text, hit]) => (hit ? el("mark", { textContent: text }) : text))));
    const more = button("more", `More for ${nameOf(c)}`, () => this.openMenu(c, more));
    more.setAttribute("aria-haspopup", "menu");
    more.setAttribute("aria-expanded", "false");
    const remove = button("x", `Delete ${c.title || "conversation"}`, () => this.actions.discard([c]));
    more.className = "remove more";
    remove.className = "remove";
    const item = el("div", { className: "item" }, open, more, remove);
    item.dataset.id = c.id;
    if (c === this.actions.current()) open.setAttribute("aria-current", "page");
    return item;
  }

  /** Arrows go from the search to the list and along it; F2 renames. */
  step(e) {
    const item = e.target.closest(".item");
    if (e.key === "F2" && item) { e.preventDefault(); this.rename(store.get(item.dataset.id)); }
    if (e.target.tagName === "INPUT" && e.target !== this.field) return;
    if (e.key !== "ArrowDown" && e.key !== "ArrowUp") return;
    const all = [...this.list.querySelectorAll(".item > button:first-child")];
    const at = item ? all.indexOf(item.firstElementChild) : -1;
    const next = e.key === "ArrowDown" ? all[at + 1] : at > 0 ? all[at - 1] : this.field;
    if (next) { e.preventDefault(); next.focus(); }
  }

  // ---- the menu of one conversation --------------------------------------------------------------------------------

  openMenu(c, opener) {
    const entry = (text, onclick) => {
      const b = el("button", { type: "button", textContent: text, tabIndex: -1, onclick: () => { this.menu.hidePopover(); onclick(); } });
      b.setAttribute("role", "menuitem");
      return b;
    };
    const keep = (ending, type, text) => () => download(fileName(c.title, ending), type, text());
    this.menu.replaceChildren(
      entry("Rename", () => this.rename(c)),
      entry("Copy its address", async () => { await copyText(location.href.split("#")[0] + addressOf(c)); this.actions.notify("Copied. The address works in this browser only."); }),
      entry("Export as markdown", keep("md", "text/markdown", () => toMarkdown(c))),
      entry("Export as JSON", keep("json", "application/json", () => toJson([c]))));
    this.menu.showPopover();
    const [b, m] = [opener.getBoundingClientRect(), this.menu.getBoundingClientRect()];
    this.menu.style.left = `${Math.max(8, Math.min(b.left, innerWidth - m.width - 8))}px`;
    this.menu.style.top = `${b.bottom + m.height + 8 < innerHeight ? b.bottom + 4 : Math.max(8, b.top - m.height - 4)}px`;
    opener.setAttribute("aria-expanded", "true");
    this.menu.firstElementChild.focus();
  }

  stepMenu(e) {
    const all = [...this.menu.children];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[e.key];
    if (to !== undefined) { e.preventDefault(); all.at(to % all.length).focus(); }
    if (e.key === "Tab") this.menu.hidePopover();
  }

  // ---- a name ------------------------------------------------------------------------------------------------------

  rename(c) {
    const item = this.itemOf(c.id);
    if (!item || this.naming) return;
    const field = el("input", { className: "name", value: c.title, maxLength: 200 });
    field.setAttribute("aria-label", "Name of the conversation");
    this.naming = c;
    item.replaceChildren(field);
    field.focus();
    field.select();
    const end = (keep) => {
      if (this.naming !== c) return;
      this.naming = null;
      if (keep && field.value.trim() !== c.title) { tree.rename(c, field.value); store.save(c); this.actions.renamed(c); }
      const back = document.activeElement === field;
      this.draw();
      if (back) this.itemOf(c.id)?.firstElementChild.focus();
    };
    field.addEventListener("keydown", (e) => {
      e.stopPropagation();
      if (e.key === "Enter" && !e.isComposing) end(true);
      if (e.key === "Escape") end(false);
    });
    field.addEventListener("blur", () => end(true));
  }
}
