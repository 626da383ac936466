// The latest runs of all tenants, with what their calls in flight are doing, and a button that cancels them.

import { h, KeyedList, setAttribute, setShare, setText } from "./dom.js";
import { ago, count, money } from "./format.js";

const SHOWN = 10;
const KINDS = ["queued", "prefill", "decode"];
const COLUMNS = ["Run", "Tenant", "In flight", "Calls", "Tokens out", "Cost", "Last active", ""];

class RunRow {
  constructor(run, on) {
    this.link = h("button", { class: "run-link", type: "button", on: { click: () => on.open(this.run) } }, run.id);
    this.about = h("span", { class: "note" });
    this.tenant = h("td", { class: "tenant", "data-label": "Tenant" }, run.tenant);
    this.segments = Object.fromEntries(KINDS.map((kind) => [kind, h("i", { class: `k-${kind}` })]));
    this.bars = h("div", { class: "segments" }, ...KINDS.map((kind) => this.segments[kind]));
    this.flight = h("span", { class: "note" });
    this.calls = h("td", { class: "number", "data-label": "Calls" });
    this.tokens = h("td", { class: "number", "data-label": "Tokens out" });
    this.cost = h("td", { class: "number", "data-label": "Cost" });
    this.last = h("td", { class: "number", "data-label": "Last active" });
    this.cancel = h("button", { class: "ghost small danger-text", type: "button", on: { click: () => on.cancel(this.run) } }, "Cancel");
    this.node = h(
      "tr",
      { class: "run" },
      h("th", { scope: "row" }, h("span", { class: "dot", "aria-hidden": "true" }), h("div", { class: "run-id" }, this.link, this.about)),
      this.tenant,
      h("td", { class: "flight", "data-label": "In flight" }, this.bars, this.flight),
      this.calls,
      this.tokens,
      this.cost,
      this.last,
      h("td", { class: "actions" }, this.cancel),
    );
  }

  update(run) {
    this.run = run;
    setAttribute(this.node, "data-status", run.status);
    const subRuns = run.sub_runs ? ` · ${count(run.sub_runs)} sub-run${run.sub_runs === 1 ? "" : "s"}` : "";
    setText(this.about, (run.is_call && run.status !== "cancelled" ? "single call" : run.status) + subRuns);
    const total = run.queued + run.prefill + run.decode;
    for (const kind of KINDS) {
      this.segments[kind].hidden = !run[kind];
      setShare(this.segments[kind], "flexBasis", total ? run[kind] / total : 0);
    }
    const parts = KINDS.filter((kind) => run[kind]).map((kind) => `${run[kind]} ${kind}`);
    const below = run.tree_in_flight - total;
    if (below > 0) parts.push(`${below} in sub-runs`);
    setText(this.flight, parts.join(" · "));
    this.bars.hidden = total === 0;
    const least = run.is_partial ? "≥ " : "";
    setText(this.calls, least + count(run.calls) + (run.failed ? ` (${count(run.failed)} failed)` : ""));
    setText(this.tokens, least + count(run.output_tokens));
    setText(this.cost, least + money(run.cost));
    setAttribute(this.cancel, "aria-label", `Cancel run ${run.id}`);
    this.cancel.hidden = run.tree_in_flight === 0 || run.status === "cancelled";
  }
}

// In single quotes for a shell, whatever the text is.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const firstCall = (model) => {
  const body = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: "Hello" }] });
  return [
    `curl -N ${location.origin}/v1/chat/completions \\`,
    "  -H 'content-type: application/json' \\",
    "  -H 'x-inferry-run-id: my-first-run' \\",
    `  -d ${quoted(body)}`,
  ].join("\n");
};

export class RunsPanel {
  constructor(parent, on) {
    this.body = h("tbody");
    this.table = h("table", { class: "run-table" }, h("thead", {}, h("tr", {}, ...COLUMNS.map((name, at) => h("th", { scope: "col", class: at > 2 && at < 7 ? "number" : null }, name)))), this.body);
    this.command = h("code");
    const copy = h("button", { class: "ghost small", type: "button", on: { click: () => on.copy(this.command.textContent) } }, "Copy");
    this.start = h(
      "div",
      { class: "first-call" },
      h("h3", {}, "Send the first call"),
      h("p", { class: "muted" }, "A run is everything an agent does under one id. Name it with a header and it appears here while it runs. If the gateway asks for an API key, add it as a bearer token."),
      h("div", { class: "command" }, h("pre", {}, this.command), copy),
    );
    this.isWhole = false;
    this.more = h("button", { class: "ghost small more", type: "button", "aria-expanded": "false", on: { click: () => this.toggle() } });
    parent.append(this.table, this.more, this.start);
    this.list = new KeyedList(this.body, (run) => new RunRow(run, on));
  }

  toggle() {
    this.isWhole = !this.isWhole;
    this.more.setAttribute("aria-expanded", String(this.isWhole));
    this.live(this.state);
  }

  live(state) {
    this.state = state;
    const runs = this.isWhole ? state.runs : state.runs.slice(0, SHOWN);
    this.more.hidden = state.runs.length <= SHOWN;
    setText(this.more, this.isWhole ? "Show fewer" : `Show ${state.runs.length - SHOWN} more`);
    this.list.update(runs, (run) => JSON.stringify([run.tenant, run.id]));
    for (const row of this.list.rows.values()) setText(row.last, row.run.tree_in_flight ? "now" : ago(row.run.last_active_at, state.at));
    const model = state.workers.flatMap((worker) => worker.models)[0] ?? "MODEL";
    setText(this.command, firstCall(model));
    this.table.hidden = state.runs.length === 0;
    this.start.hidden = state.runs.length > 0;
  }
}
