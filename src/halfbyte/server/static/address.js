// The address of a conversation. It stands behind the #, which a browser never sends: no server's log has it.

import { count } from "./tree.js";

const NEW = "#/new";
export const addressOf = (conversation) => (count(conversation) ? `#/c/${encodeURIComponent(conversation.id)}` : NEW);

/** {id} of a conversation, {fresh: true} for a new one, or {} for no address. */
export function readAddress(hash) {
  if (hash === NEW) return { fresh: true };
  const id = /^#\/c\/(.+)$/.exec(hash)?.[1];
  if (!id) return {};
  try { return { id: decodeURIComponent(id) }; } catch { return { id }; }
}
