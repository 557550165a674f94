// Text files and long pastes of a message: decoding, limits, and the text that the model reads. No page here.

export const MOST_FILES = 10;
export const MOST_BYTES = 1e6; // of one file
export const MOST_BYTES_TOGETHER = 2e6; // of one message
const LONG_PASTE = { characters: 4000, lines: 60 };

/** Why a file cannot be read, in a sentence for a person. */
export class Unreadable extends Error {}

export function sizeText(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 999_500 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
export const bytesOf = (file) => new TextEncoder().encode(file.text).length;
export const lineCount = (text) => text.split("\n").length;

/** Whether a pasted text is attached to the message instead of inserted into the box. */
export const isLongPaste = (text) => text.length > LONG_PASTE.characters || lineCount(text) > LONG_PASTE.lines;

const KINDS = [
  [[0x25, 0x50, 0x44, 0x46], "a PDF"], [[0x50, 0x4b, 3, 4], "an archive or an office document"], [[0x1f, 0x8b], "an archive"],
  [[0x89, 0x50, 0x4e, 0x47], "a picture"], [[0xff, 0xd8, 0xff], "a picture"], [[0x47, 0x49, 0x46, 0x38], "a picture"],
  [[0xd0, 0xcf, 0x11, 0xe0], "an office document"], [[0x7f, 0x45, 0x4c, 0x46], "a program"],
];
const MARKS = [[[0xff, 0xfe], "utf-16le"], [[0xfe, 0xff], "utf-16be"], [[0xef, 0xbb, 0xbf], "utf-8"]];
const begins = (bytes, start) => start.every((b, i) => bytes[i] === b);
const CONTROL = /[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]/; // tabs, line ends, form feeds and escapes occur in text

function decode(bytes) {
  const encoding = MARKS.find(([mark]) => begins(bytes, mark))?.[1] ?? "utf-8";
  try {
    return new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    return encoding === "utf-8" ? new TextDecoder("windows-1252").decode(bytes) : "\0"; // the encoding of older editors
  }
}

/** The text of a file's bytes. Throws Unreadable with a sentence for a person. */
export function readText(name, bytes) {
  if (!bytes.length) throw new Unreadable(`“${name}” is empty.`);
  const kind = KINDS.find(([start]) => begins(bytes, start))?.[1];
  const text = kind ? "" : decode(bytes);
  if (kind || CONTROL.test(text)) {
    throw new Unreadable(`“${name}” is ${kind ?? "not a text file"}: the model reads text only, so copy the text out of it and paste that.`);
  }
  if (!text.trim()) throw new Unreadable(`“${name}” has no text in it.`);
  return text.replace(/\r\n?/g, "\n");
}

/** Why a file cannot be attached in addition to `files`, or "". */
export function refusal(files, name, bytes) {
  if (files.length >= MOST_FILES) return `“${name}” is left out: a message takes ${MOST_FILES} files.`;
  if (bytes > MOST_BYTES) return `“${name}” is larger than ${sizeText(MOST_BYTES)}: attach the part of it that matters.`;
  const together = files.reduce((sum, f) => sum + bytesOf(f), bytes);
  if (together > MOST_BYTES_TOGETHER) return `“${name}” is left out: the files of a message may have ${sizeText(MOST_BYTES_TOGETHER)} together.`;
  return "";
}

/** Code between fences that no line of it can close. */
export function fenced(text, lang = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((m) => m[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${lang}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** A user's message as the model reads it, part by part: the files first, the question last. */
export function messageParts({ text, files = [] }) {
  const parts = files.map((f) => {
    if (f.pasted) return f.text;
    const name = f.name.replace(/[\s`]+/g, " ");
    return `File: ${name}\n${fenced(f.text, /\.(\w+)$/.exec(name)?.[1].toLowerCase())}`;
  });
  return [...parts, text].filter((part) => part.trim());
}
export const messageText = (message) => messageParts(message).join("\n\n");
