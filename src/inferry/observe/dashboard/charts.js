// Charts as SVG paths in a 0..100 by 0..100 box that the layout stretches. The history is extended by live points.

import { s, setAttribute } from "./dom.js";

const MOST_S = 900;
const LEAST_S = 120;

// The time that the charts cover: all that is known of the last 15 minutes, so that a young gateway has charts too.
let spanS = LEAST_S;
export const setSpan = (times, now) => {
  const oldest = times[0] ?? now;
  spanS = Math.min(MOST_S, Math.max(LEAST_S, now - oldest));
  return spanS;
};

// Values over time: those of the gateway's series, and the live ones that came after it.
export class Course {
  constructor() {
    this.history = [];
    this.tail = [];
  }

  setHistory(times, values) {
    this.history = times.map((at, number) => [at, values[number]]);
    const last = times.at(-1) ?? 0;
    this.tail = this.tail.filter(([at]) => at > last);
  }

  add(at, value) {
    this.tail.push([at, value]);
    if (this.tail.length > 60) this.tail.shift();
  }

  points(now) {
    return [...this.history, ...this.tail].filter(([at]) => at >= now - spanS - 10);
  }
}

const x = (at, now) => 100 * (1 - (now - at) / spanS);
const fixed = (value) => value.toFixed(2);

// Runs of points without a gap. A value that is not known is a gap.
const stretches = (points) => {
  const found = [[]];
  for (const [at, value] of points) {
    if (value === null || value === undefined) {
      if (found.at(-1).length) found.push([]);
    } else found.at(-1).push([at, value]);
  }
  return found.filter((one) => one.length);
};

const linePath = (points, now, y) =>
  stretches(points)
    .map((one) => {
      if (one.length === 1) one = [[one[0][0] - 2, one[0][1]], one[0]];
      return "M" + one.map(([at, value]) => `${fixed(x(at, now))} ${fixed(y(value))}`).join("L");
    })
    .join("");

const areaPath = (points, now, y) =>
  stretches(points)
    .map((one) => {
      const last = fixed(x(one.at(-1)[0], now));
      const line = one.map(([at, value]) => `${fixed(x(at, now))} ${fixed(y(value))}`).join("L");
      return `M${fixed(x(one[0][0], now))} 100L${line}L${last} 100Z`;
    })
    .join("");

const box = (name, label, ...children) =>
  s("svg", { class: name, viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...children);

export const sparkline = (label) => {
  const area = s("path", { class: "area" });
  const line = s("path", { class: "line" });
  const node = box("spark", label, area, line);
  const update = (points, now, top = null) => {
    const highest = top ?? Math.max(1e-9, ...points.map(([, value]) => value ?? 0));
    const y = (value) => 96 - 88 * Math.min(1, value / highest);
    setAttribute(line, "d", linePath(points, now, y));
    setAttribute(area, "d", areaPath(points, now, y));
  };
  return { node, update };
};

// p95 of the first token against the target: what is above the target is drawn in the colour of a miss.
export const targetChart = (label, number) => {
  const area = s("path", { class: "area" });
  const line = s("path", { class: "line" });
  const missed = s("path", { class: "line missed" });
  const zone = s("rect", { class: "zone", x: 0, y: 0, width: 100, height: 0 });
  const target = s("line", { class: "target", x1: 0, x2: 100, y1: 0, y2: 0 });
  const below = s("clipPath", { id: `below-${number}` }, s("rect", { x: -5, y: 0, width: 110, height: 100 }));
  const above = s("clipPath", { id: `above-${number}` }, s("rect", { x: -5, y: -5, width: 110, height: 5 }));
  line.setAttribute("clip-path", `url(#below-${number})`);
  missed.setAttribute("clip-path", `url(#above-${number})`);
  const node = box("target-chart", label, s("defs", {}, below, above), zone, area, target, line, missed);
  const update = (points, now, limit) => {
    const highest = Math.max(limit === null ? 1e-9 : 1.8 * limit, 1.15 * Math.max(0, ...points.map(([, value]) => value ?? 0)));
    const y = (value) => 98 - 94 * (value / highest);
    const at = limit === null ? 0 : y(limit);
    const height = fixed(Math.max(0, at));
    setAttribute(zone, "height", limit === null ? "0" : height);
    setAttribute(target, "y1", fixed(at));
    setAttribute(target, "y2", fixed(at));
    setAttribute(target, "visibility", limit === null ? "hidden" : "visible");
    setAttribute(below.firstChild, "y", limit === null ? "-5" : fixed(at));
    setAttribute(below.firstChild, "height", limit === null ? "110" : fixed(105 - at));
    setAttribute(above.firstChild, "height", limit === null ? "0" : fixed(at + 5));
    const path = linePath(points, now, y);
    setAttribute(line, "d", path);
    setAttribute(missed, "d", path);
    setAttribute(area, "d", areaPath(points, now, y));
    node.style.setProperty("--target-at", `${height}%`);
    return at / 100;
  };
  return { node, update };
};

const CELLS = 60;
const LONGEST_SAMPLE_S = 15;

// One cell per sixtieth of the time, coloured by the share of calls that met the target.
export const attainmentStrip = (label) => {
  const cells = Array.from({ length: CELLS }, (_, at) => s("rect", { x: (100 / CELLS) * at + 0.18, y: 0, width: 100 / CELLS - 0.36, height: 100, rx: 0.25 }));
  const node = box("strip", label, ...cells);
  const update = (points, now) => {
    const step = spanS / CELLS;
    const last = spanS === MOST_S ? Math.ceil(now / step) * step : now;
    const worst = new Array(CELLS).fill(null);
    const cellOf = (at) => CELLS - 1 - Math.floor((last - at) / step);
    let before = -Infinity;
    for (const [at, value] of points) {
      // A value holds for the time since the one before it.
      const from = Math.max(before, at - LONGEST_SAMPLE_S);
      before = at;
      if (value === null || value === undefined) continue;
      for (let cell = Math.max(0, Math.min(cellOf(from) + 1, cellOf(at))); cell <= Math.min(CELLS - 1, cellOf(at)); cell++) {
        worst[cell] = Math.min(worst[cell] ?? 1, value);
      }
    }
    worst.forEach((value, at) => setAttribute(cells[at], "class", level(value)));
  };
  return { node, update };
};

export const level = (attainment) => {
  if (attainment === null || attainment === undefined) return "none";
  if (attainment >= 0.99) return "good";
  return attainment >= 0.95 ? "fair" : "bad";
};

// A ring of 270 degrees, filled clockwise.
export const ring = (label) => {
  const turn = 2 * Math.PI * 40;
  const whole = 0.75 * turn;
  const shape = { cx: 50, cy: 50, r: 40, transform: "rotate(135 50 50)" };
  const track = s("circle", { ...shape, class: "track", "stroke-dasharray": `${whole} ${turn}` });
  const value = s("circle", { ...shape, class: "value", "stroke-dasharray": `0 ${turn}` });
  const node = s("svg", { class: "ring", viewBox: "0 0 100 100", role: "img", "aria-label": label }, track, value);
  const update = (share) => {
    const part = share === null ? 0 : Math.max(0, Math.min(1, share));
    setAttribute(value, "stroke-dasharray", `${(part * whole).toFixed(2)} ${turn.toFixed(2)}`);
    setAttribute(value, "data-level", share === null ? "none" : part >= 0.95 ? "bad" : part >= 0.8 ? "fair" : "good");
  };
  return { node, update };
};
