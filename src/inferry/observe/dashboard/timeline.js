// One run: its figures, its attempts as swimlanes, and what each attempt was.

import { byId, h, KeyedList, setAttribute, setText } from "./dom.js";
import { count, milliseconds, money, percent, seconds } from "./format.js";
import { getJson } from "./session.js";

const MAX_ROWS = 150;
const MAX_TOOLS = 5;
const REFRESH_MS = 1000;

const pathOf = (run, suffix = "") => `/admin/runs/${encodeURIComponent(run.id)}${suffix}?tenant=${encodeURIComponent(run.tenant)}`;

// Where the time of an attempt went, as [kind, from, to]. An attempt in flight lasts until now.
const phases = (step, now) => {
  const end = step.ended_at ?? now;
  const sent = step.sent_at ?? end;
  const first = step.first_token_at ?? end;
  const found = [["queue", step.arrived_at, sent]];
  if (step.sent_at !== null) found.push(["prefill", sent, first]);
  if (step.first_token_at !== null) found.push(["decode", first, end]);
  return found.filter(([, from, to]) => to > from);
};

// Times in which no call was in flight: the agent's own, mostly its tools.
const pauses = (steps, now) => {
  const found = [];
  let reached = null;
  for (const step of steps) {
    if (reached !== null && step.arrived_at > reached) found.push([reached, step.arrived_at]);
    reached = Math.max(reached ?? 0, step.ended_at ?? now);
  }
  return found;
};

class StepRow {
  constructor() {
    this.label = h("span", { class: "step-name" });
    this.track = h("div", { class: "track" });
    this.detail = h("dl", { class: "step-detail" });
    this.button = h("button", { class: "step", type: "button", "aria-expanded": "false", on: { click: () => this.toggle() } }, this.label, this.track);
    this.detail.hidden = true;
    this.node = h("li", {}, this.button, this.detail);
  }

  toggle() {
    this.detail.hidden = !this.detail.hidden;
    this.button.setAttribute("aria-expanded", String(!this.detail.hidden));
  }

  update({ step, start, span, now, gaps }) {
    setText(this.label, step.step_id + (step.attempt > 1 ? ` · try ${step.attempt}` : ""));
    setAttribute(this.button, "data-status", step.status);
    setAttribute(this.button, "aria-label", `Step ${step.step_id}: ${step.status}, ${milliseconds(1000 * ((step.ended_at ?? now) - step.arrived_at))}`);
    const place = (kind, from, to) => {
      const part = h("i", { class: `k-${kind}` });
      part.style.left = `${((100 * (from - start)) / span).toFixed(3)}%`;
      part.style.width = `${Math.max(0.15, (100 * (to - from)) / span).toFixed(3)}%`;
      return part;
    };
    const quiet = gaps.map(([from, to]) => place("tool", from, to));
    this.track.replaceChildren(...quiet, ...phases(step, now).map(([kind, from, to]) => place(kind, from, to)));
    this.detail.replaceChildren(...details(step, now).map(([name, value]) => h("div", { class: name === "Decision" ? "whole" : null }, h("dt", {}, name), h("dd", {}, value))));
  }
}

const details = (step, now) => {
  const found = [
    ["Status", step.error ? `${step.status} (${step.error})` : step.status],
    ["Lane", step.lane],
    ["Model", step.model],
    ["Worker", step.worker ?? "not sent yet"],
    ...phases(step, now).map(([kind, from, to]) => [{ queue: "Queue", prefill: "Prefill", decode: "Decode" }[kind], milliseconds(1000 * (to - from))]),
    ["Tokens", `${count(step.prompt_tokens)} in (${count(step.cached_tokens)} cached) · ${count(step.output_tokens)} out`],
  ];
  if (step.attained !== null) found.push(["Target", step.attained ? "attained" : "missed"]);
  if (step.batch_size !== null) found.push(["Calls in its plan", `${count(step.batch_size)} (${step.release_reason ?? ""})`]);
  if (step.cost) found.push(["Cost", money(step.cost)]);
  // Why the call was held, which limit bound it, and why this worker.
  if (step.decision) found.push(["Decision", step.decision]);
  return found;
};

export class RunDialog {
  constructor(dialog, on) {
    this.dialog = dialog;
    this.on = on;
    this.timer = null;
    dialog.addEventListener("close", () => this.stop());
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
  }

  open(run) {
    this.run = run;
    this.title = h("h2", { id: "run-title" }, run.id);
    this.status = h("span", { class: "pill" });
    this.cancel = h("button", { class: "danger small", type: "button", on: { click: () => this.on.cancel(this.run) } }, "Cancel run");
    this.facts = h("dl", { class: "run-facts" });
    this.split = h("div", { class: "split", role: "img" });
    this.hint = h("p", { class: "hint" });
    this.related = h("div", { class: "related" });
    this.axis = h("div", { class: "axis", "aria-hidden": "true" }, h("span"), h("span"), h("span"));
    this.steps = h("ol", { class: "steps" });
    this.note = h("p", { class: "note" }, "Reading the run…");
    this.list = new KeyedList(this.steps, () => new StepRow());
    this.trace = h("a", { class: "trace", title: "The run and its sub-runs as a trace: open it at ui.perfetto.dev" }, "Perfetto trace");
    const legend = ["queue", "prefill", "decode", "tool"].map((kind) => h("span", { class: `k-${kind}` }, kind));
    this.dialog.replaceChildren(
      h("div", { class: "drawer-head" }, h("div", {}, this.title, h("p", { class: "muted" }, `tenant ${run.tenant}`)), h("div", { class: "drawer-actions" }, this.status, this.cancel, h("button", { class: "icon-button", type: "button", "aria-label": "Close", on: { click: () => this.dialog.close() } }, "✕"))),
      h("div", { class: "drawer-body" }, this.facts, this.split, this.hint, this.related, h("div", { class: "card-head" }, h("h3", {}, "Timeline"), h("div", { class: "legend" }, ...legend, this.trace)), this.axis, this.steps, this.note),
    );
    this.cancel.hidden = true;
    this.trace.href = `${pathOf(run, "/timeline")}&format=perfetto`;
    this.trace.download = `${run.id}.perfetto.json`;
    if (!this.dialog.open) this.dialog.showModal();
    this.refresh();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.run = null;
  }

