// The chat page: what is on screen, what a person does, and the answer that is being written.

import { addressOf, readAddress } from "./address.js";
import * as api from "./api.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { Meter } from "./meter.js";
import { openKeys, openSettings, applyTheme, startSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import * as tree from "./tree.js";
import { AnswerView, editView, rate, seconds, userView } from "./views.js";

const $ = (id) => document.getElementById(id);
const { settings } = store;
const ui = Object.fromEntries(["shell", "engine", "veil", "menu", "model", "state", "live", "meter", "meter-ring", "meter-text", "room", "room-text", "scroll", "log", "spoken", "empty", "missing", "down", "form", "prompt", "effort", "send", "toast", "toast-text", "undo"].map((id) => [id, $(id)]));

let current = null; // the conversation on screen
let running = null; // {conversation, message, abort, view} while an answer is written here
let model = null;
let follow = true; // keep the end in view
let stale = false; // another tab changed what is on screen while an answer was written here
const heard = new Map(); // message that another tab writes -> when it last grew
const notify = (sentence) => offerUndo(sentence, null);
const composer = new Composer(() => { drawBusy(); drawMeter(); }, notify);
const meter = new Meter(ui);
const sidebar = new Sidebar({
  current: () => current,
  discard: (which) => discard(which),
  notify,
  renamed: () => drawTitle(),
  show: (conversation, message) => { show(conversation, message); closeSide(); },
});

// ---- drawing ---------------------------------------------------------------------------------------------------

const ELSEWHERE = 4000; // ms without news after which nobody writes a message any more
const isElsewhere = (m) => Boolean(m.live) && running?.message !== m && Date.now() - (heard.get(m.id) ?? m.live) < ELSEWHERE;

function turnOf(message) {
  const all = tree.siblings(current, message);
  return { message, index: all.indexOf(message), total: all.length, last: message.id === current.leaf, live: running?.message === message, elsewhere: isElsewhere(message) };
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
  sidebar.draw();
  drawTitle();
  drawBusy();
  drawMeter();
  toEnd(true);
}

const drawTitle = () => { document.title = current?.title ? `${current.title} · halfbyte` : "halfbyte"; };
const drawMeter = () => { if (current) meter.draw(tree.path(current), composer.draft); };

function drawBusy() {
  ui.form.classList.toggle("busy", Boolean(running));
  ui.send.disabled = !running && composer.isEmpty;
  ui.send.setAttribute("aria-label", running ? "Stop" : "Send");
  ui.send.title = running ? "Stop (Esc)" : "Send (Enter)";
  if (!running) ui.live.textContent = "";
}

let frame = 0;
function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running) return;
    if (running.conversation === current) { running.view?.draw(); drawMeter(); toEnd(false); }
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
  if (!current || id !== current.id) { sidebar.draw(); return; }
  if (running?.conversation === current) { stale = true; return; }
  if (!conversation || conversation.deleted) fresh("replaceState");
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

/** Show a conversation, at its end or at `message`. `how` names the method of `history` that records its address. */
function show(conversation, message = null, how = "pushState") {
  current = conversation;
  if (message && !tree.path(current).includes(message)) {
    tree.touch(current, { leaf: tree.newestEnd(current, message) }, current.at);
    store.save(current);
  }
  ui.missing.hidden = true;
  recordAddress(how);
  draw();
  const place = message && ui.log.children[tree.path(current).indexOf(message)];
  if (place) {
    place.classList.add("hit");
    place.scrollIntoView({ block: "start" });
  } else if (matchMedia("(hover: hover)").matches) ui.prompt.focus();
}
function fresh(how = "pushState") {
  show(current && !tree.count(current) && !current.deleted ? current : store.start(), null, how);
  closeSide();
}

/** Put the address of the conversation on screen into the browser's history. */
function recordAddress(how) {
  const address = addressOf(current);
  if (location.hash !== address) history[how](null, "", address);
}

