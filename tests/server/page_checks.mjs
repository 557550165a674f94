// The parts of the chat page that need no browser: run by test_page_logic.py as `node page_checks.mjs FOLDER`, where FOLDER is
// the page's static files with a package.json that says they are modules.

import assert from "node:assert/strict";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

delete globalThis.BroadcastChannel; // it would keep this process alive
const folder = pathToFileURL(`${process.argv[2]}/`);
const tree = await import(new URL("tree.js", folder));

// ---- conversations -------------------------------------------------------------------------------------------------

const texts = (c, leaf) => tree.path(c, leaf).map((m) => m.text);
const copy = (c) => structuredClone(c);
function asked(...questions) {
  const c = tree.create(1);
  questions.forEach((text, i) => {
    tree.add(c, c.leaf, { role: "user", text }, 2 * i + 2);
    tree.add(c, c.leaf, { role: "assistant", text: `${text}!` }, 2 * i + 3);
  });
  return c;
}

test("asking an early question again keeps what followed", () => {
  const c = asked("a", "b");
  const first = tree.path(c)[1];
  const again = tree.add(c, first.parent, { role: "assistant", text: "a?" }, 10);
  assert.deepEqual(texts(c), ["a", "a?"]);
  assert.deepEqual(tree.siblings(c, again).map((m) => m.text), ["a!", "a?"]);
  assert.deepEqual(texts(c, tree.newestEnd(c, first)), ["a", "a!", "b", "b!"]);
});

test("two tabs that go on from the same message lose nothing, and each stays on its branch", () => {
  const one = asked("a");
  const two = copy(one);
  tree.add(one, one.leaf, { role: "user", text: "from one" }, 20);
  tree.add(two, two.leaf, { role: "user", text: "from two" }, 21);
  const [before1, before2] = [copy(one), copy(two)];
  assert.ok(tree.merge(one, before2));
  assert.ok(tree.merge(two, before1));
  assert.deepEqual(texts(one), ["a", "a!", "from one"]);
  assert.deepEqual(texts(two), ["a", "a!", "from two"]);
  assert.deepEqual(Object.keys(one.nodes).sort(), Object.keys(two.nodes).sort());
  assert.equal(tree.siblings(one, tree.path(one)[2]).length, 2);
});

test("a tab that only looks on follows", () => {
  const one = asked("a");
  const two = copy(one);
  tree.add(two, two.leaf, { role: "user", text: "more" }, 20);
  tree.merge(one, two);
  assert.deepEqual(texts(one), ["a", "a!", "more"]);
});

test("joining is the same in any order, and twice is as once", () => {
  const base = asked("a");
  const copies = [copy(base), copy(base), copy(base)];
  tree.add(copies[0], copies[0].leaf, { role: "user", text: "x" }, 30);
  tree.change(tree.path(copies[1])[1], { text: "a! and more" });
  tree.touch(copies[2], { title: "named" }, 40);
  const join = (order) => {
    const out = copy(base);
    for (const i of order) { tree.merge(out, copy(copies[i])); tree.merge(out, copy(copies[i])); }
    return JSON.stringify([out.title, Object.values(out.nodes).map((n) => [n.id, n.text]).sort()]);
  };
  const results = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]].map(join);
  assert.equal(new Set(results).size, 1);
  assert.match(results[0], /a! and more/);
  assert.match(results[0], /named/);
});

test("an answer that grows in one tab wins over what another tab has of it", () => {
  const one = asked("a");
  const two = copy(one);
  tree.change(tree.path(one)[1], { text: "a! longer" });
  assert.ok(tree.merge(two, one));
  assert.ok(!tree.merge(one, two));
  assert.equal(tree.path(two)[1].text, "a! longer");
});

test("deleting and restoring are changes like any other", () => {
  const one = asked("a");
  const two = copy(one);
  tree.touch(one, { deleted: 5 });
  tree.merge(two, one);
  assert.equal(two.deleted, 5);
  tree.touch(two, { deleted: 0 });
  tree.merge(one, two);
  assert.equal(one.deleted, 0);
  assert.equal(tree.count(one), 2);
});

