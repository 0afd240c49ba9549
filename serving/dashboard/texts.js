// Language models: what they write, and how fast, over the last seconds. Hidden while there is none.

import { count, el, milliseconds, percent, rate, say } from "./format.js";

const LATELY_S = 10;
const TEXT_COLUMNS = ["model", "writing", "waiting", "tokens/s", "prompts/s", "batch", "first token p50", "first token p99", "next p50", "next p99", "pages", "prefix hits"];

export function makeTextsPanel() {
  const body = el("tbody");
  const head = TEXT_COLUMNS.map((text, k) => el("th", { scope: "col", class: k ? "" : "pp-text" }, text));
  const table = el("table", { class: "pp-slow pp-texts" }, el("thead", {}, el("tr", {}, ...head)), body);
  const node = el("section", { class: "pp-panel pp-wide", "aria-label": "Language models", hidden: true },
    el("div", { class: "pp-title" }, el("h2", {}, "Language models"), el("p", {}, `the last ${LATELY_S} s; prompts in tokens`)), table);
  const history = [];

  function update(snapshot) {
    const models = snapshot.language_models ?? [];
    node.hidden = models.length === 0;
    history.push([snapshot.time_s, new Map(models.map((each) => [each.name, each]))]);
    while (history[0][0] < snapshot.time_s - LATELY_S) history.shift();
    while (body.children.length > models.length) body.lastChild.remove();
    while (body.children.length < models.length) {
      body.append(el("tr", {}, ...TEXT_COLUMNS.map((name, k) => el("td", { class: k ? "" : "pp-text", "data-name": name }))));
    }
    models.forEach((now, k) => {
      const [since, all] = history.find(([, each]) => each.has(now.name));
      textRow(now, all.get(now.name), snapshot.time_s - since).forEach((text, i) => say(body.children[k].children[i], text));
    });
  }

  return { node, update };
}

function textRow(now, before, seconds) {
  const more = (key) => Math.max(0, now[key] - before[key]);
  const perSecond = (key) => (seconds > 0 ? rate(more(key) / seconds) : "–");
  const part = (a, b) => (b > 0 ? a / b : null);
  const steps = more("steps");
  return [now.name, count(now.running), count(now.waiting), perSecond("tokens"), perSecond("prompt_tokens"),
    steps ? (more("batched") / steps).toFixed(1) : "–",
    ...["ttft", "tbt"].flatMap((key) => [0.5, 0.99].map((share) => milliseconds(lateQuantile(now[key], before[key], share)))),
    percent(1 - now.free_pages / now.pages), percent(part(more("shared_tokens"), more("prompt_tokens")))];
}

// The upper bound, in milliseconds, of the share of times that were counted since.
function lateQuantile(now, before, share) {
  const counts = now.counts.map((each, k) => Math.max(0, each - before.counts[k]));
  let left = share * counts.reduce((a, b) => a + b, 0);
  if (left === 0) return null;
  const k = counts.findIndex((each) => (left -= each) <= 0);
  return 1000 * now.bounds_s[Math.min(k, now.bounds_s.length - 1)];
}
