// The chat page: state, drawing and keys. Model text goes through markdown.js or textContent, never through innerHTML.

import * as api from "./api.js";
import { copyText, el, render } from "./markdown.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const { settings } = store;
const ui = Object.fromEntries(["shell", "side", "list", "engine", "veil", "menu", "model", "live", "theme", "scroll", "log", "empty", "down", "form", "prompt", "effort", "send", "sheet", "keys"].map((id) => [id, $(id)]));

let current = null; // the conversation on screen
let running = null; // {conversation, message, abort, view} while an answer streams
let model = null;
let follow = true; // keep the end in view

// ---- icons: static shapes of this page, drawn with DOM calls like everything else ---------------------------------

const NS = "http://www.w3.org/2000/svg";
const SHAPES = {
  copy: ["M9 9h10v10H9z", "M15 9V5H5v10h4"], again: ["M20 12a8 8 0 1 1-2.3-5.6", "M20 4v4h-4"], pen: ["M5 19l1-4L16 5l3 3L9 18z"],
  x: ["M7 7l10 10M17 7L7 17"], chev: ["M9 6l6 6-6 6"],
};
function icon(name, className = "") {
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  if (className) svg.setAttribute("class", className);
  for (const d of SHAPES[name]) { const p = document.createElementNS(NS, "path"); p.setAttribute("d", d); svg.append(p); }
  return svg;
}
const button = (name, label, onclick) => { const b = el("button", { type: "button", title: label, onclick }, icon(name)); b.setAttribute("aria-label", label); return b; };

// ---- drawing ---------------------------------------------------------------------------------------------------

