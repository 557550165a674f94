// The message box: text, attachments, and the ways in which files arrive (a dialog, a drop, a paste).

import { isLongPaste, lineCount, messageParts, readText, refusal, Unreadable } from "./attachments.js";
import { button, el } from "./dom.js";
import { chip } from "./views.js";

const $ = (id) => document.getElementById(id);
const hasFiles = (transfer) => [...(transfer?.types ?? [])].includes("Files");

export class Composer {
  /** `changed()` is called after every change, `notify(sentence)` for what was refused. */
  constructor(changed, notify) {
    this.changed = changed;
    this.notify = notify;
    this.files = [];
    this.draft = []; // what would be sent, as the parts that the model reads
    this.prompt = $("prompt");
    this.prompt.addEventListener("input", () => this.grow());
    this.prompt.addEventListener("paste", (e) => this.paste(e));
    $("attach").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", async () => {
      await this.add([...$("file").files]);
      $("file").value = ""; // so that the same file can be chosen again
      this.prompt.focus();
    });
    this.watchDrops();
  }

  get isEmpty() { return !this.prompt.value.trim() && !this.files.length; }

  /** Return the message in the box and empty the box. */
  take() {
    const message = { text: this.prompt.value, files: this.files };
    this.prompt.value = "";
    this.files = [];
    this.draw();
    return message;
  }

  grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
    this.draft = messageParts({ text: this.prompt.value, files: this.files });
    this.changed();
  }

  draw() {
    $("chips").hidden = !this.files.length;
    $("chips").replaceChildren(...this.files.map((f) => el("li", {}, chip(f,
      f.pasted ? button("into", `Put ${f.name} into the message`, () => { this.remove(f); this.insert(f.text); }) : null,
      button("x", `Remove ${f.name}`, () => this.remove(f))))));
    this.grow();
  }

  remove(file) {
    this.files = this.files.filter((f) => f !== file);
    this.draw();
    this.prompt.focus();
  }

  insert(text) {
    const { prompt } = this;
    prompt.focus();
    prompt.setRangeText(text, prompt.selectionStart, prompt.selectionEnd, "end");
    this.grow();
  }

  /** Attach the text files among `files`; report the first refusal and the number of further ones. */
  async add(files) {
    const problems = [];
    for (const file of files) {
      try {
        const problem = refusal(this.files, file.name, file.size);
        if (problem) throw new Unreadable(problem);
        const text = readText(file.name, new Uint8Array(await file.arrayBuffer()));
        if (!this.files.some((f) => f.name === file.name && f.text === text)) this.files.push({ name: file.name, text });
      } catch (e) {
        problems.push(e instanceof Unreadable ? e.message : `“${file.name}” cannot be read: it may be a folder, or gone.`);
      }
    }
    this.draw();
    if (problems.length) this.notify(problems.length === 1 ? problems[0] : `${problems[0]} (${problems.length - 1} more left out.)`);
  }

  paste(e) {
    const transfer = e.clipboardData;
    const text = transfer?.getData("text/plain") ?? "";
    if (!text && transfer?.files.length) {
      e.preventDefault();
      this.add([...transfer.files]);
    } else if (isLongPaste(text)) {
      const name = `Pasted text, ${lineCount(text).toLocaleString("en")} ${lineCount(text) === 1 ? "line" : "lines"}`;
      const problem = refusal(this.files, name, new TextEncoder().encode(text).length);
      e.preventDefault();
      if (problem) { this.notify(problem); return; }
      this.files.push({ name, text: text.replace(/\r\n?/g, "\n"), pasted: true });
      this.draw();
    }
  }

  watchDrops() {
    const show = (on) => { $("drop").hidden = !on; };
    addEventListener("dragover", (e) => {
      if (!hasFiles(e.dataTransfer)) return;
      e.preventDefault(); // else the browser opens the file in place of the page
      const blocked = document.querySelector("dialog[open]");
      e.dataTransfer.dropEffect = blocked ? "none" : "copy";
      show(!blocked);
    });
    addEventListener("dragleave", (e) => { if (!e.relatedTarget) show(false); });
    addEventListener("drop", (e) => {
      if (!hasFiles(e.dataTransfer)) return;
      e.preventDefault();
      show(false);
      if (!document.querySelector("dialog[open]")) this.add([...e.dataTransfer.files]);
    });
  }
}
