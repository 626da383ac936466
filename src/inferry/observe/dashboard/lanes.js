// One strip per lane: its queue, its waits, and the first token against its target.

import { attainmentStrip, Course, level, sparkline, targetChart } from "./charts.js";
import { h, KeyedList, setAttribute, setText } from "./dom.js";
import { count, milliseconds, percent, rate } from "./format.js";

const TITLES = { P0: "Interactive", P1: "Standard", P2: "Batch" };

const ITL_HELP = "A call attains its target if its first token is in time and token i arrives within TTFT + i · ITL: a fast first token leaves time for slower ones. The figure is red where the lane misses its target.";

const fact = (label, title = null) => {
  const value = h("dd", {}, "–");
  const note = h("span", { class: "note" });
  const node = h("div", { class: "fact" }, h("dt", title === null ? {} : { title }, label), value, note);
  return { node, value, note };
};

class LaneRow {
  constructor(lane) {
    const name = lane.lane;
    this.queued = fact("Queued");
    this.wait = fact("Queue wait p95");
    this.first = fact("First token p95");
    this.itl = fact("Inter-token p95", ITL_HELP);
    this.attained = h("strong", { class: "figure" }, "–");
    this.hasTarget = lane.ttft_target_ms !== null;
    this.chart = this.hasTarget ? targetChart(`${name}: p95 time to first token`, name) : sparkline(`${name}: queued calls`);
    this.strip = this.hasTarget ? attainmentStrip(`${name}: attainment over time`) : null;
    this.targetLabel = h("span", { class: "target-label" });
    this.course = new Course();
    this.attainment = new Course();
    const attainment = h("div", { class: "attained" }, this.attained, h("span", { class: "muted" }, this.hasTarget ? "attained" : "no target"));
    this.node = h(
      "div",
      { class: "lane", data: { lane: name } },
      h("div", { class: "lane-name" }, h("span", { class: "chip" }, name), h("span", {}, TITLES[name] ?? "")),
      attainment,
      h("dl", { class: "facts" }, this.queued.node, this.wait.node, this.first.node, this.itl.node),
      h("div", { class: "lane-chart" }, h("div", { class: "plot" }, this.chart.node, this.targetLabel), this.strip?.node),
    );
  }

  series(times, series) {
    this.course.setHistory(times, this.hasTarget ? series.ttft_p95_ms : series.queued);
    this.attainment.setHistory(times, series.attainment);
  }

  update(lane) {
    setText(this.queued.value, count(lane.queued));
    setText(this.queued.note, `${rate(lane.calls_per_s)} calls/s`);
    setText(this.wait.value, milliseconds(lane.queue_p95_ms));
    setText(this.wait.note, `p50 ${milliseconds(lane.queue_p50_ms)}`);
    setText(this.first.value, milliseconds(lane.ttft_p95_ms));
    setText(this.first.note, this.hasTarget ? `target ${milliseconds(lane.ttft_target_ms)}` : `p50 ${milliseconds(lane.ttft_p50_ms)}`);
    setText(this.itl.value, milliseconds(lane.itl_p95_ms));
    setText(this.itl.note, lane.itl_target_ms === null ? "no target" : `target ${milliseconds(lane.itl_target_ms)}`);
    setAttribute(this.first.node, "data-over", over(lane, lane.ttft_p95_ms, lane.ttft_target_ms));
    setAttribute(this.itl.node, "data-over", over(lane, lane.itl_p95_ms, lane.itl_target_ms));
    setText(this.attained, percent(lane.attainment));
    setAttribute(this.node, "data-level", level(lane.attainment));
  }

  draw(lane, now) {
    this.course.add(now, this.hasTarget ? lane.ttft_p95_ms : lane.queued);
    this.attainment.add(now, lane.attainment);
    const points = this.course.points(now);
    if (!this.hasTarget) {
      this.chart.update(points, now, Math.max(8, 1.2 * Math.max(0, ...points.map(([, value]) => value ?? 0))));
      setText(this.targetLabel, "queued");
      return;
    }
    const at = this.chart.update(points, now, lane.ttft_target_ms);
    setText(this.targetLabel, milliseconds(lane.ttft_target_ms));
    this.targetLabel.style.top = `${(100 * at).toFixed(1)}%`;
    this.strip.update(this.attainment.points(now), now);
  }
}

// Attainment decides: a p95 above the target is no alarm while the calls attain theirs.
const over = (lane, value, target) => (value !== null && target !== null && value > target && level(lane.attainment) !== "good" ? "true" : null);

export class LanesPanel {
  constructor(parent) {
    this.list = new KeyedList(parent, (lane) => new LaneRow(lane));
  }

  series(series) {
    this.pending = series;
    for (const lane of series.lanes) this.list.rows.get(lane.lane)?.series(series.at, lane);
  }

  live(state) {
    this.list.update(state.lanes, (lane) => lane.lane);
    for (const lane of state.lanes) {
      const row = this.list.rows.get(lane.lane);
      const first = this.pending?.lanes.find((one) => one.lane === lane.lane);
      if (first && row.course.history.length === 0) row.series(this.pending.at, first);
      row.draw(lane, state.at);
    }
  }
}