  async refresh() {
    clearTimeout(this.timer);
    const { run } = this;
    if (!run) return;
    try {
      const [detail, timeline] = await Promise.all([getJson(pathOf(run)), getJson(pathOf(run, "/timeline"))]);
      if (this.run !== run) return;
      this.showDetail(detail);
      this.showTimeline(timeline);
      if (detail.status === "active") this.timer = setTimeout(() => this.refresh(), REFRESH_MS);
    } catch (error) {
      if (this.run !== run) return;
      setText(this.note, error.status === 404 ? "The gateway no longer knows this run." : "The run could not be read. Trying again…");
      if (error.status !== 404) this.timer = setTimeout(() => this.refresh(), 2 * REFRESH_MS);
    }
  }

  showDetail(detail) {
    setText(this.status, detail.status);
    setAttribute(this.status, "data-state", { active: "good", cancelled: "bad" }[detail.status] ?? "wait");
    this.cancel.hidden = detail.status !== "active";
    const facts = [
      ["Calls", `${count(detail.jobs.ended)} ended · ${count(detail.jobs.in_flight)} in flight`],
      ["Tokens", `${count(detail.tokens.prompt)} in · ${count(detail.tokens.output)} out`],
      ["Cost", money(detail.cost || null)], // as in the list: without a price a cost is not known
      ["Queue wait", detail.waits.mean_ms === null ? "–" : `mean ${milliseconds(detail.waits.mean_ms)} · max ${milliseconds(detail.waits.max_ms)}`],
    ];
    if (detail.budget?.token_ceiling) facts.push(["Budget", `${percent(detail.budget.spent_tokens / detail.budget.token_ceiling, 0)} of ${count(detail.budget.token_ceiling)} tokens`]);
    const tools = Object.entries(detail.tools).sort(([, a], [, b]) => b.seconds - a.seconds).slice(0, MAX_TOOLS);
    if (tools.length) facts.push(["Tools", tools.map(([name, use]) => `${name} ${seconds(use.seconds)} (${count(use.calls)})`).join(", ")]);
    this.facts.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.showSplit(detail.time);
    setText(this.hint, detail.time.hint ?? "");
    const links = [detail.parent_run_id, ...detail.sub_runs.slice(0, 20)].filter((id) => id !== null);
    this.related.replaceChildren(
      ...links.map((id) => h("button", { class: "chip-button", type: "button", on: { click: () => this.open({ ...this.run, id }) } }, id === detail.parent_run_id ? `↑ ${id}` : `↳ ${id}`)),
    );
  }

  showSplit(time) {
    const model = Math.max(0, time.active_ms - time.queued_ms);
    const parts = [["queue", time.queued_ms], ["decode", model], ["tool", time.tool_ms]].filter(([, value]) => value > 0);
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    const names = { queue: "queue", decode: "model", tool: "tools" };
    this.split.replaceChildren(
      ...parts.map(([kind, value]) => {
        const part = h("span", { class: `k-${kind}` }, h("b", {}, value / total > 0.12 ? `${names[kind]} ${percent(value / total, 0)}` : ""));
        part.style.flexGrow = String(value / total);
        return part;
      }),
    );
    setAttribute(this.split, "aria-label", parts.map(([kind, value]) => `${names[kind]} ${seconds(value / 1000)}`).join(", "));
  }

  showTimeline(timeline) {
    const steps = timeline.steps.slice(-MAX_ROWS);
    const now = timeline.at;
    const start = Math.min(...steps.map((step) => step.arrived_at));
    const end = Math.max(start + 0.001, ...steps.map((step) => step.ended_at ?? now));
    const gaps = pauses(steps, now);
    this.list.update(steps.map((step) => ({ step, start, span: end - start, now, gaps })), ({ step }) => `${step.job_id} ${step.attempt}`);
    const marks = steps.length ? ["0", milliseconds(500 * (end - start)), milliseconds(1000 * (end - start))] : ["", "", ""];
    marks.forEach((text, at) => setText(this.axis.children[at], text));
    setText(this.note, steps.length === 0 ? "No call of this run is known yet." : timeline.steps.length > MAX_ROWS ? `The latest ${MAX_ROWS} of ${timeline.steps.length} attempts.` : "");
  }
}

export const cancelPath = (run) => pathOf(run);
export const confirmDialog = (title, text, yes) => {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  return new Promise((resolve) => {
    const done = (answer) => {
      byId("confirm-yes").onclick = byId("confirm-no").onclick = dialog.onclose = null;
      if (dialog.open) dialog.close();
      resolve(answer);
    };
    byId("confirm-yes").onclick = () => done(true);
    byId("confirm-no").onclick = () => done(false);
    dialog.onclose = () => done(false);
    dialog.showModal();
    byId("confirm-no").focus();
  });
};
