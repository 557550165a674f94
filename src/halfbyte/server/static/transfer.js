// Conversations as files: JSON, which this page reads back, and markdown for people. An import copies known fields only, and
// refuses a damaged or foreign file as a whole. No page here.

import { fenced, messageText, Unreadable } from "./attachments.js";
import { count, isCut, newestEnd, path } from "./tree.js";

const FORMAT = "halfbyte.conversations";
const VERSION = 1;
export const MOST_IMPORT_BYTES = 200e6;

// ---- to a file -----------------------------------------------------------------------------------------------------

/** An answer that is being written is exported as one that was cut off: its instants mean nothing elsewhere. */
function still(node) {
  if (!node.live) return node;
  const { start = 0, first, last, ...stats } = node.stats ?? {};
  const settled = { ...stats, start: 0, ...(first ? { first: first - start, last: last - start } : {}) };
  return { ...node, live: 0, finish: node.finish || "interrupted", stats: settled };
}

export function toJson(conversations, now = new Date()) {
  const out = conversations.map((c) => ({ ...c, nodes: Object.fromEntries(Object.entries(c.nodes).map(([id, n]) => [id, still(n)])) }));
  return JSON.stringify({ format: FORMAT, version: VERSION, exported: now.toISOString(), conversations: out }, null, 1);
}

/** The branch on screen, as a document. */
export function toMarkdown(conversation) {
  const out = [`# ${conversation.title || "Conversation"}`, `${new Date(conversation.at).toISOString().slice(0, 10)}${conversation.model ? `, ${conversation.model}` : ""}`];
  for (const m of path(conversation)) {
    out.push(m.role === "user" ? "## You" : "## Assistant");
    if (m.role === "user") { out.push(messageText(m)); continue; }
    if (m.reasoning) out.push(`<details>\n<summary>Reasoning</summary>\n\n${m.reasoning.trim()}\n\n</details>`);
    if (m.text) out.push(m.text.trim());
    for (const call of m.calls ?? []) {
      out.push(`Call of \`${call.name}\`:\n\n${fenced(call.args, "json")}`);
      if (call.result !== undefined) out.push(`Result:\n\n${fenced(call.result)}`);
    }
    if (m.error) out.push(`*${m.error}*`);
    else if (isCut(m)) out.push("*The answer was cut off here.*");
  }
  return `${out.join("\n\n")}\n`;
}

export function fileName(title, ending, now = new Date()) {
  const name = title.normalize("NFKD").replace(/\p{M}/gu, "").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${name || "conversation"}-${now.toISOString().slice(0, 10)}.${ending}`;
}

// ---- from a file ---------------------------------------------------------------------------------------------------

const damaged = (where) => new Unreadable(`This file is damaged (${where}): nothing was imported.`);
const isText = (value) => typeof value === "string";
const isId = (value) => isText(value) && /^[\w.:-]{1,100}$/.test(value) && !(value in {});
const isCount = (value) => Number.isSafeInteger(value) && value >= 0 && value < 1e9; // a version that can still grow
const isTime = (value) => Number.isFinite(value) && value >= 0 && value < 8.64e15;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isOptional = (test) => (value) => value === undefined || value === null || test(value);

/** The fields of `raw` that `tests` names, each of which must hold; others are left behind. */
function pick(raw, tests, where) {
  if (!isObject(raw)) throw damaged(where);
  const out = {};
  for (const [key, test] of Object.entries(tests)) {
    const value = Object.hasOwn(raw, key) ? raw[key] : undefined;
    if (!test(value)) throw damaged(`${where}: ${key}`);
    if (value !== undefined && value !== null) out[key] = value;
  }
  return out;
}

const NODE = {
  id: isId, v: isCount, at: isTime, parent: isOptional(isText), role: (r) => r === "user" || r === "assistant", text: isOptional(isText),
  reasoning: isOptional(isText), finish: isOptional(isText), error: isOptional(isText), live: isOptional(isTime),
};
const STATS = Object.fromEntries(["start", "first", "last", "atFirst", "tokens", "cached", "thought", "used", "earlier", "pondered"].map((key) => [key, isOptional(Number.isFinite)]));
const CALL = { id: isText, name: isText, args: isText, result: isOptional(isText) };
const FILE = { name: isText, text: isText, pasted: isOptional((v) => typeof v === "boolean") };
const list = (value, tests, where) => {
  if (!Array.isArray(value)) throw damaged(where);
  return value.map((item, n) => pick(item, tests, `${where} ${n + 1}`));
};

function readNode(raw, key, where) {
  const node = { text: "", parent: null, ...pick(raw, NODE, where) };
  if (node.id !== key) throw damaged(`${where}: id`);
  if (raw.calls) node.calls = list(raw.calls, CALL, `${where}, call`);
  if (raw.files) node.files = list(raw.files, FILE, `${where}, file`);
  if (raw.stats) node.stats = pick(raw.stats, STATS, `${where}, stats`);
  return still(node);
}

const CONVERSATION = { id: isId, v: isCount, at: isTime, title: isOptional(isText), renamed: isOptional(isTime), model: isOptional(isText), leaf: isOptional(isText) };

function readConversation(raw, number) {
  const where = `conversation ${number}`;
  const conversation = { title: "", renamed: 0, model: "", leaf: null, deleted: 0, ...pick(raw, CONVERSATION, where), nodes: {} };
  if (!isObject(raw.nodes)) throw damaged(`${where}: nodes`);
  for (const [n, key] of Object.keys(raw.nodes).entries()) conversation.nodes[key] = readNode(raw.nodes[key], key, `${where}, message ${n + 1}`);
  const nodes = Object.values(conversation.nodes);
  for (const node of nodes) if (node.parent && !Object.hasOwn(conversation.nodes, node.parent)) node.parent = null;
  const root = nodes.find((n) => n.parent === null);
  if (nodes.length && !root) throw damaged(`${where}: no first message`);
  if (root && !Object.hasOwn(conversation.nodes, conversation.leaf ?? "")) conversation.leaf = newestEnd(conversation, root);
  return conversation;
}

/** The conversations in the text of an exported file. Throws Unreadable with a sentence for a person. */
export function fromJson(text) {
  let raw;
  try { raw = JSON.parse(text.replace(/^\ufeff/, "")); } catch {
    throw new Unreadable(text.includes(FORMAT) ? "This file is damaged or incomplete (it is not JSON): nothing was imported." : "This file is no export of halfbyte's page: choose a .json file that was saved with “Export”.");
  }
  if (raw?.format !== FORMAT) throw new Unreadable("This file is no export of halfbyte's page: choose a .json file that was saved with “Export”.");
  if (!isCount(raw.version)) throw damaged("version");
  if (raw.version > VERSION) throw new Unreadable(`This file is of a newer halfbyte (format ${raw.version}; this page reads ${VERSION}): update this one first.`);
  if (!Array.isArray(raw.conversations)) throw damaged("conversations");
  const out = raw.conversations.map((c, n) => readConversation(c, n + 1)).filter(count);
  if (!out.length) throw new Unreadable("This file has no conversations in it.");
  return out;
}
