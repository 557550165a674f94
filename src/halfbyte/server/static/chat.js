// The chat page: what is on screen, what a person does, and the answer that is being written.

import * as api from "./api.js";
import { Connection } from "./connection.js";
import { button, el } from "./dom.js";
import { openKeys, openSettings, applyTheme, startSettings } from "./settings.js";
import * as store from "./store.js";
import * as tree from "./tree.js";
import { AnswerView, editView, rate, seconds, userView } from "./views.js";

const $ = (id) => document.getElementById(id);
const { settings } = store;
const ui = Object.fromEntries(["shell", "list", "engine", "veil", "menu", "model", "state", "live", "scroll", "log", "empty", "down", "form", "prompt", "effort", "send", "toast", "toast-text", "undo"].map((id) => [id, $(id)]));

let current = null; // the conversation on screen
let running = null; // {conversation, message, abort, view} while an answer is written here
let model = null;
let follow = true; // keep the end in view
let stale = false; // another tab changed what is on screen while an answer was written here
const heard = new Map(); // message that another tab writes -> when it last grew

// ---- drawing ---------------------------------------------------------------------------------------------------

const ELSEWHERE = 4000; // ms without news after which nobody writes a message any more
const isElsewhere = (m) => Boolean(m.live) && running?.message !== m && Date.now() - (heard.get(m.id) ?? m.live) < ELSEWHERE;

function turnOf(message) {
  const all = tree.siblings(current, message);
  return { message, index: all.indexOf(message), total: all.length, live: running?.message === message, elsewhere: isElsewhere(message) };
}

function draw() {
  const messages = tree.path(current);
  ui.empty.hidden = Boolean(messages.length);
  ui.log.replaceChildren(...messages.map((m) => {
    const turn = turnOf(m);
    if (m.role === "user") return userView(turn, actions);
    const view = new AnswerView(turn, actions);
    if (turn.live) running.view = view;
    if (turn.elsewhere) setTimeout(() => { if (tree.path(current).includes(m) && !isElsewhere(m)) draw(); }, ELSEWHERE + 100);
    return view.root;
  }));
  drawList();
  drawBusy();
  toEnd(true);
}

function drawList() {
  const today = new Date().toDateString();
  const groups = new Map();
  for (const c of store.conversations()) {
    const day = new Date(c.at).toDateString() === today ? "Today" : Date.now() - c.at < 7 * 864e5 ? "This week" : "Earlier";
    groups.set(day, [...(groups.get(day) ?? []), c]);
  }
  ui.list.replaceChildren(...[...groups].flatMap(([day, items]) => [el("h2", { textContent: day }), ...items.map((c) => {
    const open = el("button", { type: "button", textContent: c.title || "New conversation", onclick: () => { show(c); closeSide(); } });
    const remove = button("x", `Delete ${c.title || "conversation"}`, () => discard([c]));
    remove.className = "remove";
    const item = el("div", { className: "item" }, open, remove);
    if (c === current) item.setAttribute("aria-current", "true");
    return item;
  })]));
}

function drawBusy() {
  ui.form.classList.toggle("busy", Boolean(running));
  ui.send.disabled = !running && !ui.prompt.value.trim();
  ui.send.setAttribute("aria-label", running ? "Stop" : "Send");
  ui.send.title = running ? "Stop (Esc)" : "Send (Enter)";
  if (!running) ui.live.textContent = "";
}

let frame = 0;
function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running) return;
    if (running.conversation === current) { running.view?.draw(); toEnd(false); }
    const s = running.message.stats;
    ui.live.textContent = s.first ? [`TTFT ${seconds((s.first - s.start) / 1000)}`, rate(s)].filter(Boolean).join(" · ") : "";
  });
}

function toEnd(force) {
  if (force) follow = true;
  if (follow) ui.scroll.scrollTop = ui.scroll.scrollHeight;
  ui.down.hidden = follow || !tree.count(current);
}

/** Another tab changed a conversation, or it is gone for good. */
function changedElsewhere(id) {
  const conversation = store.get(id);
  for (const m of Object.values(conversation?.nodes ?? {})) if (m.live && running?.message !== m) heard.set(m.id, Date.now());
  if (!current || id !== current.id) { drawList(); return; }
  if (running?.conversation === current) { stale = true; return; }
  if (!conversation || conversation.deleted) fresh();
  else if (!ui.log.querySelector("form.turn")) drawInPlace(); // else somebody edits a message here
}

/** Draw again without moving what a person reads. */
function drawInPlace() {
  const at = ui.scroll.scrollTop;
  const following = follow;
  draw();
  if (!following) { follow = false; ui.scroll.scrollTop = at; }
}

