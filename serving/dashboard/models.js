// Every model: its latencies against its target, its queue, its batches.

import { nameColour } from "./colours.js";
import { bytes, chosenTime, count, digits, el, mark, milliseconds, percent, rate, say, svgEl } from "./format.js";

const REFUSED_S = 10;

export function makeModelsPanel() {
  const note = el("p");
  const list = el("div", { class: "pp-models" });
  const empty = el("p", { class: "pp-empty" });
  const broken = el("p", { class: "pp-broken", role: "status", hidden: true });
  const node = el("section", { class: "pp-panel", "aria-label": "Models" },
    el("div", { class: "pp-title" }, el("h2", {}, "Models"), note), empty, broken, list);
  const cards = new Map();
  const refused = [];

  function update(snapshot) {
    const { models } = snapshot;
    const window = Math.round(snapshot.window_s) || 1;
    say(note, `latency, from arrival to answer, and batches: the last ${window} s; req/s and GPU time: the last ${Math.min(2, window)} s`);
    const loading = snapshot.loading ?? [];
    const failed = snapshot.failed ?? [];
    say(empty, loading.length ? `Loading ${loading.join(", ")} …` : "No model is loaded.");
    empty.hidden = loading.length === 0 && models.length + failed.length > 0;
    say(broken, failed.map((m) => `${m.name} could not be loaded: ${m.reason}`).join("\n"));
    broken.hidden = failed.length === 0;
    refused.push([snapshot.time_s, new Map(models.map((m) => [m.name, m.refused ?? 0]))]);
    while (refused.length > 1 && refused[0][0] < snapshot.time_s - REFUSED_S) refused.shift();
    const names = models.map((m) => m.name);
    for (const [name, card] of cards) {
      if (!names.includes(name)) {
        card.node.remove();
        cards.delete(name);
      }
    }
    const range = commonRange(models, snapshot.edges_ms);
    models.forEach((model, k) => {
      let card = cards.get(model.name);
      if (!card) {
        card = makeCard(model.name);
        cards.set(model.name, card);
        list.append(card.node);
      }
      const [since, before] = refused[0];
      const elapsed = Math.max(1, snapshot.time_s - since);
      const refusals = ((model.refused ?? 0) - (before.get(model.name) ?? model.refused ?? 0)) / elapsed;
      card.update(model, range, snapshot.edges_ms, nameColour(k), refusals, window);
    });
  }

  return { node, update };
}

