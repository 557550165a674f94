// The page's only way to the server: the same public endpoints every other client uses.

import { messageText } from "./attachments.js";
import { settings } from "./store.js";

export class Refusal extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const headers = () => ({ "content-type": "application/json", ...(settings.key ? { authorization: `Bearer ${settings.key}` } : {}) });

async function check(response) {
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* no JSON: the status has to do */ }
  throw new Refusal(response.status, message);
}

/** Why the server refused the key that it was sent, or that none was. */
export const keyProblem = () => (settings.key ? "This API key is wrong." : "This server asks for an API key.");

export async function about() {
  const models = await (await check(await fetch("/v1/models", { headers: headers() }))).json();
  return models.data[0];
}

/** How many tokens a text has. */
export async function countTokens(text) {
  const body = JSON.stringify({ content: text });
  return (await (await check(await fetch("/tokenize", { method: "POST", headers: headers(), body }))).json()).count;
}

/** What the server needs to see of the messages of a conversation. `unfinished`: the last one, if the model shall go on with it. */
export function wireMessages(messages, unfinished = null) {
  const out = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const m of messages) {
    if (m.role === "user") out.push({ role: "user", content: messageText(m) });
    if (m.role === "assistant") {
      const calls = (m.calls ?? []).filter((c) => c.result !== undefined);
      if (!m.text && !calls.length && m !== unfinished) continue;
      out.push({
        role: "assistant",
        content: m.text || null,
        ...(m.reasoning ? { reasoning_content: m.reasoning } : {}),
        ...(calls.length ? { tool_calls: calls.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.args } })) } : {}),
      });
      for (const c of calls) out.push({ role: "tool", tool_call_id: c.id, content: c.result });
    }
  }
  return out;
}

/** Stream one answer, or the rest of an `unfinished` one. Yields parsed chunks; throws Refusal for anything the server says no to. */
export async function* chat(model, messages, effort, signal, unfinished = null) {
  const tools = settings.tools.trim() ? JSON.parse(settings.tools) : [];
  const body = {
    model,
    messages: wireMessages(messages, unfinished),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    reasoning_effort: effort,
    ...(settings.temperature !== "" ? { temperature: Number(settings.temperature) } : {}),
    ...(settings.max !== "" ? { max_completion_tokens: Number(settings.max) } : {}),
    ...(tools.length ? { tools } : {}),
    ...(unfinished ? { continue_final_message: true } : {}),
  };
  const response = await check(await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trim()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(500, chunk.error.message);
      yield chunk;
    }
  }
  throw new Refusal(0, "The connection ended before the answer did.");
}
