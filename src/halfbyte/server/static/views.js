// How a message looks. Views change nothing: what a person does goes to `actions`, which chat.js gives.

import { bytesOf, lineCount, sizeText } from "./attachments.js";
import { button, copyText, el, icon } from "./dom.js";
import { render } from "./markdown.js";
import { isCut } from "./tree.js";

export function seconds(s) { return s < 1 ? `${Math.round(s * 1000)} ms` : s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`; }
const SHORTEST = 20; // ms: what arrives within less came in one packet, and its time says nothing of the model's speed
export function rate(stats) {
  if (!stats?.tokens || !stats.last || stats.last - stats.first < SHORTEST) return "";
  return `${((stats.tokens - (stats.atFirst ?? 1)) / (stats.last - stats.first) * 1000).toFixed(1)} tok/s`;
}
function statLine(m) {
  const s = m.stats;
  if (!s?.first) return "";
  return [rate(s), `TTFT ${seconds((s.first - s.start) / 1000)}`, s.tokens ? `${(s.earlier ?? 0) + s.tokens} tokens` : "", s.cached ? `${s.cached} cached` : ""].filter(Boolean).join(" · ");
}
const NOTES = {
  length: "The answer was cut off at its token limit.",
  stopped: "Stopped.",
  interrupted: "Cut off: the page was closed while this was being written.",
};

const openStates = new Map(); // message id -> whether a person unfolded or folded it; kept when the page is drawn again

/** "2 / 3" with arrows, where a message has others in its place. */
function branches(turn, actions) {
  const { index, total } = turn;
  if (total < 2) return null;
  const back = button("back", "Previous version", () => actions.turnTo(turn.message, -1));
  const next = button("chev", "Next version", () => actions.turnTo(turn.message, 1));
  back.disabled = index === 0;
  next.disabled = index === total - 1;
  return el("span", { className: "branches" }, back, el("span", { textContent: `${index + 1} / ${total}` }), next);
}

/** A file or a paste with its size; `...buttons` stand behind it. */
export const chip = (file, ...buttons) => el("span", { className: "chip" }, icon("file"), el("span", { className: "name", textContent: file.name }), el("span", { className: "size", textContent: sizeText(bytesOf(file)) }), ...buttons);

function fileView(file, key) {
  const body = el("pre", { tabIndex: 0 });
  const details = el("details", { className: "file" }, el("summary", { title: "Show what is in it" }, chip(file)), body);
  details.addEventListener("toggle", () => {
    openStates.set(key, details.open);
    if (details.open) body.textContent = file.text;
  });
  details.open = openStates.get(key) ?? false;
  return details;
}

const FOLD = { characters: 1600, lines: 16 };
/** A long message shows its beginning and a button for the rest. */
function bubbleView(message) {
  const { id, text } = message;
  if (text.length <= FOLD.characters && lineCount(text) <= FOLD.lines) return el("div", { className: "bubble", textContent: text });
  const all = el("button", { type: "button", className: "link" });
  const bubble = el("div", { className: "bubble long" }, el("div", { className: "text", textContent: text }), all);
  const draw = () => {
    const open = openStates.get(id) ?? false;
    bubble.classList.toggle("open", open);
    all.textContent = open ? "Show less" : `Show all (${lineCount(text).toLocaleString("en")} lines, ${sizeText(bytesOf({ text }))})`;
    all.setAttribute("aria-expanded", String(open));
  };
  all.addEventListener("click", () => { openStates.set(id, !openStates.get(id)); draw(); });
  draw();
  return bubble;
}

/** `turn`: {message, index, total, last, live, elsewhere}. `live`: it is being written here; `elsewhere`: in another tab. */
export function userView(turn, actions) {
  const { message } = turn;
  const files = message.files?.length ? el("div", { className: "files" }, ...message.files.map((f, n) => fileView(f, `${message.id}/${n}`))) : null;
  const bubble = message.text ? bubbleView(message) : null;
  const acts = el("div", { className: "acts" }, branches(turn, actions), button("copy", "Copy", () => copyText(message.text)), button("pen", "Edit", () => actions.edit(message)));
  return el("article", { className: "turn user", ariaLabel: "You" }, files, bubble, acts);
}

export function editView(message, actions) {
  const area = el("textarea", { className: "edit", value: message.text });
  area.setAttribute("aria-label", "Edit the message");
  const done = el("button", { type: "submit", className: "solid", textContent: "Send" });
  const cancel = el("button", { type: "button", className: "plain", textContent: "Cancel", onclick: () => actions.draw() });
  const files = [...(message.files ?? [])];
  const chips = el("div", { className: "chips" });
  const drawChips = () => chips.replaceChildren(...files.map((f, n) => chip(f, button("x", `Remove ${f.name}`, () => { files.splice(n, 1); drawChips(); area.focus(); }))));
  drawChips();
  const form = el("form", { className: "turn" }, chips, area, el("div", { className: "row" }, el("span", { className: "grow" }), cancel, done));
  form.addEventListener("submit", (e) => { e.preventDefault(); if (area.value.trim() || files.length) actions.sayInstead(message, area.value, files); });
  area.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { e.stopPropagation(); actions.draw(); }
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); form.requestSubmit(); }
  });
  queueMicrotask(() => { area.focus(); area.setSelectionRange(area.value.length, area.value.length); });
  return form;
}

export class AnswerView {
  constructor(turn, actions) {
    this.turn = turn;
    this.message = turn.message;
    this.actions = actions;
    this.thoughtLabel = el("span", { className: "label" });
    this.thoughtBody = el("div", { className: "body prose", tabIndex: 0, role: "region", ariaLabel: "Reasoning" });
    const summary = el("summary", {}, icon("chev", "chev"), this.thoughtLabel);
    summary.addEventListener("click", () => openStates.set(this.message.id, !this.thought.open));
    this.thought = el("details", { className: "thought", hidden: true }, summary, this.thoughtBody);
    this.md = el("div", { className: "md prose" });
    this.calls = el("div");
    this.note = el("div", { hidden: true });
    this.stat = el("span", { className: "stat" });
    this.acts = el("div", { className: "acts" },
      branches(turn, actions),
      button("copy", "Copy", () => copyText(this.message.text)),
      button("again", "Regenerate", () => actions.regenerate(this.message)),
      turn.last && isCut(this.message) ? el("button", { type: "button", className: "go-on", title: "Go on with this answer", onclick: () => actions.goOn(this.message) }, icon("on"), "Continue") : null,
      this.stat);
    this.wait = el("span", { className: "wait" });
    this.wait.setAttribute("aria-label", "Waiting for the first token");
    this.root = el("article", { className: "turn assistant", ariaLabel: "Answer" }, this.thought, this.md, this.calls, this.wait, this.note, this.acts);
    this.shownCalls = [];
    this.draw();
  }

  draw() {
    const m = this.message;
    const { elsewhere } = this.turn;
    const live = this.turn.live || elsewhere;
    this.drawThought(live);
    render(this.md, m.text ?? "");
    this.drawCalls(live);
    this.wait.hidden = !live || Boolean(m.reasoning || m.text || (m.calls ?? []).length);
    this.acts.hidden = live;
    this.stat.textContent = live ? "" : statLine(m);
    const note = m.error || (elsewhere ? "Being written in another tab." : live ? "" : NOTES[m.finish || (m.live ? "interrupted" : "")] ?? "");
    this.note.hidden = !note;
    this.note.className = m.error ? "note" : "note mild";
    this.note.textContent = note;
    if (m.error) this.note.setAttribute("role", "alert");
  }

  /** Reasoning is open while it is written and folded once the answer begins, unless a person chose otherwise. */
  drawThought(live) {
    const m = this.message;
    this.thought.hidden = !m.reasoning;
    if (!m.reasoning) return;
    const thinking = live && !m.text && !m.calls?.length;
    this.thought.classList.toggle("thinking", thinking);
    this.thoughtLabel.textContent = thinking ? "Thinking" : m.stats?.thought ? `Thought for ${seconds(m.stats.thought / 1000)}` : "Reasoning";
    const open = openStates.get(m.id) ?? thinking;
    if (this.thought.open !== open) this.thought.open = open;
    const body = this.thoughtBody;
    const atEnd = body.scrollHeight - body.scrollTop - body.clientHeight < 40; // a reader who scrolled up stays there
    render(body, m.reasoning);
    if (thinking && atEnd) body.scrollTop = body.scrollHeight;
  }

  drawCalls(live) {
    const calls = this.message.calls ?? [];
    if (calls.length < this.shownCalls.length) { this.calls.replaceChildren(); this.shownCalls = []; }
    calls.forEach((call, n) => {
      if (!this.shownCalls[n]) {
        const args = el("pre");
        const result = el("div");
        const root = el("details", { className: "call", open: true }, el("summary", {}, icon("chev", "chev"), el("span", { className: "kind", textContent: "tool" }), call.name), args, result);
        this.calls.append(root);
        this.shownCalls[n] = { args, result, state: "" };
      }
      const shown = this.shownCalls[n];
      shown.args.textContent = pretty(call.args, live);
      const state = live ? "live" : call.result === undefined ? "ask" : "done";
      if (state !== shown.state) {
        shown.state = state;
        shown.result.replaceChildren(...(state === "ask" ? [this.ask(call)] : state === "done" ? [el("pre", { textContent: call.result })] : []));
      }
    });
  }

  ask(call) {
    const area = el("textarea", { rows: 2, placeholder: "What the tool returns" });
    const send = el("button", { type: "submit", className: "solid", textContent: "Give result" });
    const form = el("form", {}, el("label", {}, "Result", area), el("div", { className: "row" }, send));
    form.addEventListener("submit", (e) => { e.preventDefault(); this.actions.giveResult(this.message, call, area.value); });
    return form;
  }
}

function pretty(args, live) {
  if (live) return args;
  try { return JSON.stringify(JSON.parse(args), null, 2); } catch { return args; }
}
