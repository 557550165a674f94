// Conversations and settings in this browser only (localStorage). When the quota is full the oldest conversations go.

const KEY = "halfbyte.conversations";
const SETTINGS = "halfbyte.settings";

const read = (key, fallback) => {
  try { return JSON.parse(localStorage.getItem(key)) ?? fallback; } catch { return fallback; }
};

export const settings = Object.assign(
  { theme: "system", effort: "medium", system: "", temperature: "", max: "", tools: "", key: "", side: true },
  read(SETTINGS, {}),
);
export const saveSettings = () => { try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* private mode */ } };

export let conversations = read(KEY, []).filter((c) => c && Array.isArray(c.messages));

export function save() {
  conversations.sort((a, b) => b.at - a.at);
  const kept = conversations.filter((c) => c.messages.length);
  while (kept.length) {
    try { localStorage.setItem(KEY, JSON.stringify(kept)); return; } catch { kept.pop(); }
  }
  try { localStorage.removeItem(KEY); } catch { /* private mode */ }
}

export function create() {
  const id = globalThis.crypto?.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  const conversation = { id, at: Date.now(), title: "", messages: [] };
  conversations.unshift(conversation);
  return conversation;
}

export const remove = (id) => { conversations = conversations.filter((c) => c.id !== id); save(); };
export const wipe = () => { conversations = []; save(); };
