// Whether the server is there: asked now and then while somebody looks, more often while it is gone.

const CALM = 10_000;
const ALERT = 2_000;

/** Calls `tell({state, text})` when it changes. state: "ready", "busy" (it answers, but takes no work) or "gone". */
export class Connection {
  constructor(tell) {
    this.tell = tell;
    this.state = "ready";
    this.text = "";
    this.timer = 0;
    addEventListener("online", () => this.look());
    addEventListener("offline", () => this.look());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.look(); });
    this.later();
  }

  /** Ask now. */
  async look() {
    clearTimeout(this.timer);
    try {
      const response = await fetch("/health", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (response.ok) this.set("ready", "");
      else this.set("busy", (await response.json().catch(() => null))?.error?.message ?? `The server answers ${response.status}.`);
    } catch {
      this.set("gone", "The server cannot be reached. Trying again…");
    }
    this.later();
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (document.hidden ? this.later() : this.look()), this.state === "ready" ? CALM : ALERT);
  }

  set(state, text) {
    if (state === this.state && text === this.text) return;
    const before = this.state;
    this.state = state;
    this.text = text;
    this.tell({ state, text, before });
  }
}
