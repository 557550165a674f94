// Markdown to DOM nodes. Text from a model only ever becomes text nodes: nothing is parsed as HTML, links go to
// http, https and mailto alone, images are shown as links. Blocks that did not change since the last call are kept,
// so a growing answer costs one block per frame.

const el = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
};

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Cut text into blocks: [{kind, lines, ...}]. Each block also has `raw`, by which an unchanged one is recognised. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const out = [];
  let i = 0;
  const push = (block, from) => out.push({ ...block, raw: lines.slice(from, i).join("\n") });
  while (i < lines.length) {
    const line = lines[i];
    if (!line.trim()) { i++; continue; }
    const start = i;
    const fence = line.match(FENCE);
    if (fence) {
      const body = [];
      i++;
      while (i < lines.length && !(lines[i].trim().startsWith(fence[2]) && !lines[i].trim().slice(fence[2].length).replaceAll(fence[2][0], ""))) body.push(lines[i++].slice(Math.min(fence[1].length, lines[i - 1].search(/\S|$/))));
      const closed = i < lines.length;
      i++;
      push({ kind: "code", lang: fence[3].trim().split(/\s+/)[0] || "", lines: body, closed }, start);
      continue;
    }
    const heading = line.match(HEADING);
    if (heading) { i++; push({ kind: "heading", level: heading[1].length, lines: [heading[2]] }, start); continue; }
    if (RULE.test(line)) { i++; push({ kind: "rule", lines: [] }, start); continue; }
    if (QUOTE.test(line)) {
      const body = [];
      while (i < lines.length && lines[i].trim() && (QUOTE.test(lines[i]) || body.length)) {
        const quoted = lines[i].match(QUOTE);
        body.push(quoted ? quoted[1] : lines[i]);
        i++;
      }
      push({ kind: "quote", lines: body }, start);
      continue;
    }
    if (ITEM.test(line)) {
      const body = [];
      while (i < lines.length) {
        if (!lines[i].trim()) {
          // A blank line ends the list unless what follows still belongs to it.
          const next = lines[i + 1] ?? "";
          if (!/^\s{2,}\S/.test(next) && !ITEM.test(next)) break;
        } else if (!ITEM.test(lines[i]) && !/^\s{2,}/.test(lines[i]) && (FENCE.test(lines[i]) || HEADING.test(lines[i]) || !(lines[i - 1] ?? "").trim())) break;
        body.push(lines[i++]);
      }
      push({ kind: "list", lines: body }, start);
      continue;
    }
    if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "") && (lines[i + 1] ?? "").includes("-")) {
      const body = [];
      while (i < lines.length && lines[i].trim() && lines[i].includes("|")) body.push(lines[i++]);
      push({ kind: "table", lines: body }, start);
      continue;
    }
    const body = [];
    while (i < lines.length && lines[i].trim() && !(body.length && (FENCE.test(lines[i]) || HEADING.test(lines[i]) || QUOTE.test(lines[i]) || RULE.test(lines[i]) || /^\s*([-*+]|1[.)])\s+\S/.test(lines[i])))) body.push(lines[i++]);
    push({ kind: "text", lines: body }, start);
  }
  return out;
}

