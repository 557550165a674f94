// Conversations (IndexedDB) and settings (localStorage), in this browser only. Every write reads what is stored, joins it
// with what this tab knows and puts the result back in one transaction, so that no tab undoes another's work; other tabs
// are told and join it, too. Nothing is thrown away to make room: where there is none, the page says so.

import { count, create, fromList, merge, touch } from "./tree.js";

const SETTINGS = "halfbyte.settings";
const RESCUED = "halfbyte.rescued.";
const OLD = "halfbyte.conversations"; // where earlier versions kept everything
const BIN_DAYS = 30;

const read = (key, fallback) => {
  try { return JSON.parse(localStorage.getItem(key)) ?? fallback; } catch { return fallback; }
};

export const settings = Object.assign(
  { theme: "system", effort: "medium", system: "", temperature: "", max: "", tools: "", key: "", side: true },
  read(SETTINGS, {}),
);
export const saveSettings = () => { try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* private mode */ } };

const known = new Map(); // id -> conversation
let changed = () => {}; // told of a conversation's id, or nothing for all, when another tab changed it
let failed = () => {}; // told why something could not be kept
let base = null;
const others = "BroadcastChannel" in globalThis ? new BroadcastChannel("halfbyte") : null;

export const conversations = () => [...known.values()].filter((c) => !c.deleted && count(c)).sort((a, b) => b.at - a.at);
export const deleted = () => [...known.values()].filter((c) => c.deleted && count(c)).sort((a, b) => b.deleted - a.deleted);
export const get = (id) => known.get(id);

// ---- the database ------------------------------------------------------------------------------------------------