/** Show the conversation at an address: after back, forward, a reload or a link. */
function goTo(hash) {
  const { id, fresh: isNew } = readAddress(hash);
  const conversation = store.get(id);
  if (conversation && !conversation.deleted && tree.count(conversation)) return show(conversation, null, "replaceState");
  if (isNew) return fresh("replaceState");
  if (id === undefined) return undefined;
  if (!current || tree.count(current)) current = store.start(); // the address stays: a reload finds the conversation once it is here
  draw();
  ui.missing.hidden = false;
  if (conversation) offerUndo(`“${conversation.title || "This conversation"}” is deleted.`, () => { store.restore(conversation); show(conversation, null, "replaceState"); }, "Restore");
  return undefined;
}

let undone = null;
function discard(which) {
  if (running && which.includes(running.conversation)) stop();
  store.remove(...which);
  offerUndo(which.length === 1 ? `Deleted “${which[0].title || "conversation"}”.` : `Deleted ${which.length} conversations.`, () => {
    store.restore(...which);
    if (which.length === 1) show(which[0]); else sidebar.draw();
  });
  if (which.includes(current)) fresh(); else sidebar.draw();
}
function offerUndo(text, undo, label = "Undo") {
  clearTimeout(undone);
  ui["toast-text"].textContent = text;
  ui.undo.hidden = !undo;
  ui.undo.textContent = label;
  ui.undo.onclick = () => { ui.toast.hidden = true; undo(); };
  ui.toast.hidden = false;
  undone = setTimeout(() => { ui.toast.hidden = true; }, 12_000);
}

function say({ text, files = [] }, parent = current.leaf) {
  const message = tree.add(current, parent, { role: "user", text, ...(files.length ? { files } : {}) });
  if (!current.title) current.title = tree.titleOf(message);
  ui.missing.hidden = true;
  recordAddress("replaceState");
  return answer();
}

