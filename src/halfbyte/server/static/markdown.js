// Markdown to DOM nodes: markdown-it reads it, this file makes the nodes, of the kinds listed here and no others. Text from a
// model only ever becomes text nodes; links go to http, https and mailto alone, images are shown as links. Blocks that did
// not change since the last call are kept, so a growing answer costs one block per frame. Mathematics is KaTeX's, which is
// fetched when the first formula appears.

import "./vendor/markdown-it/markdown-it.umd.min.js";
import { copyText, el } from "./dom.js";

const md = globalThis.markdownit({ html: false, linkify: true });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // readme.md is a file here, not a host in Moldova
md.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);

// ---- what models write and markdown-it does not know: <br> and mathematics ------------------------------------------

md.inline.ruler.before("autolink", "br", (state, silent) => {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});

// "- [x] done": the box becomes a part of the list item.
md.core.ruler.after("inline", "task", ({ tokens }) => {
  tokens.forEach((token, n) => {
    const text = token.children?.[0];
    if (tokens[n - 2]?.type !== "list_item_open" || text?.type !== "text") return;
    const box = /^\[([ xX])\](?:\s|$)/.exec(text.content);
    if (!box) return;
    tokens[n - 2].meta = { task: box[1] === " " ? "open" : "done" };
    text.content = text.content.slice(box[0].length);
  });
});

const MATH = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

md.inline.ruler.before("escape", "math", (state, silent) => {
  const { src, pos } = state;
  const found = MATH.find(([open]) => src.startsWith(open, pos));
  if (!found) return false;
  const [open, close, display] = found;
  const end = src.indexOf(close, pos + open.length);
  if (end < 0 || end >= state.posMax) return false;
  const tex = src.slice(pos + open.length, end);
  // $5 and $10 are prices.
  if (!tex.trim() || (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(src[end + 1] ?? "") || /\w/.test(src[pos - 1] ?? "")))) return false;
  if (!silent) Object.assign(state.push("math", "", 0), { content: tex, meta: { display } });
  state.pos = end + close.length;
  return true;
});

md.block.ruler.before("fence", "math", (state, startLine, endLine, silent) => {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]);
  const found = MATH.find(([open, , display]) => display && line(startLine).startsWith(open));
  if (!found || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const close = found[1];
  const body = [line(startLine).slice(2)];
  let last = startLine;
  while (!body.at(-1).trimEnd().endsWith(close)) {
    if (body.at(-1).includes(close)) return false; // text follows: a formula within a sentence
    last += 1;
    if (last >= endLine) {
      if (body[0].trim()) return false;
      break; // a formula of several lines that is still being written
    }
    body.push(line(last));
  }
  if (silent) return true;
  const closed = last < endLine;
  const text = body.join("\n").trimEnd();
  const token = state.push("math", "", 0);
  Object.assign(token, { content: closed ? text.slice(0, -close.length) : text, meta: { display: true, open: !closed }, map: [startLine, last + 1], block: true });
  state.line = Math.min(last + 1, endLine);
  return true;
}, { alt: ["paragraph", "reference", "blockquote", "list"] });

let loading = null;
function loadMath() {
  loading ??= new Promise((resolve) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/vendor/katex/katex.min.css" }));
    document.head.append(el("script", { src: "/static/vendor/katex/katex.min.js", onload: resolve }));
  });
  return loading;
}

function mathNode({ content, meta }) {
  const node = el(meta.display ? "div" : "span", { className: meta.display ? "math display" : "math", textContent: content.trim() });
  const draw = () => {
    try {
      globalThis.katex.render(content, node, { displayMode: meta.display, throwOnError: false, strict: "ignore", trust: false, maxSize: 20, maxExpand: 400 });
    } catch { /* what was written stays */ }
  };
  if (meta.open) return node;
  if (globalThis.katex) draw(); else loadMath().then(draw);
  return node;
}

// ---- code --------------------------------------------------------------------------------------------------------

const WORDS = new Set(("abstract and as assert async await begin bool break case catch char class const continue def default defer del delete do double " +
  "elif else end enum except export extends false final finally float fn for from func function go goto if impl import in int interface is " +
  "lambda let local long loop match mod module mut namespace new nil none None not null or package pass print private protected pub public " +
  "raise ref return select self short signed sizeof static string struct super switch template then this throw trait true True False try type " +
  "typedef typeof union unsafe unsigned use using var void where while with yield SELECT FROM WHERE INSERT UPDATE DELETE JOIN GROUP ORDER BY AND OR NOT").split(" "));
