// A conversation as a tree: every message knows the one before it, so that asking again makes a branch and loses nothing.
// Two copies of a conversation, from two tabs, always join to the same one: messages are never removed, and of a message
// that both have the one with the higher version wins. No storage and no page here.
//
// conversation: { id, v, at, title, renamed, model, leaf, deleted, nodes: { id: { id, v, at, parent, role, text, ... } } }
// A user's message may have `files`: [{ name, text, pasted }].

export const newId = () => globalThis.crypto?.randomUUID?.() ?? `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

export function create(now = Date.now()) {
  return { id: newId(), v: 0, at: now, title: "", renamed: 0, model: "", leaf: null, deleted: 0, nodes: {} };
}

/** A change of the conversation itself: its title, its branch on screen, whether it is deleted. */
export function touch(conversation, changes = {}, now = Date.now()) {
  Object.assign(conversation, changes);
  conversation.v += 1;
  conversation.at = now;
}

/** Give a conversation a title. Changes that another tab makes meanwhile do not undo it. An empty title restores the default. */
export function rename(conversation, title, now = Date.now()) {
  const text = title.trim().replace(/\s+/g, " ").slice(0, 200);
  touch(conversation, { title: text || titleOf(path(conversation)[0]), renamed: now }, conversation.at);
}

/** The default title of a conversation that begins with this message. */
export function titleOf({ text = "", files = [] } = {}) {
  const [file] = files;
  return (text.trim() || (file?.pasted ? file.text.trim() : file?.name) || "").split("\n")[0].slice(0, 60);
}

/** A change of one message. */
export function change(node, changes = {}) {
  Object.assign(node, changes);
  node.v += 1;
}

/** A new message after `parent` (a node's id, or null for the beginning). It becomes the end of what is shown. */
export function add(conversation, parent, fields, now = Date.now()) {
  const node = { id: newId(), v: 1, at: now, parent, ...fields };
  conversation.nodes[node.id] = node;
  touch(conversation, { leaf: node.id }, now);
  return node;
}

/** The messages from the first one to `leaf`, in order. */
export function path(conversation, leaf = conversation.leaf) {
  const out = [];
  const seen = new Set();
  for (let id = leaf; id && conversation.nodes[id] && !seen.has(id); id = conversation.nodes[id].parent) {
    seen.add(id);
    out.unshift(conversation.nodes[id]);
  }
  return out;
}

const older = (a, b) => a.at - b.at || (a.id < b.id ? -1 : 1);

/** Every message that stands where this one stands, itself included, oldest first. */
export const siblings = (conversation, node) => Object.values(conversation.nodes).filter((n) => n.parent === node.parent).sort(older);

/** The end of the newest branch that goes through this message. */
export function newestEnd(conversation, node) {
  const children = new Map();
  for (const n of Object.values(conversation.nodes)) {
    if (!children.has(n.parent) || older(children.get(n.parent), n) < 0) children.set(n.parent, n);
  }
  let at = node;
  const seen = new Set();
  while (children.has(at.id) && !seen.has(at.id)) { seen.add(at.id); at = children.get(at.id); }
  return at.id;
}

const CUT = new Set(["length", "stopped", "interrupted"]);
/** Whether an answer ended before it was complete, with something that the model can go on from. */
export const isCut = (node) => node.role === "assistant" && Boolean(node.text || node.reasoning) && !node.calls?.length && Boolean(node.error || CUT.has(node.finish) || node.live);

const isBefore = (conversation, ancestor, leaf) => !ancestor || path(conversation, leaf).some((n) => n.id === ancestor);

/** Join `theirs` into `mine`, which is changed; says whether anything was new. The branch on screen stays, unless theirs goes on from it. */
export function merge(mine, theirs) {
  let news = false;
  for (const [id, node] of Object.entries(theirs.nodes)) {
    const own = mine.nodes[id];
    if (!own || node.v > own.v || (node.v === own.v && (node.text ?? "").length > (own.text ?? "").length)) {
      if (own) Object.assign(own, node); else mine.nodes[id] = node;
      news = true;
    }
  }
  const leaf = mine.leaf;
  const newer = theirs.v > mine.v || (theirs.v === mine.v && theirs.at > mine.at);
  const renamed = (theirs.renamed ?? 0) - (mine.renamed ?? 0);
  const take = (keys) => { for (const key of keys) if (mine[key] !== theirs[key]) { mine[key] = theirs[key]; news = true; } };
  if (renamed > 0 || (renamed === 0 && newer)) take(["title", "renamed"]);
  if (newer) take(["v", "at", "model", "deleted", "leaf"]);
  if (leaf && mine.nodes[leaf] && !isBefore(mine, leaf, mine.leaf)) mine.leaf = leaf;
  return news;
}

/** What an earlier version of this page kept: a plain list of messages. */
export function fromList(old) {
  const conversation = { ...create(old.at ?? Date.now()), id: String(old.id ?? newId()), title: old.title ?? "", model: old.model ?? "" };
  for (const message of old.messages ?? []) add(conversation, conversation.leaf, { ...message }, conversation.at);
  return conversation;
}

export const count = (conversation) => Object.keys(conversation.nodes).length;
