// How much of the model's context a conversation takes: the server's count for the last answer, plus the texts since then.

import * as api from "./api.js";
import { messageParts } from "./attachments.js";

export const NEAR = 0.85;
const WORTH_COUNTING = 200; // characters: the tokens of less are guessed
const CALM = 400; // ms without a key before the server counts

export const guess = (text) => Math.ceil(text.length / 4);

/** {used, rest}: tokens that the server counted, and the texts since then that it has not. */
export function standing(messages) {
  const at = messages.findLastIndex((m) => m.stats?.used);
  const rest = messages.slice(at + 1).flatMap((m) => (m.role === "user" ? messageParts(m) : m.text ? [m.text] : []));
  return { used: messages[at]?.stats.used ?? 0, rest };
}

/** How the meter looks: {share, level, label, warning}. */
export function reading(used, limit) {
  const share = used / limit;
  const level = share > 1 ? "over" : share >= NEAR ? "near" : "calm";
  const [u, l] = [used.toLocaleString("en"), limit.toLocaleString("en")];
  const warning = {
    calm: "",
    near: `This conversation takes ${Math.floor(share * 100)} % of the context of ${l} tokens: soon no answer fits.`,
    over: `This is too long by about ${(used - limit).toLocaleString("en")} tokens: the context holds ${l}.`,
  }[level];
  return { share: Math.min(share, 1), level, label: `${u} of ${l} tokens`, short: `${u} / ${l}`, warning };
}

const RING = 2 * Math.PI * 7;

export class Meter {
  /** `ui`: {meter, "meter-text", "meter-ring", room, "room-text"}. */
  constructor(ui) {
    this.ui = ui;
    this.limit = 0;
    this.counts = new Map(); // text -> tokens
    this.timer = 0;
  }

  /** `messages` of the branch on screen, `draft`: the parts of what would be sent next. */
  draw(messages, draft) {
    const { used, rest } = standing(messages);
    const texts = [...rest, ...draft];
    this.show(texts.reduce((sum, text) => sum + (this.counts.get(text) ?? guess(text)), used), Boolean(messages.length || draft.length));
    clearTimeout(this.timer);
    const open = texts.filter((text) => text.length >= WORTH_COUNTING && !this.counts.has(text));
    if (open.length && this.limit) this.timer = setTimeout(() => this.count(open, messages, draft), CALM);
  }

  async count(texts, messages, draft) {
    const timer = this.timer;
    if (this.counts.size > 50) this.counts.clear();
    for (const text of texts) {
      let tokens = guess(text);
      try { tokens = await api.countTokens(text); } catch { /* the guess stays */ }
      this.counts.set(text, tokens);
    }
    if (timer === this.timer) this.draw(messages, draft); // else it was drawn since, and is drawn again after its own count
  }

  show(used, visible) {
    const { ui } = this;
    ui.meter.hidden = !visible || !this.limit;
    if (ui.meter.hidden) { ui.room.hidden = true; return; }
    const { share, level, label, short, warning } = reading(used, this.limit);
    ui.meter.className = `meter ${level}`;
    ui.meter.title = `Context: ${label}`;
    ui.meter.setAttribute("aria-valuemax", this.limit);
    ui.meter.setAttribute("aria-valuenow", Math.min(used, this.limit));
    ui.meter.setAttribute("aria-valuetext", label);
    ui["meter-ring"].setAttribute("stroke-dasharray", `${share * RING} ${RING}`);
    ui["meter-text"].textContent = short;
    ui.room.className = `room ${level}`;
    ui.room.hidden = !warning;
    if (ui["room-text"].textContent !== warning) ui["room-text"].textContent = warning;
  }
}
