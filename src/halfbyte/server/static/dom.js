// Nodes, icons and the clipboard. Text becomes text nodes; nothing on this page is ever parsed as HTML.

export const el = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
};

const NS = "http://www.w3.org/2000/svg";
const SHAPES = {
  copy: ["M9 9h10v10H9z", "M15 9V5H5v10h4"], again: ["M20 12a8 8 0 1 1-2.3-5.6", "M20 4v4h-4"], pen: ["M5 19l1-4L16 5l3 3L9 18z"],
  x: ["M7 7l10 10M17 7L7 17"], chev: ["M9 6l6 6-6 6"], back: ["M15 6l-6 6 6 6"], more: ["M6 12h.01M12 12h.01M18 12h.01"],
  on: ["M5 6l7 6-7 6", "M13 6l7 6-7 6"], file: ["M7 4h7l4 4v12H7z", "M14 4v4h4"], into: ["M12 4v10", "M8 10l4 4 4-4", "M5 19h14"],
};

export function icon(name, className = "") {
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  if (className) svg.setAttribute("class", className);
  for (const d of SHAPES[name]) { const p = document.createElementNS(NS, "path"); p.setAttribute("d", d); svg.append(p); }
  return svg;
}

export function button(name, label, onclick) {
  const b = el("button", { type: "button", title: label, onclick }, icon(name));
  b.setAttribute("aria-label", label);
  return b;
}

/** Hand a text to the browser as a file to keep. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // plain http to another host has no clipboard interface
    const area = el("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
