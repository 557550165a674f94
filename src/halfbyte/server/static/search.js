// Finds conversations by words in their titles, messages and files. Case and accents do not count.

const fold = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

const cache = new WeakMap(); // message -> {v, text}
function folded(node) {
  const hit = cache.get(node);
  if (hit?.v === node.v) return hit.text;
  const text = fold([node.text ?? "", ...(node.files ?? []).flatMap((f) => [f.name, f.text])].join("\n"));
  cache.set(node, { v: node.v, text });
  return text;
}

const wordsOf = (query) => fold(query).split(/\s+/).filter(Boolean);

/** Conversations that have every word, as [{conversation, message}]. `message` has most of the words; null if only the title has them. */
export function search(conversations, query) {
  const terms = wordsOf(query);
  if (!terms.length) return conversations.map((conversation) => ({ conversation, message: null }));
  const results = [];
  for (const conversation of conversations) {
    const title = fold(conversation.title ?? "");
    const missing = new Set(terms.filter((w) => !title.includes(w)));
    let best = null;
    let most = 0;
    for (const message of Object.values(conversation.nodes)) {
      const text = folded(message);
      const hits = terms.filter((w) => text.includes(w));
      for (const w of hits) missing.delete(w);
      if (hits.length > most) { most = hits.length; best = message; }
    }
    if (!missing.size) results.push({ conversation, message: best });
  }
  return results;
}

const AROUND = 36;
/** The part of a text around the first match, as [text, isMatch] pieces. Empty without a match. */
export function snippet(text, query) {
  const terms = wordsOf(query);
  const plain = text.replace(/\s+/g, " ");
  let flat = "";
  const at = []; // where each character of `flat` stands in `plain`
  let position = 0;
  for (const ch of plain) {
    const f = fold(ch);
    for (let i = 0; i < f.length; i++) at.push(position);
    flat += f;
    position += ch.length;
  }
  at.push(plain.length);
  const starts = terms.map((w) => flat.indexOf(w)).filter((i) => i >= 0);
  if (!starts.length) return [];
  const first = Math.min(...starts);
  const [from, to] = [Math.max(0, first - AROUND), Math.min(flat.length, first + 2 * AROUND)];
  const pieces = from > 0 ? [["…", false]] : [];
  let done = from;
  while (done < to) {
    const next = terms.map((w) => [flat.indexOf(w, done), w.length]).filter(([i]) => i >= 0 && i < to).sort((a, b) => a[0] - b[0] || b[1] - a[1])[0];
    if (!next) break;
    if (next[0] > done) pieces.push([plain.slice(at[done], at[next[0]]), false]);
    done = next[0] + next[1];
    pieces.push([plain.slice(at[next[0]], at[done]), true]);
  }
  if (done < to) pieces.push([plain.slice(at[done], at[to]), false]);
  if (to < flat.length) pieces.push(["…", false]);
  return pieces;
}