test("a list of messages becomes a tree", () => {
  const c = tree.fromList({ id: "old", at: 7, title: "t", messages: [{ role: "user", text: "q" }, { role: "assistant", text: "r" }] });
  assert.deepEqual([c.id, c.at, c.title, texts(c)], ["old", 7, "t", ["q", "r"]]);
});

test("a tree that is broken in storage does not hang the page", () => {
  const c = asked("a");
  const [first, second] = tree.path(c);
  first.parent = second.id;
  assert.equal(tree.path(c).length, 2);
  tree.newestEnd(c, first);
  c.leaf = "gone";
  assert.deepEqual(tree.path(c), []);
});

test("a name that a person chose survives what another tab does at the same time", () => {
  const one = asked("a");
  const two = copy(one);
  tree.rename(one, "  My \n name ", 50);
  tree.add(two, two.leaf, { role: "user", text: "more" }, 60);
  tree.touch(two, {}, 70);
  const [before1, before2] = [copy(one), copy(two)];
  tree.merge(one, before2);
  tree.merge(two, before1);
  assert.deepEqual([one.title, two.title], ["My name", "My name"]);
  assert.deepEqual(texts(one), texts(two));
  tree.rename(one, " ");
  assert.equal(one.title, "a");
  assert.equal(tree.titleOf({ text: " \n", files: [{ name: "notes.txt" }] }), "notes.txt");
  assert.equal(tree.titleOf({ text: "", files: [{ name: "Pasted", text: "\n first\nsecond", pasted: true }] }), "first");
});

test("an answer can be continued if it ended early and has a beginning", () => {
  const answer = (fields) => tree.isCut({ role: "assistant", text: "", ...fields });
  for (const finish of ["length", "stopped", "interrupted"]) assert.ok(answer({ text: "x", finish }), finish);
  assert.ok(answer({ reasoning: "hm", finish: "length" }));
  assert.ok(answer({ text: "x", error: "The connection ended." }));
  assert.ok(answer({ text: "x", live: 1 }));
  for (const fields of [{ text: "x", finish: "stop" }, { finish: "length" }, { error: "gone" }, { text: "x", finish: "length", calls: [{}] }, { role: "user", text: "x", finish: "length" }]) assert.ok(!answer(fields), JSON.stringify(fields));
});

// ---- files that go with a message ------------------------------------------------------------------------------------

const files = await import(new URL("attachments.js", folder));
const bytes = (text) => new TextEncoder().encode(text);

test("text is taken, in the encodings that editors write", () => {
  assert.equal(files.readText("a.txt", bytes("\ufeffgrüße\r\nzwei\rdrei")), "grüße\nzwei\ndrei");
  assert.equal(files.readText("a.txt", new Uint8Array([0xff, 0xfe, 0x68, 0, 0x69, 0])), "hi");
  assert.equal(files.readText("a.txt", new Uint8Array([0x67, 0x72, 0xfc, 0xdf, 0x65])), "grüße"); // windows-1252
  assert.equal(files.readText("log", bytes("\x1b[31mred\x1b[0m\tend")), "\x1b[31mred\x1b[0m\tend");
});

test("what is not text is refused by its content, with its name", () => {
  const png = new Uint8Array([0x89, 0x50, 0x4e, 0x47, 13, 10, 26, 10, 0, 0]);
  const others = [png, bytes("%PDF-1.7 and text"), new Uint8Array([0x50, 0x4b, 3, 4, 20]), new Uint8Array([1, 2, 3, 250]), bytes("nul\0nul"), new Uint8Array([0xff, 0xfe, 0x00, 0xd8]), new Uint8Array(0), bytes(" \n ")];
  for (const data of others) assert.throws(() => files.readText("notes.txt", data), (e) => e instanceof files.Unreadable && e.message.includes("notes.txt"), String(data));
});