function makeCard(name) {
  const title = el("h3", {}, name);
  const about = el("p");
  const trouble = el("p", { class: "pp-late" });
  const base = svgEl("line", { class: "pp-base", x1: 0, x2: 100, y1: 100, y2: 100 });
  const bars = svgEl("g");
  const plot = svgEl("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, base, bars);
  const targetText = el("span");
  const target = el("div", { class: "pp-target" }, targetText);
  const ticks = el("div", { "aria-hidden": "true" });
  const idle = el("span");
  const none = el("div", { class: "pp-none" }, idle);
  const chart = el("div", { class: "pp-chart", role: "img" }, plot, target, ticks, none);
  const facts = {};
  const list = el("dl", { class: "pp-facts" });
  for (const [key, text] of [["p50", "p50"], ["p95", "p95"], ["p99", "p99"], ["within", "in target"],
    ["rate", "req/s"], ["queue", "wait / run"], ["gpu", "GPU time"]]) {
    facts[key] = el("dd", {}, "–");
    list.append(el("div", {}, el("dt", {}, text), facts[key]));
  }
  const mean = el("span", {}, "–");
  const columns = el("span", { class: "pp-columns", role: "img" });
  list.append(el("div", { class: "pp-batch" }, el("dt", {}, "mean batch"), el("dd", {}, mean, columns)));
  const there = el("span");
  const weightsText = el("span");
  const weightsBar = el("span", { class: "pp-weights-bar" }, there);
  const weights = el("div", { class: "pp-weights", role: "img", hidden: true }, weightsBar, weightsText);
  const node = el("article", { class: "pp-model", "aria-label": `Model ${name}` },
    el("div", { class: "pp-name" }, title, about, weights, trouble), chart, list);

  function update(model, range, edges, colour, refusals, window) {
    node.style.setProperty("--own", colour);
    say(about, `${model.target_ms === null ? "no target" : `target ${chosenTime(model.target_ms)}`} · alone ${milliseconds(model.alone_ms)}`);
    weights.hidden = !model.weights;
    if (model.weights) {
      there.style.width = `${100 * model.weights.there}%`;
      say(weightsText, `${bytes(model.weights.bytes)} ${model.weights.state}`);
      weights.setAttribute("aria-label", `Weights of ${name}: ${model.weights.state}`);
    }
    const troubles = [];
    if (refusals > 0) troubles.push(`${rate(refusals)} refused/s`);
    if (model.expired) troubles.push(`${count(model.expired)} past their deadline`);
    say(trouble, troubles.join(" · "));
    const quantiles = model.latency_ms;
    for (const key of ["p50", "p95", "p99"]) {
      say(facts[key], milliseconds(quantiles?.[key]));
      mark(facts[key], "pp-late", quantiles && model.target_ms !== null && quantiles[key] > model.target_ms);
    }
    say(facts.within, percent(model.within_target));
    mark(facts.within, "pp-late", model.within_target !== null && model.within_target < 0.99);
    say(facts.rate, rate(model.per_s));
    say(facts.gpu, percent(model.gpu_share));
    say(facts.queue, `${count(model.waiting)} / ${count(model.running)}`);
    say(mean, model.mean_batch === null ? "–" : model.mean_batch.toFixed(1));
    drawBatches(columns, model);
    drawHistogram(model, range, edges);
    say(idle, model.recent ? "" : `no requests in the last ${window} s`);
    chart.setAttribute("aria-label", quantiles
      ? `Latencies of ${name}: median ${milliseconds(quantiles.p50)}, 99th percentile ${milliseconds(quantiles.p99)}`
      : `Latencies of ${name}: none`);
  }

  function drawHistogram(model, range, edges) {
    const largest = Math.max(1, ...model.histogram);
    const drawn = [];
    model.histogram.forEach((n, k) => {
      if (!n) return;
      const right = edges[Math.min(k, edges.length - 1)];
      const left = k ? edges[k - 1] : right / 1.33;
      const [x0, x1] = [range.place(left), range.place(right)];
      const over = model.target_ms !== null && Math.sqrt(left * right) > model.target_ms;
      const height = Math.max(2, (100 * n) / largest);
      const title = svgEl("title");
      title.textContent = `${milliseconds(left)} to ${milliseconds(right)}: ${count(n)}`;
      drawn.push(svgEl("rect", {
        class: over ? "pp-bar pp-over" : "pp-bar", x: x0 + 0.15, width: Math.max(0.2, x1 - x0 - 0.3), y: 100 - height, height,
      }, title));
    });
    bars.replaceChildren(...drawn);
    const at = model.target_ms === null ? null : range.place(model.target_ms);
    target.hidden = at === null || at < 0 || at > 100;
    if (!target.hidden) {
      target.style.left = `calc(${at}% - 1px)`;
      mark(target, "pp-flip", at > 70);
      say(targetText, `target ${chosenTime(model.target_ms)}`);
    }
    if (ticks.dataset.range !== range.key) {
      ticks.dataset.range = range.key;
      ticks.replaceChildren(...range.ticks.map((ms, k) => {
        const place = k === 0 ? " pp-first" : k === range.ticks.length - 1 ? " pp-last" : "";
        const label = el("span", { class: `pp-tick${place}` }, tickText(ms));
        label.style.left = `${range.place(ms)}%`;
        return label;
      }));
    }
  }

  return { node, update };
}

function tickText(ms) {
  if (ms >= 1000) return `${digits(ms / 1000, 1)} s`;
  return ms < 1 ? `${digits(ms * 1000, 1)} µs` : `${digits(ms, 1)} ms`;
}

// One axis for all models, in whole decades, so that their latencies compare at a glance.
function commonRange(models, edges) {
  let low = Infinity;
  let high = 0;
  for (const model of models) {
    model.histogram.forEach((n, k) => {
      if (!n) return;
      low = Math.min(low, k ? edges[k - 1] : edges[0]);
      high = Math.max(high, edges[Math.min(k, edges.length - 1)]);
    });
    if (model.target_ms !== null) {
      low = Math.min(low, model.target_ms / 1.5);
      high = Math.max(high, model.target_ms * 1.5);
    }
  }
  if (!(high > 0)) [low, high] = [0.1, 100];
  const first = Math.floor(Math.log10(low) + 1e-6);
  const last = Math.max(first + 2, Math.ceil(Math.log10(high) - 1e-6));
  const ticks = Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k));
  return { key: `${first} ${last}`, ticks, place: (ms) => (100 * (Math.log10(ms) - first)) / (last - first) };
}

// One column per batch size; beyond 16 sizes, one per power of two.
function drawBatches(node, model) {
  const coarse = model.max_batch > 16;
  const n = coarse ? Math.ceil(Math.log2(model.max_batch)) + 1 : model.max_batch;
  const heights = new Array(n).fill(0);
  for (const [size, batches] of Object.entries(model.batches)) {
    heights[Math.min(n - 1, coarse ? Math.ceil(Math.log2(Number(size))) : Number(size) - 1)] += batches;
  }
  const largest = Math.max(1e-9, ...heights);
  while (node.children.length > n) node.lastChild.remove();
  while (node.children.length < n) node.append(el("i"));
  heights.forEach((value, k) => {
    const upTo = coarse ? 2 ** k : k + 1;
    node.children[k].style.height = value ? `${Math.max(8, (100 * value) / largest)}%` : "0";
    node.children[k].title = `${coarse && k > 1 ? `${2 ** (k - 1) + 1} to ` : ""}${upTo}: ${count(value)} batches`;
  });
  const parts = Object.entries(model.batches).map(([size, batches]) => `${count(batches)} of ${size}`);
  node.setAttribute("aria-label", parts.length ? `Batches: ${parts.join(", ")}` : "No batches");
}