// ---- what a person does ------------------------------------------------------------------------------------------

function show(conversation) {
  current = conversation;
  draw();
  if (matchMedia("(hover: hover)").matches) ui.prompt.focus();
}
function fresh() {
  show(current && !tree.count(current) && !current.deleted ? current : store.start());
  closeSide();
}

let undone = null;
function discard(which) {
  if (running && which.includes(running.conversation)) stop();
  store.remove(...which);
  offerUndo(which.length === 1 ? `Deleted “${which[0].title || "conversation"}”.` : `Deleted ${which.length} conversations.`, () => {
    store.restore(...which);
    if (which.length === 1) show(which[0]); else drawList();
  });
  if (which.includes(current)) fresh(); else drawList();
}
function offerUndo(text, undo) {
  clearTimeout(undone);
  ui["toast-text"].textContent = text;
  ui.undo.hidden = !undo;
  ui.undo.onclick = () => { ui.toast.hidden = true; undo(); };
  ui.toast.hidden = false;
  undone = setTimeout(() => { ui.toast.hidden = true; }, 12_000);
}

function say(text, parent = current.leaf) {
  if (!current.title) current.title = text.trim().split("\n")[0].slice(0, 60);
  tree.add(current, parent, { role: "user", text });
  return answer();
}

const actions = {
  draw,
  edit(message) {
    if (running) return;
    ui.log.children[tree.path(current).indexOf(message)].replaceWith(editView(message, actions));
  },
  /** The edited message stands beside the first one; what followed that stays with it. */
  sayInstead(message, text) {
    if (running) return;
    if (message.parent === null) current.title = "";
    say(text, message.parent);
  },
  regenerate(message) {
    if (running) return;
    answer(message.parent);
  },
  turnTo(message, step) {
    const all = tree.siblings(current, message);
    const other = all[all.indexOf(message) + step];
    if (!other) return;
    tree.touch(current, { leaf: tree.newestEnd(current, other) }, current.at);
    store.save(current);
    draw();
  },
  giveResult(message, call, text) {
    if (running) return;
    tree.change(message, {});
    call.result = text;
    store.save(current);
    draw();
    if (message.calls.every((c) => c.result !== undefined)) answer(message.id);
  },
};

async function answer(parent = current.leaf) {
  const conversation = current;
  const history = tree.path(conversation, parent);
  const message = tree.add(conversation, parent, { role: "assistant", text: "", reasoning: "", calls: [], stats: { start: performance.now() }, live: Date.now() });
  conversation.model = model?.id ?? conversation.model;
  running = { conversation, message, abort: new AbortController(), view: null };
  const { signal } = running.abort;
  draw();
  store.save(conversation);
  try {
    for await (const chunk of api.chat(conversation.model, history, settings.effort, signal)) take(message, chunk);
  } catch (e) {
    if (signal.aborted) message.finish = "stopped";
    else message.error = e instanceof api.Refusal ? e.message : `The server cannot be reached (${e.message}).`;
    if (!signal.aborted && !(e instanceof api.Refusal)) connection.look();
    if (e.status === 401) openSettings(api.keyProblem());
  }
  settle(message);
  running = null;
  tree.touch(conversation);
  store.save(conversation);
  if (conversation === current && stale) drawInPlace();
  else if (conversation === current) {
    const last = ui.log.lastElementChild;
    last?.replaceWith(new AnswerView(turnOf(message), actions).root);
    toEnd(false);
  }
  stale = false;
  drawList();
  drawBusy();
}

/** Instants mean nothing after a reload; only their differences are kept. */
function settle(message) {
  const { stats } = message;
  for (const key of ["first", "last"]) if (stats[key]) stats[key] -= stats.start;
  stats.start = 0;
  tree.change(message, { live: 0 });
}

