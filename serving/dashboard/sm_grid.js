// Every SM as a cell: resident warps ÷ the most it holds, since the last snapshot. Below it, the core's own account.

import { amountColour, amountRamp, scaleEnd } from "./colours.js";
import { bytes, count, digits, el, mark, percent, rate, say } from "./format.js";

const RESOURCE_NAMES = { blocks: "Blocks", warps: "Warps", registers: "Registers", shared_bytes: "Shared memory", issue: "Kernel issue" };
const SOURCE_NOTES = {
  exact: "resident warps ÷ maximum since the last update; kernels take their modelled times, shorter than this host's",
  sampled: "resident warps ÷ maximum since the last update, sampled from instrumented kernels",
  none: "no loaded model has instrumented kernels",
};

export function makeSmPanel() {
  const note = el("p");
  const cells = el("div", { class: "pp-cells", role: "img", tabindex: "0" });
  const rows = el("div", { class: "pp-rows", "aria-hidden": "true" });
  const grid = el("div", { class: "pp-sms" }, rows, cells);
  const ramp = el("span", { class: "pp-ramp", "aria-hidden": "true" });
  ramp.style.background = amountRamp();
  const top = el("span");
  const readout = el("span", { class: "pp-readout", "aria-live": "off" });
  const legend = el("div", { class: "pp-legend" }, el("span", {}, "0"), ramp, top, readout);
  const always = el("button", { type: "button", "aria-pressed": "true", title: "Mean over all the time" }, "Over time");
  const whenBusy = el("button", { type: "button", "aria-pressed": "false", title: "Mean over the time in which the SM had a block" }, "While busy");
  const modes = el("div", { class: "pp-switch", role: "group", "aria-label": "Period of the mean" }, always, whenBusy);
  const missing = el("p", { class: "pp-empty" },
    "Only instrumented kernels report the warps on each SM: make kernels with pp.kernel to see them here. The bars below show the work that the core has launched.");
  const uses = el("div", { class: "pp-uses" });
  const node = el("section", { class: "pp-panel", "aria-label": "SMs" },
    el("div", { class: "pp-title" }, el("h2", {}, "SMs"), note, modes), grid, legend, missing, uses);
  let latest = null;
  let busyOnly = false;
  let pointed = -1;
  let columns = 0;

  for (const [button, value] of [[always, false], [whenBusy, true]]) {
    button.addEventListener("click", () => {
      busyOnly = value;
      always.setAttribute("aria-pressed", String(!value));
      whenBusy.setAttribute("aria-pressed", String(value));
      if (latest) update(latest);
    });
  }
  cells.addEventListener("pointermove", (event) => point([...cells.children].indexOf(event.target)));
  cells.addEventListener("pointerleave", () => point(-1));
  cells.addEventListener("blur", () => point(-1));
  cells.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step || !latest?.sms.occupancy) return;
    event.preventDefault();
    point(Math.min(latest.sms.count - 1, Math.max(0, pointed < 0 ? 0 : pointed + step)));
  });
  // In the next frame: rows that come or go change the very size that is watched.
  const watcher = new ResizeObserver(() => requestAnimationFrame(() => latest?.sms.occupancy && arrange(latest.sms.count)));
  watcher.observe(grid);

  function point(index) {
    cells.children[pointed]?.classList.remove("pp-at");
    pointed = index;
    cells.children[pointed]?.classList.add("pp-at");
    if (latest) read(latest.sms);
  }

  function shown(sms) {
    return busyOnly ? sms.occupancy.map((o, k) => (sms.busy[k] > 0 ? o / sms.busy[k] : 0)) : sms.occupancy;
  }

  function read(sms) {
    if (!sms.occupancy) return;
    const values = shown(sms);
    if (pointed >= 0) {
      const warps = values[pointed] * sms.max_warps;
      say(readout, `SM ${pointed}: ${digits(warps)} of ${sms.max_warps} warps, busy ${percent(sms.busy[pointed])}`);
      return;
    }
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    say(readout, `mean ${percent(mean)}, largest ${percent(Math.max(...values))}`);
  }

  function arrange(n) {
    const width = grid.clientWidth - 34;
    if (width <= 0) return;
    // Cells of about 23 pixels, and full rows where the number of SMs allows it.
    const wish = Math.min(n, Math.max(4, width / 23));
    let best = Math.round(wish);
    let distance = Infinity;
    for (let k = Math.ceil(wish * 0.7); k <= Math.min(n, wish * 1.4); k += 1) {
      if (n % k === 0 && Math.abs(Math.log(k / wish)) < distance) {
        best = k;
        distance = Math.abs(Math.log(k / wish));
      }
    }
    if (best === columns && cells.children.length === n) return;
    columns = best;
    cells.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    while (cells.children.length > n) cells.lastChild.remove();
    while (cells.children.length < n) cells.append(el("div", { class: "pp-cell" }));
    rows.replaceChildren(...Array.from({ length: Math.ceil(n / columns) }, (_, k) => el("span", {}, String(k * columns))));
  }

  function update(snapshot) {
    latest = snapshot;
    const { sms } = snapshot;
    say(note, SOURCE_NOTES[sms.source]);
    const known = Boolean(sms.occupancy);
    for (const part of [grid, legend, modes]) part.hidden = !known;
    missing.hidden = known;
    if (known) {
      arrange(sms.count);
      const values = shown(sms);
      const end = scaleEnd(Math.max(...values));
      say(top, percent(end));
      values.forEach((value, k) => {
        const cell = cells.children[k];
        if (!cell) return;
        mark(cell, "pp-on", value > 0);
        cell.style.background = value > 0 ? amountColour(value / end) : "";
      });
      read(sms);
      const busy = sms.busy.filter((b) => b > 0).length;
      cells.setAttribute("aria-label", `${sms.count} SMs, ${busy} of them busy; ${readout.textContent}`);
    }
    drawUses(snapshot);
  }

  function drawUses(snapshot) {
    if (uses.children.length === 0) {
      uses.append(el("h3", {}, "Launched by the core ", el("span", {}, "as part of the GPU's capacity; paler: queued")));
      for (const { name } of snapshot.resources) {
        uses.append(el("span", {}, RESOURCE_NAMES[name] ?? name),
          el("div", { class: "pp-meter", role: "img" }, el("i"), el("i")), el("span", { class: "pp-value" }));
      }
      uses.append(el("span", {}, "Memory"), el("div", { class: "pp-meter", role: "img" }, el("i"), el("i")), el("span", { class: "pp-value" }));
    }
    const { memory } = snapshot;
    const lines = snapshot.resources.map((r) => [r.resident, r.pending, r.capacity, amount(r.name)]);
    lines.push([memory.held_bytes, 0, memory.budget_bytes, bytes]);
    lines.forEach(([resident, pending, capacity, format], k) => {
      const [label, meter, value] = [1, 2, 3].map((j) => uses.children[3 * k + j]);
      const share = (part) => Math.min(100, (100 * part) / (capacity || 1));
      meter.children[0].style.width = `${share(resident)}%`;
      meter.children[1].style.left = `${share(resident)}%`;
      meter.children[1].style.width = `${share(pending)}%`;
      say(value, `${format(resident)} of ${format(capacity)}`);
      meter.setAttribute("aria-label", `${label.textContent}: ${value.textContent}`);
    });
  }

  return { node, update, destroy: () => watcher.disconnect() };
}

function amount(name) {
  if (name === "shared_bytes") return bytes;
  return name === "issue" ? (value) => `${rate(value / 1000)}k/s` : count;
}
