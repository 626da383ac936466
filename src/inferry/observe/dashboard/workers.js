// One card per worker: its phase, its KV cache, its sequences.

import { Course, ring, sparkline } from "./charts.js";
import { byId, h, KeyedList, setAttribute, setShare, setText } from "./dom.js";
import { count, DASH, percent, seconds } from "./format.js";

class WorkerCard {
  constructor(worker, onAction) {
    this.kv = ring("KV cache in use");
    this.kvFigure = h("strong", {}, DASH);
    this.kvNote = h("span", { class: "note" });
    this.phase = h("span", { class: "phase" });
    this.meta = h("p", { class: "meta" });
    this.models = h("p", { class: "models" });
    this.sequences = h("span", {}, DASH);
    this.bar = h("i");
    this.waiting = h("span", { class: "note" });
    this.batch = h("dd", {}, DASH);
    this.busy = h("dd", {}, DASH);
    this.chart = sparkline("Running sequences over time");
    this.course = new Course();
    this.action = h("button", { class: "ghost small", type: "button", on: { click: () => onAction(this.worker) } });
    this.node = h(
      "article",
      { class: "worker" },
      h("header", {}, h("div", { class: "worker-name" }, h("h3", {}, worker.name), this.meta), this.phase),
      h(
        "div",
        { class: "worker-body" },
        h("div", { class: "kv" }, this.kv.node, h("div", { class: "kv-text" }, this.kvFigure, h("span", { class: "note" }, "KV cache"))),
        h(
          "div",
          { class: "worker-facts" },
          h("div", { class: "row" }, h("span", { class: "note" }, "Sequences"), this.sequences),
          h("div", { class: "meter" }, this.bar),
          h("div", { class: "row" }, this.kvNote, this.waiting),
          h("dl", { class: "pair" }, h("div", {}, h("dt", { title: "Calls per plan in the last minute" }, "Batch, 1 min"), this.batch), h("div", {}, h("dt", { title: "Part of the last minute in which the engine computed" }, "Busy, 1 min"), this.busy)),
        ),
      ),
      this.chart.node,
      h("footer", {}, this.models, this.action),
    );
  }

  series(times, series) {
    this.course.setHistory(times, series.running);
  }

  update(worker) {
    this.worker = worker;
    const share = worker.kv_capacity_tokens ? worker.kv_used_tokens / worker.kv_capacity_tokens : null;
    this.kv.update(share);
    setText(this.kvFigure, percent(share, 0));
    const capacity = worker.kv_capacity_tokens === null ? "" : ` of ${count(worker.kv_capacity_tokens)}`;
    setText(this.kvNote, `${count(worker.kv_used_tokens)}${capacity} KV tokens`);
    setText(this.sequences, worker.max_sequences === null ? count(worker.running) : `${count(worker.running)} of ${count(worker.max_sequences)}`);
    setShare(this.bar, "width", worker.max_sequences ? worker.running / worker.max_sequences : 0);
    setText(this.waiting, worker.waiting ? `${count(worker.waiting)} waiting in the engine` : "");
    setText(this.batch, worker.batch_mean === null ? DASH : worker.batch_mean.toFixed(1));
    setText(this.busy, percent(worker.gpu_utilization, 0));
    setText(this.models, worker.models.join(", ") || "no models yet");
    setAttribute(this.models, "title", worker.models.join(", "));
    const isBroken = worker.breaker !== "closed";
    setText(this.phase, worker.drained ? "drained" : isBroken ? `breaker ${worker.breaker.replace("_", " ")}` : worker.phase);
    setAttribute(this.node, "data-phase", worker.drained ? "draining" : isBroken ? "down" : worker.phase);
    setText(this.action, worker.drained ? "Readmit" : "Drain");
    setAttribute(this.action, "aria-label", `${worker.drained ? "Readmit" : "Drain"} worker ${worker.name}`);
  }

  draw(now) {
    const { worker } = this;
    setText(this.meta, `${worker.kind} · group ${worker.group} · for ${seconds(Math.max(1, now - worker.since))}`);
    this.course.add(now, worker.running);
    const points = this.course.points(now);
    this.chart.update(points, now, Math.max(1, worker.max_sequences ?? 0, ...points.map(([, value]) => value ?? 0)));
  }
}

const empty = () => h("p", { class: "empty" }, "No worker is configured. Add one under ", h("code", {}, "workers"), " in the configuration, or to the ", h("code", {}, "workers_file"), ".");

export class WorkersPanel {
  constructor(parent, onAction) {
    this.list = new KeyedList(parent, (worker) => new WorkerCard(worker, onAction), empty);
  }

  series(series) {
    this.pending = series;
    for (const worker of series.workers) this.list.rows.get(worker.name)?.series(series.at, worker);
  }

  live(state) {
    this.list.update(state.workers, (worker) => worker.name);
    for (const [name, card] of this.list.rows) {
      const first = this.pending?.workers.find((one) => one.name === name);
      if (first && card.course.history.length === 0) card.series(this.pending.at, first);
      card.draw(state.at);
    }
    const ready = state.workers.filter((worker) => worker.phase === "ready").length;
    setText(byId("worker-note"), `${ready} of ${state.workers.length} ready`);
  }
}
