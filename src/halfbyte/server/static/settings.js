// The sheet of settings, the list of keys, and the theme.

import { Unreadable } from "./attachments.js";
import { download, el } from "./dom.js";
import * as store from "./store.js";
import { fileName, fromJson, MOST_IMPORT_BYTES, toJson } from "./transfer.js";

const $ = (id) => document.getElementById(id);
const { settings } = store;
const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "The weather at a place now", parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] } } }];
const FIELDS = { "s-system": "system", "s-temperature": "temperature", "s-max": "max", "s-tools": "tools", "s-key": "key" };
const sheet = $("sheet");
const systemDark = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  const dark = settings.theme === "dark" || (settings.theme === "system" && systemDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").title = `Theme: ${settings.theme === "system" ? "the system's" : settings.theme}`;
}

export const openKeys = () => $("keys").showModal();

/** `problem`: what is wrong with the key, if that is why the sheet opens. */
export function openSettings(problem = "") {
  for (const [id, name] of Object.entries(FIELDS)) $(id).value = settings[name];
  report(problem);
  $("s-export").disabled = !store.conversations().length;
  drawBin();
  $("s-bin").open = false;
  if (!sheet.open) sheet.showModal();
  if (problem) $("s-key").focus();
}

let actions = null;

function drawBin() {
  const gone = store.deleted();
  $("s-bin").hidden = !gone.length;
  $("s-bin-list").replaceChildren(...gone.map((c) => {
    const back = el("button", { type: "button", className: "link", textContent: "Restore", onclick: () => { store.restore(c); drawBin(); actions.changed(); } });
    const purge = el("button", { type: "button", className: "link danger", textContent: "Delete for good", onclick: async () => { await store.purge(c.id); drawBin(); } });
    return el("li", {}, el("span", { className: "grow", textContent: c.title || "Conversation" }), back, purge);
  }));
}

/** Say in the sheet what is wrong, or what is done. */
function report(problem, result = "") {
  for (const [id, text] of [["s-bad", problem], ["s-done", result]]) {
    $(id).textContent = text;
    $(id).hidden = !text;
  }
}

async function importFile(file) {
  try {
    if (file.size > MOST_IMPORT_BYTES) throw new Unreadable("This file is larger than any export: choose a .json file that was saved with “Export”.");
    const { added, changed, same } = await store.take(fromJson(await file.text()));
    const parts = [[added, "new"], [changed, "with news"], [same, "already here"]].filter(([n]) => n).map(([n, words]) => `${n} ${words}`);
    report("", `Imported: ${parts.join(", ")}.`);
    actions.changed();
    drawBin();
    $("s-export").disabled = false;
  } catch (e) {
    report(e instanceof Unreadable ? e.message : `${store.problemOf(e)} Nothing was imported.`);
  }
}

/** `given`: {hello, discard, changed, wipe}, what chat.js does. */
export function startSettings(given) {
  actions = given;
  $("sheet-form").addEventListener("submit", (e) => {
    if (e.submitter?.value !== "save") return;
    const tools = $("s-tools").value.trim();
    try {
      if (tools && !Array.isArray(JSON.parse(tools))) throw new Error("give a list");
    } catch (error) {
      e.preventDefault();
      report(`The tools are not a JSON list (${error.message}).`);
      return;
    }
    for (const [id, name] of Object.entries(FIELDS)) settings[name] = $(id).value;
    store.saveSettings();
    actions.hello();
  });
  $("s-example").addEventListener("click", () => { $("s-tools").value = JSON.stringify(EXAMPLE, null, 2); });
  $("s-export").addEventListener("click", () => download(fileName("halfbyte conversations", "json"), "application/json", toJson(store.conversations())));
  $("s-import").addEventListener("click", () => $("s-file").click());
  $("s-file").addEventListener("change", async () => {
    const [file] = $("s-file").files;
    if (file) await importFile(file);
    $("s-file").value = "";
  });
  $("s-wipe").addEventListener("click", () => { sheet.close(); actions.wipe(); });
  $("theme").addEventListener("click", () => {
    const order = ["system", "light", "dark"];
    settings.theme = order[(order.indexOf(settings.theme) + 1) % 3];
    store.saveSettings();
    applyTheme();
  });
  systemDark.addEventListener("change", applyTheme);
}
