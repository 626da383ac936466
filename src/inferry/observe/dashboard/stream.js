// The gateway's snapshots as they arrive. Reconnects by itself and says what it is doing.

import { readSession } from "./session.js";

const RETRY_MS = [500, 1000, 2000, 3000];

// `on` has live(state), series(series), connection(state, since) and session(state).
export class Stream {
  constructor(on) {
    this.on = on;
    this.source = null;
    this.failures = 0;
    this.lastAt = null;
    this.timer = null;
  }

  async connect() {
    clearTimeout(this.timer);
    this.timer = null;
    let session;
    try {
      session = await readSession();
    } catch {
      this.retry();
      return;
    }
    this.on.session(session);
    if (session.signed_in) this.open();
  }

  open() {
    this.close();
    const source = (this.source = new EventSource("/admin/overview/stream"));
    source.addEventListener("series", (event) => this.on.series(JSON.parse(event.data)));
    source.addEventListener("live", (event) => {
      this.failures = 0;
      this.lastAt = Date.now();
      this.on.connection("live", this.lastAt);
      this.on.live(JSON.parse(event.data));
    });
    source.addEventListener("end", () => this.retry());
    source.addEventListener("error", () => this.retry());
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  retry() {
    this.close();
    if (this.timer !== null) return;
    this.on.connection("lost", this.lastAt);
    const wait = RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)];
    this.timer = setTimeout(() => this.connect(), wait);
  }
}
