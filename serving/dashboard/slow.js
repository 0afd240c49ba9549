// The slowest requests of the last minute: waiting, each segment, done, and when they were due.

import { nameColour } from "./colours.js";
import { count, duration, el, mark, milliseconds, say, svgEl } from "./format.js";

export function makeSlowPanel() {
  const scale = el("th", { class: "pp-text", scope: "col" }, "0");
  const body = el("tbody");
  const table = el("table", { class: "pp-slow" },
    el("colgroup", {}, ...["pp-c-model", "pp-c-batch pp-minor", "pp-c-time pp-minor", "pp-c-time pp-minor", "pp-c-time",
      "pp-c-when pp-minor", ""].map((name) => el("col", { class: name }))),
    el("thead", {}, el("tr", {}, head("model", "pp-text"), head("batch", "pp-minor"), head("waited", "pp-minor"),
      head("ran", "pp-minor"), head("latency"), head("when", "pp-minor"), scale)), body);
  const empty = el("p", { class: "pp-empty" }, "No request has been answered since this view was opened. The slowest of the last minute will appear here.");
  const key = el("div", { class: "pp-key" }, keyed("pp-k-wait", "waiting"), keyed("pp-k-run", "segments running"),
    keyed("pp-k-held", "held back between segments"), keyed("pp-k-due", "deadline, else target"));
  const node = el("section", { class: "pp-panel pp-wide", "aria-label": "Slow requests" },
    el("div", { class: "pp-title" }, el("h2", {}, "Slowest requests"), el("p", {}, "of the last minute, by latency ÷ deadline or target")),
    empty, table, key);

  function update(snapshot) {
    const { slow, models } = snapshot;
    empty.hidden = slow.length > 0;
    table.hidden = key.hidden = slow.length === 0;
    const longest = Math.max(1e-6, ...slow.map((s) => s.latency_ms));
    // A deadline far to the right would only make the rest small.
    const end = Math.max(longest, ...slow.map(due).filter((ms) => ms <= 1.6 * longest)) * 1.02;
    say(scale, slow.length ? `0 to ${milliseconds(end)}` : "");
    while (body.children.length > slow.length) body.lastChild.remove();
    while (body.children.length < slow.length) body.append(makeRow());
    slow.forEach((request, k) => drawRow(body.children[k], request, end, nameColour(models.findIndex((m) => m.name === request.model))));
  }

  return { node, update };
}

function head(text, name = "") {
  return el("th", { scope: "col", class: name }, text);
}

function keyed(name, text) {
  return el("span", {}, el("i", { class: name }), text);
}

// A request with neither a deadline nor a target is never late.
function due(request) {
  return request.deadline_ms ?? request.target_ms ?? Infinity;
}

function makeRow() {
  const plot = svgEl("svg", { viewBox: "0 0 100 18", preserveAspectRatio: "none", "aria-hidden": "true" });
  return el("tr", {}, el("td", { class: "pp-text pp-who" }), el("td", { class: "pp-minor" }), el("td", { class: "pp-minor" }),
    el("td", { class: "pp-minor" }), el("td"), el("td", { class: "pp-minor" }), el("td", { class: "pp-text" }, el("div", { class: "pp-way", role: "img" }, plot)));
}

function drawRow(row, request, end, colour) {
  const [who, batch, waited, ran, latency, when, way] = row.children;
  const started = request.started_ms ?? request.latency_ms;
  const segments = request.segments_ms;
  const running = segments.reduce((sum, [a, b]) => sum + b - a, 0);
  const late = request.latency_ms > due(request) || request.status !== "ok";
  who.style.setProperty("--own", colour);
  who.title = request.model;
  say(who, request.model);
  say(batch, request.batch ? count(request.batch) : "–");
  say(waited, milliseconds(started));
  const took = segments.length ? running : request.latency_ms - started;
  say(ran, request.status === "ok" ? milliseconds(took) : "–");
  say(latency, milliseconds(request.latency_ms));
  mark(latency, "pp-late", late);
  say(when, `${duration(request.age_s)} ago`);
  const x = (ms) => (100 * ms) / end;
  const parts = [];
  if (started > 0) {
    parts.push(svgEl("rect", { class: "pp-wait-ground", x: 0, y: 4, width: x(started), height: 10 }));
    parts.push(svgEl("rect", { class: "pp-wait", x: 0, y: 4, width: x(started), height: 10 }));
  }
  if (!segments.length && request.status === "ok") { // the times of its segments are no longer known
    const bar = svgEl("rect", { class: "pp-ran", x: x(started), y: 4, width: Math.max(0.15, x(request.latency_ms - started)), height: 10 });
    bar.style.fill = colour;
    parts.push(bar);
  }
  segments.forEach(([from, to], k) => {
    const before = k ? segments[k - 1][1] : started;
    if (x(from) - x(before) > 0.15) parts.push(svgEl("line", { class: "pp-held", x1: x(before), x2: x(from), y1: 9, y2: 9 }));
    const gap = segments.length > 1 && x(to) - x(from) > 0.6 ? 0.15 : 0; // so that neighbours can be told apart
    const bar = svgEl("rect", { x: x(from), y: 2, width: Math.max(0.15, x(to) - x(from) - gap), height: 14 });
    bar.style.fill = colour;
    const title = svgEl("title");
    title.textContent = `${request.whole ? "the whole program" : `segment ${k + 1} of ${segments.length}`}: ${milliseconds(to - from)}`;
    bar.append(title);
    parts.push(bar);
  });
  if (due(request) <= end) parts.push(svgEl("line", { class: "pp-due", x1: x(due(request)), x2: x(due(request)), y1: 0, y2: 18 }));
  const plot = way.firstChild;
  plot.firstChild.replaceChildren(...parts);
  const outcome = request.status === "ok" ? "done" : request.status;
  plot.setAttribute("aria-label", `Request ${request.request}: waited ${milliseconds(started)}, `
    + `${segments.length} segments ran ${milliseconds(running)}, ${outcome} after ${milliseconds(request.latency_ms)}${due(request) < Infinity ? `, due at ${milliseconds(due(request))}` : ""}`);
}
