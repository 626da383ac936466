// The tiles at the top: the whole gateway in five numbers.

import { Course, level, sparkline } from "./charts.js";
import { h, setAttribute, setText } from "./dom.js";
import { count, percent, rate } from "./format.js";

const TILES = [
  { key: "calls", label: "Calls", unit: (t) => (t.refusals_per_s > 0 ? `per second · ${rate(t.refusals_per_s)} refused` : "per second"), value: (t) => rate(t.calls_per_s), number: (t) => t.calls_per_s, series: "calls_per_s" },
  { key: "tokens", label: "Output tokens", unit: "per second", value: (t) => rate(t.output_tokens_per_s), number: (t) => t.output_tokens_per_s, series: "output_tokens_per_s" },
  { key: "flight", label: "In flight", unit: (t) => `${count(t.queued)} queued`, value: (t) => count(t.in_flight), number: (t) => t.in_flight, series: "in_flight" },
  { key: "attained", label: "SLO attainment", unit: "last minute", value: (t) => percent(t.attainment), number: (t) => t.attainment, level: (t) => level(t.attainment), top: 1 },
  { key: "use", label: "Utilisation", unit: (t) => use(t).unit, value: (t) => percent(use(t).share, 0), number: (t) => use(t).share, top: 1 },
];

// Of the engines' time where it is measured, else of the workers' sequence limits.
const use = (totals) => {
  if (totals.gpu_utilization !== null) return { share: totals.gpu_utilization, unit: "of engine time, last minute" };
  if (totals.max_sequences) {
    const unit = `${count(totals.running)} of ${count(totals.max_sequences)} sequences`;
    return { share: totals.running / totals.max_sequences, unit };
  }
  return { share: null, unit: `${count(totals.running)} sequences` };
};

export class TotalsPanel {
  constructor(parent) {
    this.tiles = TILES.map((spec) => {
      const value = h("strong", { class: "figure" }, "–");
      const unit = h("span", { class: "muted" });
      const chart = sparkline(`${spec.label} over time`);
      const node = h("div", { class: "tile card", data: { key: spec.key } }, h("span", { class: "label" }, spec.label), value, unit, chart.node);
      parent.append(node);
      return { spec, node, value, unit, chart, course: new Course() };
    });
  }

  series(series) {
    for (const tile of this.tiles) {
      if (tile.spec.series) tile.course.setHistory(series.at, series[tile.spec.series]);
      else if (tile.spec.key === "use") tile.course.setHistory(series.at, utilisation(series, this.limits));
      else tile.course.setHistory(series.at, worstAttainment(series));
    }
  }

  live(state) {
    this.limits = new Map(state.workers.map((worker) => [worker.name, worker.max_sequences]));
    for (const { spec, node, value, unit, chart, course } of this.tiles) {
      setText(value, spec.value(state.totals));
      setText(unit, typeof spec.unit === "function" ? spec.unit(state.totals) : spec.unit);
      if (spec.level) setAttribute(node, "data-level", spec.level(state.totals));
      course.add(state.at, spec.number(state.totals));
      chart.update(course.points(state.at), state.at, spec.top);
    }
  }
}

const utilisation = (series, limits) =>
  series.at.map((_, at) => {
    const gpus = series.workers.map((worker) => worker.gpu_utilization[at]).filter((value) => value !== null);
    if (gpus.length) return gpus.reduce((sum, value) => sum + value, 0) / gpus.length;
    const known = series.workers.filter((worker) => limits?.get(worker.name));
    const most = known.reduce((sum, worker) => sum + limits.get(worker.name), 0);
    return most ? known.reduce((sum, worker) => sum + (worker.running[at] ?? 0), 0) / most : null;
  });

const worstAttainment = (series) =>
  series.at.map((_, at) => {
    const known = series.lanes.map((lane) => lane.attainment[at]).filter((value) => value !== null);
    return known.length ? Math.min(...known) : null;
  });
