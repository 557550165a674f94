// The parts of the chat page that need no browser: run by test_page_logic.py as `node page_checks.mjs FOLDER`, where FOLDER is
// the page's static files with a package.json that says they are modules.

import assert from "node:assert/strict";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

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