function take(message, chunk) {
  const now = performance.now();
  const { stats } = message;
  const choice = chunk.choices[0];
  if (chunk.usage) {
    stats.tokens = chunk.usage.completion_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  if (!choice) return;
  const { delta } = choice;
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    if (!stats.first) { stats.first = now; stats.atFirst = stats.tokens || 1; }
    stats.last = now;
  }
  if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
  if (delta.content || delta.tool_calls) stats.thought ??= message.reasoning ? now - stats.first : 0;
  if (delta.content) message.text += delta.content;
  for (const call of delta.tool_calls ?? []) {
    message.calls[call.index] ??= { id: call.id, name: call.function.name, args: "" };
    message.calls[call.index].args += call.function.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  tree.change(message, { live: Date.now() });
  store.saveSoon(running.conversation);
  drawSoon();
}

const stop = () => running?.abort.abort();

// ---- the server ----------------------------------------------------------------------------------------------------

const connection = new Connection(({ state, text, before }) => {
  ui.state.hidden = state === "ready";
  ui.state.className = `state ${state}`;
  ui.state.textContent = state === "gone" ? "server gone" : "not ready";
  ui.state.title = text;
  if (state !== "ready") ui.engine.textContent = text;
  if (state === "ready" && before !== "ready") hello();
});

async function hello() {
  try {
    model = await api.about();
    ui.model.textContent = model.id;
    ui.engine.textContent = `Context of ${model.max_model_len.toLocaleString("en")} tokens. Conversations are kept in this browser only.`;
  } catch (e) {
    ui.model.textContent = model?.id ?? "not connected";
    ui.engine.textContent = e instanceof api.Refusal ? e.message : "The server cannot be reached.";
    if (e.status === 401) openSettings(api.keyProblem());
    else if (!(e instanceof api.Refusal)) connection.look();
  }
}

// ---- events --------------------------------------------------------------------------------------------------------

const narrow = matchMedia("(max-width: 46rem)");
function closeSide() {
  if (!narrow.matches) return;
  ui.shell.classList.remove("open");
  ui.veil.hidden = true;
  ui.menu.setAttribute("aria-expanded", "false");
}
function toggleSide() {
  if (narrow.matches) {
    const open = ui.shell.classList.toggle("open");
    ui.veil.hidden = !open;
    ui.menu.setAttribute("aria-expanded", String(open));
  } else {
    settings.side = !settings.side;
    store.saveSettings();
    ui.shell.classList.toggle("closed", !settings.side);
    ui.menu.setAttribute("aria-expanded", String(settings.side));
  }
}

function grow() {
  ui.prompt.style.height = "auto";
  ui.prompt.style.height = `${ui.prompt.scrollHeight}px`;
  drawBusy();
}
ui.prompt.addEventListener("input", grow);
ui.prompt.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); if (!running) ui.form.requestSubmit(); }
  if (e.key === "ArrowUp" && !ui.prompt.value && !running) {
    const last = tree.path(current).findLast((m) => m.role === "user");
    if (last) { e.preventDefault(); actions.edit(last); }
  }
});
ui.form.addEventListener("submit", (e) => {
  e.preventDefault();
  if (running) { stop(); return; }
  const text = ui.prompt.value;
  if (!text.trim()) return;
  ui.prompt.value = "";
  grow();
  say(text);
});
for (const starter of document.querySelectorAll(".starters button")) starter.addEventListener("click", () => { if (!running) say(starter.textContent); });
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && running && !document.querySelector("dialog[open]")) { e.preventDefault(); stop(); }
  if (!(e.ctrlKey || e.metaKey)) return;
  if (e.shiftKey && e.key.toLowerCase() === "o") { e.preventDefault(); fresh(); }
  if (e.key === ",") { e.preventDefault(); openSettings(); }
  if (e.key === "/") { e.preventDefault(); openKeys(); }
});
ui.scroll.addEventListener("scroll", () => {
  follow = ui.scroll.scrollHeight - ui.scroll.scrollTop - ui.scroll.clientHeight < 60;
  ui.down.hidden = follow || !tree.count(current);
}, { passive: true });
ui.down.addEventListener("click", () => toEnd(true));
ui.effort.addEventListener("change", (e) => { settings.effort = e.target.value; store.saveSettings(); });
$("settings").addEventListener("click", () => openSettings());
$("new").addEventListener("click", fresh);
ui.menu.addEventListener("click", toggleSide);
ui.veil.addEventListener("click", closeSide);
addEventListener("pagehide", () => {
  if (!running) return;
  const { conversation, message } = running;
  const half = structuredClone(message);
  half.finish = "interrupted";
  settle(half);
  store.rescue(conversation, half);
});
document.addEventListener("visibilitychange", async () => {
  if (document.hidden || running || !current) return;
  await store.refresh();
  changedElsewhere(current.id);
});

applyTheme();
startSettings({ hello, discard, restored: () => drawList(), wipe: () => discard(store.conversations()) });
ui.shell.classList.toggle("closed", !settings.side);
for (const radio of ui.effort.querySelectorAll("input")) radio.checked = radio.value === settings.effort;
await store.open(changedElsewhere, (problem) => offerUndo(problem, null));
const newest = store.conversations()[0];
if (newest) show(newest); else fresh();
grow();
hello();