test("limits of one file, of all files, and of their number", () => {
  const file = (n) => ({ name: "f", text: "x".repeat(n) });
  assert.equal(files.refusal([], "a", files.MOST_BYTES), "");
  assert.match(files.refusal([], "a", files.MOST_BYTES + 1), /“a” is larger than 1\.0 MB/);
  assert.match(files.refusal([file(9e5), file(9e5)], "b", 3e5), /“b”.*2\.0 MB together/);
  assert.match(files.refusal(Array.from({ length: files.MOST_FILES }, () => file(1)), "c", 1), /“c”.*10 files/);
});

test("the model reads files under their names, pastes as they are, and the question last", () => {
  const message = { text: "Why?", files: [{ name: "a`b\n.py", text: "x = `1`\n```\n" }, { name: "Pasted", text: "plain", pasted: true }] };
  assert.equal(files.messageText(message), "File: a b .py\n````py\nx = `1`\n```\n````\n\nplain\n\nWhy?");
  assert.equal(files.messageText({ text: "only" }), "only");
  assert.equal(files.messageText({ text: " ", files: message.files.slice(1) }), "plain");
});

// ---- conversations as files ------------------------------------------------------------------------------------------

const transfer = await import(new URL("transfer.js", folder));
function rich() {
  const c = asked("a");
  c.title = "Straße & Co";
  tree.add(c, c.leaf, { role: "user", text: "with a file", files: [{ name: "n.txt", text: "t" }] }, 20);
  tree.add(c, c.leaf, { role: "assistant", text: "half", reasoning: "**hm**", finish: "length", calls: [{ id: "1", name: "f", args: "{}", result: "r" }], stats: { start: 0, first: 5, last: 9, tokens: 3, used: 40 } }, 21);
  tree.add(c, tree.path(c)[0].id, { role: "assistant", text: "another branch" }, 22);
  return c;
}

test("what is exported comes back as it was, and importing twice is as once", () => {
  const c = rich();
  const [back] = transfer.fromJson(transfer.toJson([c]));
  assert.deepEqual(JSON.parse(JSON.stringify(back)), JSON.parse(JSON.stringify(c)));
  const mine = copy(c);
  assert.ok(!tree.merge(mine, back));
  assert.deepEqual(mine, c);
  assert.deepEqual(transfer.fromJson(`\ufeff${transfer.toJson([c, rich()])}`).length, 2);
});

test("an answer that is being written is exported as one that was cut", () => {
  const c = rich();
  Object.assign(tree.path(c).at(-1), { live: 99, stats: { start: 1000, first: 1200, last: 1500 } });
  const node = tree.path(transfer.fromJson(transfer.toJson([c]))[0]).at(-1);
  assert.deepEqual([node.live, node.finish, node.stats], [0, "interrupted", { start: 0, first: 200, last: 500 }]);
  assert.equal(tree.path(c).at(-1).live, 99);
});

test("a damaged or foreign file is refused with one sentence, and unknown fields stay outside", () => {
  const good = JSON.parse(transfer.toJson([rich()]));
  const changed = (work) => { const raw = structuredClone(good); work(raw, raw.conversations[0], Object.values(raw.conversations[0].nodes)[0]); return JSON.stringify(raw); };
  const bad = {
    cut: JSON.stringify(good).slice(0, -20), empty: "", text: "hello", list: "[]", nothing: "null", foreign: '[{"title": "x", "mapping": {}}]',
    none: changed((raw) => { raw.conversations = []; }), version: changed((raw) => { raw.version = 2; }), shape: changed((raw) => { raw.conversations = {}; }),
    node: changed((raw, c) => { c.nodes.x = 7; }), role: changed((raw, c, n) => { n.role = "system"; }), number: changed((raw, c, n) => { n.text = 7; }),
    id: changed((raw, c, n) => { n.id = "other"; }), title: changed((raw, c) => { c.title = {}; }), forever: changed((raw, c) => { c.v = 1e300; }), loop: changed((raw, c, n) => { n.parent = Object.keys(c.nodes)[1]; }),
    files: changed((raw, c, n) => { n.files = [{ name: "x" }]; }), calls: changed((raw, c, n) => { n.calls = "x"; }), time: changed((raw, c) => { c.at = "now"; }),
    proto: JSON.stringify(good).replace('"nodes":{', '"nodes":{"__proto__":{"id":"__proto__","v":1,"at":1,"role":"user","text":"x"},'),
    inherited: JSON.stringify(good).replace('"nodes":{', '"nodes":{"constructor":{"id":"constructor","v":1,"at":1,"role":"user","text":"x"},'),
  };
  for (const [name, text] of Object.entries(bad)) assert.throws(() => transfer.fromJson(text), (e) => e instanceof files.Unreadable && /^This file .*[.]$/.test(e.message), name);
  assert.match((() => { try { transfer.fromJson(bad.version); } catch (e) { return e.message; } return ""; })(), /newer/);
  const [c] = transfer.fromJson(changed((raw, conversation, node) => { conversation.extra = 1; node.innerHTML = "<b>"; conversation.leaf = "gone"; }));
  assert.ok(!("extra" in c) && Object.values(c.nodes).every((n) => !("innerHTML" in n)));
  assert.ok(tree.path(c).length > 0);
});