const actions = {
  draw,
  edit(message) {
    if (running) return;
    ui.log.children[tree.path(current).indexOf(message)].replaceWith(editView(message, actions));
  },
  /** The edited message stands beside the first one; what followed that stays with it. */
  sayInstead(message, text, files) {
    if (running) return;
    if (message.parent === null && !current.renamed) current.title = "";
    say({ text, files }, message.parent);
  },
  regenerate(message) {
    if (running) return;
    answer(message.parent);
  },
  /** The model goes on with an answer that was cut, in the same message. A character that was cut in half is dropped. */
  goOn(message) {
    if (running) return;
    const { stats = {} } = message;
    const complete = (text) => (text ?? "").replace(/\ufffd+$/, "");
    tree.change(message, {
      text: complete(message.text), reasoning: message.text ? message.reasoning : complete(message.reasoning), error: "", finish: "",
      stats: { start: performance.now(), earlier: (stats.earlier ?? 0) + (stats.tokens ?? 0), thought: stats.thought, used: stats.used, pondered: (stats.pondered ?? 0) + (message.text ? 0 : (stats.last ?? 0) - (stats.first ?? 0)) },
    });
    write(message, tree.path(current, message.id), message);
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

function answer(parent = current.leaf) {
  const history = tree.path(current, parent);
  return write(tree.add(current, parent, { role: "assistant", text: "", reasoning: "", calls: [], stats: { start: performance.now() } }), history);
}

/** Write an answer to `history` into `message`; `unfinished` is that message if it has a beginning already. */
async function write(message, history, unfinished = null) {
  const conversation = current;
  message.live = Date.now();
  conversation.model = model?.id ?? conversation.model;
  running = { conversation, message, abort: new AbortController(), view: null };
  const { signal } = running.abort;
  draw();
  store.save(conversation);
  ui.spoken.textContent = "The model answers.";
  try {
    for await (const chunk of api.chat(conversation.model, history, settings.effort, signal, unfinished)) take(message, chunk);
  } catch (e) {
    if (signal.aborted) message.finish = "stopped";
    else message.error = e instanceof api.Refusal ? e.message : `The server cannot be reached (${e.message}).`;
    if (!signal.aborted && !(e instanceof api.Refusal)) connection.look();
    if (e.status === 401) openSettings(api.keyProblem());
  }
  settle(message);
  const { view } = running;
  running = null;
  tree.touch(conversation);
  store.save(conversation);
  if (conversation === current && stale) drawInPlace();
  else if (conversation === current) {
    if (view?.root.isConnected) view.root.replaceWith(new AnswerView(turnOf(message), actions).root);
    drawMeter();
    toEnd(false);
  }
  stale = false;
  ui.spoken.textContent = message.error ? "" : tree.isCut(message) ? "The answer was cut off." : "The answer is complete.";
  sidebar.draw();
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
    stats.used = chunk.usage.total_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  if (!choice) return;
  const { delta } = choice;
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    if (!stats.first) { stats.first = now; stats.atFirst = stats.tokens || 1; }
    stats.last = now;
  }
  if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
  if (delta.content || delta.tool_calls) stats.thought ??= message.reasoning ? now - stats.first + (stats.pondered ?? 0) : 0;
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
    meter.limit = model.max_model_len;
    drawMeter();
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

/** Show the list if it is hidden, and look for a conversation in it. */
function openSearch() {
  if (narrow.matches ? !ui.shell.classList.contains("open") : !settings.side) toggleSide();
  $("search").focus();
  $("search").select();
}

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
  if (!composer.isEmpty) say(composer.take());
});
for (const starter of document.querySelectorAll(".starters button")) starter.addEventListener("click", () => { if (!running) say({ text: starter.textContent }); });
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && running && !document.querySelector("dialog[open]")) { e.preventDefault(); stop(); }
  if (!(e.ctrlKey || e.metaKey)) return;
  if (e.shiftKey && e.key.toLowerCase() === "o") { e.preventDefault(); fresh(); }
  if (!e.shiftKey && e.key.toLowerCase() === "k") { e.preventDefault(); openSearch(); }
  if (e.key === ",") { e.preventDefault(); openSettings(); }
  if (e.key === "/") { e.preventDefault(); openKeys(); }
});
let [lastTop, lastHeight] = [0, 0];
ui.scroll.addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = ui.scroll;
  if (scrollHeight - scrollTop - clientHeight < 60) follow = true;
  else if (scrollTop < lastTop && scrollHeight >= lastHeight) follow = false; // a person scrolled up: nothing got shorter
  [lastTop, lastHeight] = [scrollTop, scrollHeight];
  ui.down.hidden = follow || !tree.count(current);
}, { passive: true });
ui.down.addEventListener("click", () => toEnd(true));
ui.effort.addEventListener("change", (e) => { settings.effort = e.target.value; store.saveSettings(); });
$("settings").addEventListener("click", () => openSettings());
$("new").addEventListener("click", () => fresh());
$("room-new").addEventListener("click", () => fresh());
document.querySelector(".skip").addEventListener("click", (e) => { e.preventDefault(); ui.prompt.focus(); });
addEventListener("popstate", () => { if (addressOf(current) !== location.hash) goTo(location.hash); });
ui.menu.addEventListener("click", toggleSide);
ui.veil.addEventListener("click", closeSide);
addEventListener("pagehide", () => {
  store.rescueWrites();
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
startSettings({ hello, discard, changed: () => { if (running?.conversation !== current) drawInPlace(); else sidebar.draw(); }, wipe: () => discard(store.conversations()) });
ui.shell.classList.toggle("closed", !settings.side);
for (const radio of ui.effort.querySelectorAll("input")) radio.checked = radio.value === settings.effort;
await store.open(changedElsewhere, notify);
const newest = store.conversations()[0];
goTo(location.hash);
if (!current && newest) show(newest, null, "replaceState");
if (!current) fresh("replaceState");
composer.draw();
hello();