/** Inline spans as an array of nodes and strings. */
export function inline(text, depth = 0) {
  const out = [];
  let plain = "";
  const flush = () => { if (plain) out.push(plain); plain = ""; };
  let i = 0;
  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) { plain += text[i + 1]; i += 2; continue; }
    if (c === "`") {
      const ticks = text.slice(i).match(/^`+/)[0];
      const end = text.indexOf(ticks, i + ticks.length);
      if (end > 0) {
        flush();
        out.push(el("code", { textContent: text.slice(i + ticks.length, end).replace(/^ (.+) $/, "$1") }));
        i = end + ticks.length;
        continue;
      }
      plain += ticks; i += ticks.length; continue;
    }
    if (depth < 6 && (c === "*" || c === "_" || c === "~")) {
      const run = text.slice(i).match(/^(\*{1,3}|_{1,3}|~~)/)?.[0];
      const inside = run && run[0] === "_" && /\w/.test(text[i - 1] ?? ""); // snake_case is no emphasis
      if (run && !inside && /\S/.test(text[i + run.length] ?? "")) {
        let end = text.indexOf(run, i + run.length);
        while (end > 0 && (/\s/.test(text[end - 1]) || (run[0] === "_" && /\w/.test(text[end + run.length] ?? "")) || (run === "*" && text[end + 1] === "*"))) end = text.indexOf(run, end + (run === "*" && text[end + 1] === "*" ? 2 : 1));
        if (end > 0) {
          flush();
          const children = inline(text.slice(i + run.length, end), depth + 1);
          const tag = run === "~~" ? "del" : run.length === 1 ? "em" : "strong";
          out.push(run.length === 3 ? el("strong", {}, el("em", {}, ...children)) : el(tag, {}, ...children));
          i = end + run.length;
          continue;
        }
      }
      plain += run ?? c; i += (run ?? c).length; continue;
    }
    if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const match = text.slice(i, i + 2000).match(/^!?\[((?:[^[\]\\]|\\.|\[[^\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/);
      const url = match && safeUrl(match[2]);
      if (match && url) {
        flush();
        out.push(link(url, depth < 6 ? inline(match[1] || url, depth + 1) : [match[1]]));
        i += match[0].length;
        continue;
      }
    }
    if (c === "<") {
      const match = text.slice(i, i + 2000).match(/^<(https?:\/\/[^\s<>]+)>/);
      if (match) { flush(); out.push(link(match[1], [match[1]])); i += match[0].length; continue; }
      const br = text.slice(i).match(/^<br\s*\/?>/i);
      if (br) { flush(); out.push(el("br")); i += br[0].length; continue; }
    }
    if (c === "h" && (i === 0 || !/\w/.test(text[i - 1]))) {
      const match = text.slice(i, i + 2000).match(/^https?:\/\/[^\s<>"'`\]]*[^\s<>"'`\].,;:!?)*_]/);
      if (match) { flush(); out.push(link(match[0], [match[0]])); i += match[0].length; continue; }
    }
    if (c === "\n") {
      if (plain.endsWith("  ")) { plain = plain.trimEnd(); flush(); out.push(el("br")); } else plain += "\n";
      i++;
      continue;
    }
    plain += c;
    i++;
  }
  flush();
  return out;
}

function safeUrl(url) {
  try {
    const parsed = new URL(url, "https://relative.invalid");
    if (parsed.host === "relative.invalid") return null;
    return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
  } catch { return null; }
}

const link = (href, children) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

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

function codeBlock(block) {
  const text = block.lines.join("\n");
  const copy = el("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    await copyText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1200);
  });
  return el("div", { className: "code" }, el("header", {}, el("span", { textContent: block.lang || "code" }), copy), el("pre", { tabIndex: 0 }, el("code", {}, ...paint(text, block.lang))));
}

function listBlock(lines) {
  const first = lines[0].match(ITEM);
  const ordered = /\d/.test(first[2]);
  const list = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) list.start = parseInt(first[2], 10);
  const base = first[1].length;
  let item = null;
  const close = () => { if (item) list.append(el("li", {}, ...itemNodes(item))); item = null; };
  for (const line of lines) {
    const m = line.match(ITEM);
    if (m && m[1].length <= base + 1) { close(); item = [m[4]]; } else if (item) item.push(line.replace(new RegExp(`^\\s{0,${base + (first[2].length + 1)}}`), ""));
  }
  close();
  return list;
}

function itemNodes(lines) {
  const inner = blocks(lines.join("\n"));
  const loose = lines.some((l, n) => !l.trim() && n < lines.length - 1);
  return inner.flatMap((b) => (b.kind === "text" && !loose ? inline(b.lines.join("\n")) : [node(b)]));
}

function tableBlock(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
  const aligns = cells(lines[1] ?? "").map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : ""));
  const row = (line, tag) => el("tr", {}, ...cells(line).map((c, n) => { const cell = el(tag, {}, ...inline(c)); if (aligns[n]) cell.style.textAlign = aligns[n]; return cell; }));
  return el("div", { className: "table" }, el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map((l) => row(l, "td")))));
}

function node(block) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    case "heading": return el(`h${block.level}`, {}, ...inline(block.lines[0]));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...blocks(block.lines.join("\n")).map(node));
    case "list": return listBlock(block.lines);
    case "table": return tableBlock(block.lines);
    default: return el("p", {}, ...inline(block.lines.join("\n")));
  }
}

/** Show `text` in `root`, touching only the blocks that changed. */
export function render(root, text) {
  const next = blocks(text);
  const old = root.renderedBlocks ?? [];
  let same = 0;
  while (same < next.length && same < old.length && old[same] === next[same].raw) same++;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const block of next.slice(same)) root.append(node(block));
  root.renderedBlocks = next.map((b) => b.raw);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // plain http to another host has no clipboard interface
    const area = el("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export { el };