test("markdown has the branch on screen, with files, reasoning and calls", () => {
  const c = rich();
  c.leaf = tree.newestEnd(c, tree.path(c)[0]) && Object.values(c.nodes).find((n) => n.finish === "length").id;
  const text = transfer.toMarkdown(c);
  for (const part of ["# Straße & Co", "## You\n\na\n", "File: n.txt\n```txt\nt\n```", "## Assistant\n\na!", "<summary>Reasoning</summary>\n\n**hm**", "Call of `f`", "half"]) assert.ok(text.includes(part), part);
  assert.ok(!text.includes("another branch"));
  assert.equal(transfer.fileName("Ünïcode / ../x?", "md", new Date(0)), "Unicode-x-1970-01-01.md");
  assert.equal(transfer.fileName("", "json", new Date(0)), "conversation-1970-01-01.json");
});

// ---- looking for a conversation, its address, and the room that is left -------------------------------------------------

test("search finds every word, whatever the accents, in titles, messages and files", async () => {
  const { search, snippet } = await import(new URL("search.js", folder));
  const [one, two] = [asked("Wie groß ist Zürich?"), rich()];
  one.title = "Cities";
  const hits = (query) => search([one, two], query).map((r) => r.conversation);
  assert.deepEqual(hits(""), [one, two]);
  assert.deepEqual(hits("ZURICH cities"), [one]);
  assert.deepEqual(hits("n.txt"), [two]);
  assert.deepEqual(hits("another"), [two]);
  assert.deepEqual(hits("zurich nothing"), []);
  assert.equal(search([one], "zürich")[0].message.text.slice(0, 3), "Wie");
  assert.deepEqual(snippet("Wie groß ist\nZürich?", "zurich"), [["Wie groß ist ", false], ["Zürich", true], ["?", false]]);
  const [first, , match] = snippet(`${"x ".repeat(100)}Ziel ${"y ".repeat(100)}`, "ziel");
  assert.deepEqual([first[0], match], ["…", ["Ziel", true]]);
  tree.change(tree.path(one)[0], { text: "changed" });
  assert.deepEqual(hits("changed"), [one]);
});

test("an address names a conversation, a new one, or nothing", async () => {
  const { addressOf, readAddress } = await import(new URL("address.js", folder));
  const c = asked("a");
  assert.deepEqual(readAddress(addressOf(c)), { id: c.id });
  assert.deepEqual(readAddress(addressOf({ ...c, id: "a/b c" })), { id: "a/b c" });
  assert.deepEqual(readAddress(addressOf(tree.create())), { fresh: true });
  assert.deepEqual([readAddress(""), readAddress("#prompt"), readAddress("#/c/")], [{}, {}, {}]);
  assert.deepEqual(readAddress("#/c/%"), { id: "%" });
});

