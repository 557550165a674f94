// Nodes, icons and the clipboard. Text becomes text nodes; nothing on this page is ever parsed as HTML.

export const el = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
};

const NS = "http://www.w3.org/2000/svg";
const SHAPES = {
  copy: ["M9 9h10v10H9z", "M15 9V5H5v10h4"], again: ["M20 12a8 8 0 1 1-2.3-5.6", "M20 4v4h-4"], pen: ["M5 19l1-4L16 5l3 3L9 18z"],
  x: ["M7 7l10 10M17 7L7 17"], chev: ["M9 6l6 6-6 6"], back: ["M15 6l-6 6 6 6"],
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
