// The first row: six numbers, with their history of up to a minute.

import { count, el, mark, percent, rate, say, svgEl } from "./format.js";

const KEPT_S = 60;
const LEAST_S = 15;

export function makeTiles() {
  const tiles = {
    throughput: tile("Throughput", "requests/s in 2 s"),
    requests: tile("In flight", "requests now"),
    waiting: tile("Waiting", "requests now"),
    within: tile("Within target", ""),
    busy: tile("GPU busy", "of the last 2 s"),
    occupancy: tile("SM occupancy", "of warps"),
  };
  const history = [];
  const refusals = [];

  function update(snapshot) {
    const { models, sms } = snapshot;
    const judged = models.filter((m) => m.within_target !== null);
    const weight = judged.reduce((sum, m) => sum + m.recent + m.expired, 0);
    const values = {
      throughput: snapshot.per_s,
      requests: snapshot.queue.requests,
      waiting: Math.max(0, snapshot.queue.requests - snapshot.queue.running),
      within: weight ? judged.reduce((sum, m) => sum + m.within_target * (m.recent + m.expired), 0) / weight : null,
      busy: snapshot.gpu_busy ?? null,
      occupancy: average(sms.occupancy),
    };
    history.push([snapshot.time_s, values]);
    while (history.length && history[0][0] < snapshot.time_s - KEPT_S) history.shift();
    for (const [key, one] of Object.entries(tiles)) {
      const format = { throughput: rate, requests: count, waiting: count }[key] ?? percent;
      say(one.value, values[key] === null ? "–" : format(values[key]));
      draw(one, history.map(([at, all]) => [at, all[key]]).filter(([, v]) => v !== null), snapshot.time_s);
    }
    mark(tiles.within.value, "pp-late", values.within !== null && values.within < 0.99);
    const refused = models.reduce((sum, m) => sum + (m.refused ?? 0), 0);
    refusals.push([snapshot.time_s, refused]);
    while (refusals[0][0] < snapshot.time_s - KEPT_S) refusals.shift();
    const lately = Math.max(0, refused - refusals[0][1]);
    const answers = `of answers in ${Math.round(snapshot.window_s) || 1} s`;
    say(tiles.within.unit, lately ? `${answers}; ${count(lately)} refused in a minute` : answers);
    mark(tiles.within.unit, "pp-late", lately > 0);
    say(tiles.occupancy.unit, !sms.occupancy ? "not reported" : snapshot.virtual ? "of warps, by modelled times" : "of warps");
  }

  return { node: el("dl", { class: "pp-tiles" }, ...Object.values(tiles).map((t) => t.node)), update };
}

function tile(name, unitText) {
  const value = el("span", {}, "–");
  const unit = el("small", {}, unitText);
  const area = svgEl("polygon");
  const line = svgEl("polyline");
  const spark = svgEl("svg", { class: "pp-spark", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return { node: el("div", { class: "pp-tile" }, el("dt", {}, name), el("dd", {}, value, unit), spark), value, unit, area, line };
}

function draw(one, points, now) {
  const span = points.length ? Math.min(KEPT_S, Math.max(LEAST_S, now - points[0][0])) : KEPT_S;
  const top = Math.max(1e-9, ...points.map(([, v]) => v));
  const placed = points.map(([at, v]) => `${(100 * (1 - (now - at) / span)).toFixed(2)},${(98 - 94 * (v / top)).toFixed(2)}`);
  one.line.setAttribute("points", placed.join(" "));
  const first = placed.length ? placed[0].split(",")[0] : "0";
  one.area.setAttribute("points", placed.length ? `${first},100 ${placed.join(" ")} 100,100` : "");
}

function average(values) {
  return values && values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}