test("the context meter takes the server's count, and adds what came since", async () => {
  const { standing, reading, NEAR } = await import(new URL("meter.js", folder));
  const c = asked("a", "b");
  const messages = tree.path(c);
  assert.deepEqual(standing(messages), { used: 0, rest: ["a", "a!", "b", "b!"] });
  messages[1].stats = { used: 120 };
  assert.deepEqual(standing(messages), { used: 120, rest: ["b", "b!"] });
  messages[3].stats = { used: 150 };
  assert.deepEqual(standing(messages), { used: 150, rest: [] });
  assert.deepEqual([reading(10, 1000).level, reading(1000 * NEAR, 1000).level, reading(1001, 1000).level], ["calm", "near", "over"]);
  assert.equal(reading(10, 1000).warning, "");
  assert.match(reading(900, 1000).warning, /90 %.*1,000/);
  assert.match(reading(1500, 1000).warning, /500/);
  assert.equal(reading(1234, 131072).label, "1,234 of 131,072 tokens");
});

test("the server sees files, and the answer that it shall continue", async () => {
  const { wireMessages } = await import(new URL("api.js", folder));
  const half = { role: "assistant", text: "", reasoning: "hm" };
  const messages = [{ role: "user", text: "q", files: [{ name: "p", text: "pasted", pasted: true }] }, half];
  assert.deepEqual(wireMessages(messages), [{ role: "user", content: "pasted\n\nq" }]);
  assert.deepEqual(wireMessages(messages, half)[1], { role: "assistant", content: null, reasoning_content: "hm" });
  const lost = { role: "assistant", text: "so far", error: "The connection ended." };
  assert.deepEqual(wireMessages([lost]), [{ role: "assistant", content: "so far" }]);
});

// ---- markdown, on the few parts of a document that it touches --------------------------------------------------------