const HASH = new Set(["python", "py", "sh", "bash", "zsh", "shell", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "makefile", "dockerfile", "nix", ""]);
const DASH = new Set(["sql", "lua", "haskell", "hs", "ada", "elm"]);
const PLAIN = new Set(["text", "txt", "plain", "output", "console", "diff", "markdown", "md"]);

/** A light hand with colours: comments, strings, numbers, common words. One rule for every language. */
function paint(code, lang) {
  const name = lang.toLowerCase();
  if (PLAIN.has(name) || code.length > 60000) return [code];
  const comment = DASH.has(name) ? "--[^\\n]*" : HASH.has(name) ? "(?<![\\w$])#[^\\n]*" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const pattern = new RegExp(`(?<c>${comment})|(?<s>"""[\\s\\S]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\`)|(?<n>\\b\\d[\\w.]*\\b)|(?<w>[A-Za-z_]\\w*)`, "g");
  const out = [];
  let last = 0;
  for (const m of code.matchAll(pattern)) {
    const kind = m.groups.c ? "c" : m.groups.s ? "s" : m.groups.n ? "n" : WORDS.has(m[0]) ? "k" : "";
    if (!kind) continue;
    out.push(code.slice(last, m.index), el("span", { className: kind, textContent: m[0] }));
    last = m.index + m[0].length;
  }
  out.push(code.slice(last));
  return out;
}

function codeBlock(text, lang) {
  const copy = el("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    await copyText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1200);
  });
  return el("div", { className: "code" }, el("header", {}, el("span", { textContent: lang || "code" }), copy), el("pre", { tabIndex: 0 }, el("code", {}, ...paint(text, lang))));
}

// ---- tokens to nodes -----------------------------------------------------------------------------------------------

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s"]);
const link = (href, ...children) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

/** Append what the tokens say to `root`. */
function build(root, tokens) {
  const open = [root];
  for (const t of tokens) {
    const top = open.at(-1);
    if (t.nesting === -1) open.pop();
    else if (t.nesting === 1) {
      const node = t.hidden ? top : t.tag === "a" ? link(t.attrGet("href")) : TAGS.has(t.tag) ? el(t.tag) : el("div");
      if (t.tag === "ol" && t.attrGet("start")) node.start = Number(t.attrGet("start"));
      if (t.tag === "th" || t.tag === "td") node.style.textAlign = /right|center/.exec(t.attrGet("style") ?? "")?.[0] ?? "";
      if (node !== top) top.append(t.tag === "table" ? el("div", { className: "table", tabIndex: 0 }, node) : node);
      if (t.meta?.task) {
        node.className = "task";
        const box = el("input", { type: "checkbox", disabled: true, checked: t.meta.task === "done", ariaLabel: t.meta.task === "done" ? "Done" : "Not done" });
        node.append(box, " ");
      }
      open.push(node);
    } else if (t.type === "inline") build(top, t.children);
    else if (t.type === "math") top.append(mathNode(t));
    else if (t.type === "fence" || t.type === "code_block") top.append(codeBlock(t.content.replace(/\n$/, ""), t.info.trim().split(/\s+/)[0]));
    else if (t.type === "code_inline") top.append(el("code", { textContent: t.content }));
    else if (t.type === "hardbreak") top.append(el("br"));
    else if (t.type === "softbreak") top.append("\n");
    else if (t.type === "hr") top.append(el("hr"));
    else if (t.type === "image") top.append(link(t.attrGet("src"), t.content || t.attrGet("src")));
    else top.append(t.content);
  }
}

/** Where each top-level block begins, as line numbers, and its tokens. */
function blocks(text) {
  const out = [];
  for (const t of md.parse(text, {})) {
    if (t.level === 0 && t.nesting !== -1) out.push({ line: t.map[0], tokens: [] });
    out.at(-1).tokens.push(t);
  }
  return out;
}

/** Show `text` in `root`. What stands before the last block cannot change while the text only grows, and is kept. */
export function render(root, text) {
  const source = text.replace(/\r\n?/g, "\n");
  const before = root.rendered ?? { source: "", last: 0, kept: 0 };
  const grows = source.startsWith(before.source);
  if (grows && source.length === before.source.length) return;
  const from = grows ? before.last : 0;
  const kept = grows ? before.kept : 0;
  while (root.childNodes.length > kept) root.lastChild.remove();
  const found = blocks(source.slice(from));
  for (const block of found) build(root, block.tokens);
  const line = found.at(-1)?.line ?? 0;
  const last = from + source.slice(from).split("\n").slice(0, line).reduce((n, l) => n + l.length + 1, 0);
  root.rendered = { source, last, kept: Math.max(0, root.childNodes.length - 1) };
}