const promised = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function openBase() {
  const request = indexedDB.open("halfbyte", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  return promised(request);
}

function transact(mode, work) {
  return new Promise((resolve, reject) => {
    const transaction = base.transaction("conversations", mode);
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onerror = transaction.onabort = (e) => reject(transaction.error ?? e.target.error);
    work(transaction.objectStore("conversations"), (value) => { result = value; });
  });
}

/** Read every conversation; `onChange(id)` is called for what other tabs do, `onFailure(sentence)` for what cannot be kept. */
export async function open(onChange, onFailure) {
  changed = onChange;
  failed = onFailure;
  try {
    base = await openBase();
    base.onversionchange = () => base.close();
    await refresh();
  } catch {
    failed("This browser keeps nothing here: conversations end with this tab.");
  }
  for (const old of read(OLD, [])) {
    if (old?.id && Array.isArray(old.messages) && !known.has(old.id)) keep(fromList(old));
  }
  recover();
  if (base) try { localStorage.removeItem(OLD); } catch { /* private mode */ }
  const oldest = Date.now() - BIN_DAYS * 864e5;
  for (const c of deleted()) if (c.deleted < oldest) purge(c.id);
}

/** What is stored now, joined into what this tab knows. A tab that slept has missed what it was told. */
export async function refresh() {
  if (!base) return;
  const all = await transact("readonly", (s, give) => { s.getAll().onsuccess = (e) => give(e.target.result); });
  for (const stored of all) join(stored);
  for (const id of known.keys()) if (!all.some((c) => c.id === id) && !writes.has(id) && !timers.has(id) && count(known.get(id))) known.delete(id);
}

function join(stored) {
  const mine = known.get(stored.id);
  if (mine) return merge(mine, stored);
  known.set(stored.id, stored);
  return true;
}

others?.addEventListener("message", async ({ data }) => {
  if (data.purged) { known.delete(data.purged); changed(data.purged); return; }
  if (!base) return;
  const stored = await transact("readonly", (s, give) => { s.get(data.id).onsuccess = (e) => give(e.target.result); });
  if (stored && join(stored)) changed(data.id);
});

// ---- writing -----------------------------------------------------------------------------------------------------

const writes = new Map(); // id -> "writing", or "again" where it changed meanwhile

/** Keep a conversation as it is now. */
export async function save(conversation) {
  const { id } = conversation;
  if (!base || !count(conversation)) return;
  if (writes.has(id)) { writes.set(id, "again"); return; }
  try {
    do {
      writes.set(id, "writing");
      await transact("readwrite", (s) => {
        s.get(id).onsuccess = (e) => {
          if (e.target.result) merge(conversation, e.target.result);
          s.put(conversation);
        };
      });
      others?.postMessage({ id });
    } while (writes.get(id) === "again");
  } catch (e) {
    failed(`${problemOf(e)} What is written now is lost with this tab: export it, or delete other conversations for good (Settings).`);
  } finally {
    writes.delete(id);
  }
}

const timers = new Map();
/** The same, a moment later; for an answer that grows with every frame. */
export function saveSoon(conversation) {
  if (timers.has(conversation.id)) return;
  timers.set(conversation.id, setTimeout(() => { timers.delete(conversation.id); save(conversation); }, 400));
}

/** Merge imported conversations, all or none of them. Returns how many were new, changed, or already here. */
export async function take(conversations) {
  const result = { added: 0, changed: 0, same: 0 };
  const work = (existing, incoming) => {
    if (!existing) { result.added += 1; return incoming; }
    const news = merge(existing, incoming);
    const back = Boolean(existing.deleted); // what a person imports is meant to be seen
    if (back) touch(existing, { deleted: 0 }, existing.at);
    result[news || back ? "changed" : "same"] += 1;
    return existing;
  };
  if (base) {
    const merged = [];
    await transact("readwrite", (s) => {
      for (const incoming of conversations) {
        s.get(incoming.id).onsuccess = (e) => { const c = work(e.target.result, structuredClone(incoming)); merged.push(c); s.put(c); };
      }
    });
    for (const c of merged) { join(c); others?.postMessage({ id: c.id }); }
  } else for (const incoming of conversations) known.set(incoming.id, work(known.get(incoming.id), incoming));
  return result;
}

/** Why something could not be kept, in a sentence. */
export const problemOf = (e) => (e?.name === "QuotaExceededError" ? "This browser has no room left." : `This browser does not keep it (${e?.name ?? e}).`);

function keep(conversation) { known.set(conversation.id, conversation); save(conversation); }

export function start() {
  const conversation = create();
  known.set(conversation.id, conversation);
  return conversation;
}

export function remove(...which) { for (const c of which) { touch(c, { deleted: Date.now() }, c.at); save(c); } }
export function restore(...which) { for (const c of which) { touch(c, { deleted: 0 }, c.at); save(c); } }
export async function purge(id) {
  known.delete(id);
  if (base) await transact("readwrite", (s) => { s.delete(id); });
  others?.postMessage({ purged: id });
}

// ---- a page that closes in the middle of an answer or of a write ---------------------------------------------------

/** A closing page has no time for a transaction: the half answer waits in localStorage, which is written at once. */
export function rescue(conversation, node) {
  const nodes = { [node.id]: node };
  if (conversation.nodes[node.parent]) nodes[node.parent] = conversation.nodes[node.parent];
  setAside({ ...conversation, nodes }, node.id);
}

/** A transaction that has not ended is lost with the page: what it would have written waits there, too. */
export function rescueWrites() {
  for (const id of new Set([...writes.keys(), ...timers.keys()])) {
    const conversation = known.get(id);
    if (conversation) setAside(conversation, id) || setAside({ ...conversation, nodes: {} }, id); // all, or else its title and branch
  }
}

function setAside(conversation, key) {
  try { localStorage.setItem(RESCUED + key, JSON.stringify(conversation)); return true; } catch { return false; } // the last save has to do
}

function recover() {
  let keys = [];
  try { keys = Object.keys(localStorage).filter((k) => k.startsWith(RESCUED)); } catch { /* private mode */ }
  for (const key of keys) {
    const half = read(key, null);
    localStorage.removeItem(key);
    if (!half?.nodes || (!known.has(half.id) && !count(half))) continue;
    const newer = half.v >= (known.get(half.id)?.v ?? 0);
    join(half);
    const conversation = known.get(half.id);
    if (newer && conversation.nodes[half.leaf]) conversation.leaf = half.leaf; // no branch is on screen yet
    save(conversation);
  }
}