class FakeNode {
  constructor(tag) { this.tag = tag; this.childNodes = []; this.style = {}; this.parent = null; }
  append(...nodes) { for (const n of nodes) { this.childNodes.push(n); if (n instanceof FakeNode) n.parent = this; } }
  addEventListener() {}
  remove() { this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  get lastChild() { return this.childNodes.at(-1); }
  set textContent(text) { this.childNodes = [text]; }
  get text() { return this.childNodes.map((n) => (typeof n === "string" ? n : n.text)).join(""); }
  get html() {
    const align = this.style.textAlign ? ` ${this.style.textAlign}` : "";
    const more = this.href ? ` ${this.href}` : this.start ? ` ${this.start}` : this.className ? ` .${this.className}` : "";
    return `<${this.tag}${more}${align}>${this.childNodes.map((n) => (typeof n === "string" ? n : n.html)).join("")}</>`;
  }
}
globalThis.document = { createElement: (tag) => new FakeNode(tag) };
const drawn = [];
globalThis.katex = { render: (tex, node, options) => { drawn.push([tex, options.displayMode]); node.textContent = `[${tex.trim()}]`; } };
const { render } = await import(new URL("markdown.js", folder));
function html(text) {
  const root = new FakeNode("root");
  render(root, text);
  return root.childNodes.map((n) => n.html).join("");
}

test("blocks", () => {
  assert.equal(html("# A\n\ntext *em* **strong** ~~no~~ `c`"), "<h1>A</><p>text <em>em</> <strong>strong</> <s>no</> <code>c</></>");
  assert.equal(html("1. a\n2. b\n   - c"), "<ol><li>a</><li>b<ul><li>c</></></></>");
  assert.equal(html("3. a"), "<ol 3><li>a</></>");
  assert.equal(html("> q\n\n---"), "<blockquote><p>q</></><hr></>");
  assert.match(html("|a|b|\n|:-|-:|\n|1|2|"), /<div \.table><table>.*<th right>b<\/>.*<td right>2<\/>/);
  assert.match(html("```py\nx = 1\n```"), /<div \.code>.*py.*Copy.*<pre>/);
  assert.equal(html("one<br>two"), "<p>one<br></>two</>");
});

test("task lists", () => {
  const root = new FakeNode("root");
  render(root, "- [ ] open\n- [x] *done*\n- [link](https://h/a)\n- [y] none\n\n1. [X] loose\n\n   more\n\n[ ] no list");
  const items = root.childNodes.filter((n) => n.tag === "ul" || n.tag === "ol").flatMap((n) => n.childNodes);
  assert.deepEqual(items.map((li) => li.childNodes[0].type === "checkbox" && [li.className, li.childNodes[0].checked, li.childNodes[0].disabled]), [["task", false, true], ["task", true, true], false, false, ["task", true, true]]);
  assert.deepEqual(items.map((li) => li.text.trim()), ["open", "done", "link", "[y] none", "loosemore"]);
  assert.equal(root.childNodes.at(-1).text, "[ ] no list");
});

test("nothing that a model writes becomes anything but text and the links that are allowed", () => {
  for (const text of ['<script>alert(1)</script>', '<img src=x onerror=alert(1)>', '<a href="javascript:alert(1)">x</a>', "<style>*{}</style>"]) {
    const out = html(text);
    assert.ok(!/<(script|img|style|a)\b/.test(out.replace(text, "")), out);
  }
  for (const url of ["javascript:alert(1)", "JAVASCRIPT:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "/relative", "&#106;avascript:x", "java\nscript:x"]) {
    assert.ok(!html(`[x](${url}) ![y](${url}) <${url}>`).includes("<a"), url);
  }
  assert.equal(html("[x](https://h/a) ![pic](http://h/p.png)"), "<p><a https://h/a>x</> <a http://h/p.png>pic</></>");
  assert.equal(html("https://h.org/a and readme.md"), "<p><a https://h.org/a>https://h.org/a</> and readme.md</>");
});

test("mathematics, and prices that are none", () => {
  drawn.length = 0;
  assert.equal(html("so $a_1*b*c$ and \\(x^2\\)."), "<p>so <span .math>[a_1*b*c]</> and <span .math>[x^2]</>.</>");
  assert.equal(html("$$\na\n=\nb\n$$\n\nafter"), "<div .math display>[a\n=\nb]</><p>after</>");
  assert.equal(html("\\[ x \\]"), "<div .math display>[x]</>");
  assert.match(html("- \\[\n  y\n  \\]"), /<li><div \.math display>\[y\]/);
  assert.deepEqual(drawn.map(([, display]) => display), [false, false, true, true, true]);
  for (const text of ["$5 and $10", "it costs $5", "from $5-$10 each", "US$5 or 7$", "`$x$`", "\\$x\\$"]) assert.ok(!html(text).includes("math"), text);
  assert.equal(drawn.length, 5);
});

test("a formula that is still being written is not drawn yet", () => {
  drawn.length = 0;
  assert.match(html("so:\n\n$$\n\\frac{1}"), /<div \.math display>/);
  assert.equal(drawn.length, 0);
});

test("a growing text is drawn as if it had come at once, and what is finished is kept", () => {
  const text = "# Head\n\nA *word* and\nmore.\n\n- one\n- two\n\n  still two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet x = 1;\n\nlet y;\n```\n\nAn end with $x$ in it.\n\n1. last";
  const root = new FakeNode("root");
  let first = null;
  for (let n = 1; n <= text.length; n++) {
    render(root, text.slice(0, n));
    if (n === 20) first = root.childNodes[0];
  }
  assert.equal(root.childNodes.map((n) => n.html).join(""), html(text));
  assert.equal(root.childNodes[0], first);
  render(root, "other");
  assert.equal(root.childNodes.map((n) => n.html).join(""), "<p>other</>");
});

// ---- what is written below an answer ----------------------------------------------------------------------------------

test("a speed is shown only where time was measured", async () => {
  const { rate } = await import(new URL("views.js", folder));
  assert.equal(rate({ tokens: 101, first: 1000, last: 2000, atFirst: 1 }), "100.0 tok/s");
  assert.equal(rate({ tokens: 8, first: 1000, last: 1000.1, atFirst: 6 }), ""); // one packet
  assert.equal(rate({ tokens: 8, first: 1000 }), "");
});