function seconds(s) { return s < 1 ? `${Math.round(s * 1000)} ms` : s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`; }
function rate(stats) {
  if (!stats?.tokens || !stats.last || stats.last <= stats.first) return "";
  return `${((stats.tokens - (stats.atFirst ?? 1)) / (stats.last - stats.first) * 1000).toFixed(1)} tok/s`;
}
function statLine(m) {
  const s = m.stats;
  if (!s?.first) return "";
  return [rate(s), `TTFT ${seconds((s.first - s.start) / 1000)}`, s.tokens ? `${s.tokens} tokens` : "", s.cached ? `${s.cached} cached` : ""].filter(Boolean).join(" · ");
}

class AnswerView {
  constructor(message, index) {
    this.message = message;
    this.thoughtLabel = el("span", { className: "label" });
    this.thoughtBody = el("div", { className: "body" });
    this.thought = el("details", { className: "thought", hidden: true }, el("summary", {}, icon("chev", "chev"), this.thoughtLabel), this.thoughtBody);
    this.md = el("div", { className: "md" });
    this.calls = el("div");
    this.note = el("div", { hidden: true });
    this.stat = el("span", { className: "stat" });
    this.acts = el("div", { className: "acts" },
      button("copy", "Copy", () => copyText(message.text)),
      button("again", "Regenerate", () => regenerate(index)),
      this.stat);
    this.wait = el("span", { className: "wait" });
    this.wait.setAttribute("aria-label", "Waiting for the first token");
    this.root = el("article", { className: "turn assistant" }, this.thought, this.md, this.calls, this.wait, this.note, this.acts);
    this.shownCalls = [];
    this.draw();
  }

  draw() {
    const m = this.message;
    const live = running?.message === m;
    this.thought.hidden = !m.reasoning;
    if (m.reasoning) {
      const thinking = live && !m.text && !(m.calls ?? []).length;
      this.thought.classList.toggle("thinking", thinking);
      this.thoughtLabel.textContent = thinking ? "Thinking" : m.stats?.thought ? `Thought for ${seconds(m.stats.thought / 1000)}` : "Reasoning";
      if (this.thoughtBody.textContent !== m.reasoning) {
        // Appending keeps the reader's place in a long thought.
        if (m.reasoning.startsWith(this.thoughtBody.textContent)) this.thoughtBody.append(m.reasoning.slice(this.thoughtBody.textContent.length));
        else this.thoughtBody.textContent = m.reasoning;
      }
    }
    render(this.md, m.text ?? "");
    this.drawCalls(live);
    this.wait.hidden = !live || Boolean(m.reasoning || m.text || (m.calls ?? []).length);
    this.acts.hidden = live;
    this.stat.textContent = live ? "" : statLine(m);
    const note = m.error ?? (m.finish === "length" ? "The answer reached its longest length." : m.finish === "stopped" ? "Stopped." : "");
    this.note.hidden = !note;
    this.note.className = m.error ? "note" : "note mild";
    this.note.textContent = note;
    if (m.error) this.note.setAttribute("role", "alert");
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
    form.addEventListener("submit", (e) => {
      e.preventDefault();
      if (running) return;
      call.result = area.value;
      store.save();
      this.draw();
      if (this.message.calls.every((c) => c.result !== undefined)) answer();
    });
    return form;
  }
}

function pretty(args, live) {
  if (live) return args;
  try { return JSON.stringify(JSON.parse(args), null, 2); } catch { return args; }
}

function userView(message, index) {
  const bubble = el("div", { className: "bubble", textContent: message.text });
  const acts = el("div", { className: "acts" }, button("copy", "Copy", () => copyText(message.text)), button("pen", "Edit", () => edit(index)));
  return el("article", { className: "turn user" }, bubble, acts);
}

function draw() {
  ui.empty.hidden = Boolean(current.messages.length);
  ui.log.replaceChildren(...current.messages.map((m, i) => {
    if (m.role === "user") return userView(m, i);
    const view = new AnswerView(m, i);
    if (running?.message === m) running.view = view;
    return view.root;
  }));
  drawList();
  drawBusy();
  toEnd(true);
}

function drawList() {
  const today = new Date().toDateString();
  const groups = new Map();
  for (const c of store.conversations.filter((c) => c.messages.length || c === current)) {
    const day = new Date(c.at).toDateString() === today ? "Today" : Date.now() - c.at < 7 * 864e5 ? "This week" : "Earlier";
    groups.set(day, [...(groups.get(day) ?? []), c]);
  }
  ui.list.replaceChildren(...[...groups].flatMap(([day, items]) => [el("h2", { textContent: day }), ...items.map((c) => {
    const open = el("button", { type: "button", textContent: c.title || "New conversation", onclick: () => { show(c); closeSide(); } });
    const remove = button("x", `Delete ${c.title || "conversation"}`, () => discard(c));
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
  ui.down.hidden = follow || !current.messages.length;
}

// ---- what a person does ------------------------------------------------------------------------------------------

function show(conversation) {
  current = conversation;
  draw();
  if (matchMedia("(hover: hover)").matches) ui.prompt.focus();
}
function fresh() {
  show(store.conversations.find((c) => !c.messages.length) ?? store.create());
  closeSide();
}
function discard(conversation) {
  if (running?.conversation === conversation) stop();
  store.remove(conversation.id);
  if (conversation === current) fresh(); else drawList();
}

function say(text) {
  current.messages.push({ role: "user", text });
  current.title ||= text.trim().split("\n")[0].slice(0, 60);
  return answer();
}
function regenerate(index) {
  if (running) return;
  current.messages.length = index;
  // Results of tool calls belong to the answer before; regenerate from there if that is all that is left.
  answer();
}
function edit(index) {
  if (running) return;
  const area = el("textarea", { className: "edit", value: current.messages[index].text });
  const done = el("button", { type: "submit", className: "solid", textContent: "Send" });
  const cancel = el("button", { type: "button", className: "plain", textContent: "Cancel", onclick: () => draw() });
  const form = el("form", { className: "turn" }, area, el("div", { className: "row" }, el("span", { className: "grow" }), cancel, done));
  form.addEventListener("submit", (e) => {
    e.preventDefault();
    if (!area.value.trim()) return;
    if (index === 0) current.title = "";
    current.messages.length = index;
    say(area.value);
  });
  area.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { e.stopPropagation(); draw(); }
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); form.requestSubmit(); }
  });
  ui.log.children[index].replaceWith(form);
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

async function answer() {
  const conversation = current;
  const message = { role: "assistant", text: "", reasoning: "", calls: [], stats: { start: performance.now() } };
  conversation.messages.push(message);
  conversation.at = Date.now();
  conversation.model = model?.id ?? conversation.model;
  running = { conversation, message, abort: new AbortController(), view: null };
  const { signal } = running.abort;
  draw();
  store.save();
  try {
    const history = { ...conversation, messages: conversation.messages.slice(0, -1) };
    for await (const chunk of api.chat(history, settings.effort, signal)) take(message, chunk);
  } catch (e) {
    if (signal.aborted) message.finish = "stopped";
    else message.error = e instanceof api.Refusal ? e.message : `The server cannot be reached (${e.message}).`;
    if (e.status === 401) openSettings("This server asks for an API key.");
  }
  const stats = message.stats; // instants mean nothing after a reload; only their differences are kept
  for (const key of ["first", "last"]) if (stats[key]) stats[key] -= stats.start;
  stats.start = 0;
  running = null;
  conversation.at = Date.now();
  store.save();
  if (conversation === current) {
    const last = ui.log.lastElementChild;
    last?.replaceWith(new AnswerView(message, conversation.messages.length - 1).root);
    toEnd(false);
  }
  drawList();
  drawBusy();
  document.title = "halfbyte";
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
  const visible = delta.content || delta.reasoning_content || delta.tool_calls;
  if (visible) {
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
  drawSoon();
}

const stop = () => running?.abort.abort();

// ---- settings, theme, side ---------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const dark = settings.theme === "dark" || (settings.theme === "system" && systemDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  ui.theme.title = `Theme: ${settings.theme === "system" ? "the system's" : settings.theme}`;
}
const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "The weather at a place now", parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] } } }];
const FIELDS = { "s-system": "system", "s-temperature": "temperature", "s-max": "max", "s-tools": "tools", "s-key": "key" };

function openSettings(problem = "") {
  for (const [id, name] of Object.entries(FIELDS)) $(id).value = settings[name];
  $("s-bad").textContent = problem;
  $("s-bad").hidden = !problem;
  if (!ui.sheet.open) ui.sheet.showModal();
  if (problem) $("s-key").focus();
}
$("sheet-form").addEventListener("submit", (e) => {
  if (e.submitter?.value !== "save") return;
  const tools = $("s-tools").value.trim();
  try {
    if (tools && !Array.isArray(JSON.parse(tools))) throw new Error("give a list");
  } catch (error) {
    e.preventDefault();
    $("s-bad").textContent = `The tools are not a JSON list (${error.message}).`;
    $("s-bad").hidden = false;
    return;
  }
  for (const [id, name] of Object.entries(FIELDS)) settings[name] = $(id).value;
  store.saveSettings();
  hello();
});
$("s-example").addEventListener("click", () => { $("s-tools").value = JSON.stringify(EXAMPLE, null, 2); });
$("s-wipe").addEventListener("click", () => { if (confirm("Delete every conversation kept in this browser?")) { stop(); store.wipe(); ui.sheet.close(); fresh(); } });

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

async function hello() {
  try {
    model = await api.about();
    ui.model.textContent = model.id;
    ui.engine.textContent = `Context of ${model.max_model_len.toLocaleString("en")} tokens. Conversations are kept in this browser only.`;
  } catch (e) {
    ui.model.textContent = "not connected";
    ui.engine.textContent = e instanceof api.Refusal ? e.message : "The server cannot be reached.";
    if (e.status === 401) openSettings("This server asks for an API key.");
  }
}

// ---- events --------------------------------------------------------------------------------------------------------

function grow() {
  ui.prompt.style.height = "auto";
  ui.prompt.style.height = `${ui.prompt.scrollHeight}px`;
  drawBusy();
}
ui.prompt.addEventListener("input", grow);
ui.prompt.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); if (!running) ui.form.requestSubmit(); }
  if (e.key === "ArrowUp" && !ui.prompt.value && !running) {
    const last = current.messages.findLastIndex((m) => m.role === "user");
    if (last >= 0) { e.preventDefault(); edit(last); }
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
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && running && !document.querySelector("dialog[open]")) { e.preventDefault(); stop(); }
  if (!(e.ctrlKey || e.metaKey)) return;
  if (e.shiftKey && e.key.toLowerCase() === "o") { e.preventDefault(); fresh(); }
  if (e.key === ",") { e.preventDefault(); openSettings(); }
  if (e.key === "/") { e.preventDefault(); ui.keys.showModal(); }
});
ui.scroll.addEventListener("scroll", () => {
  follow = ui.scroll.scrollHeight - ui.scroll.scrollTop - ui.scroll.clientHeight < 60;
  ui.down.hidden = follow || !current.messages.length;
}, { passive: true });
ui.down.addEventListener("click", () => toEnd(true));
ui.effort.addEventListener("change", (e) => { settings.effort = e.target.value; store.saveSettings(); });
ui.theme.addEventListener("click", () => {
  const order = ["system", "light", "dark"];
  settings.theme = order[(order.indexOf(settings.theme) + 1) % 3];
  store.saveSettings();
  applyTheme();
});
systemDark.addEventListener("change", applyTheme);
$("settings").addEventListener("click", () => openSettings());
$("new").addEventListener("click", fresh);
ui.menu.addEventListener("click", toggleSide);
ui.veil.addEventListener("click", closeSide);
addEventListener("pagehide", () => store.save());

applyTheme();
ui.shell.classList.toggle("closed", !settings.side);
for (const radio of ui.effort.querySelectorAll("input")) radio.checked = radio.value === settings.effort;
if (store.conversations.length) show(store.conversations[0]); else fresh();
grow();
hello();
