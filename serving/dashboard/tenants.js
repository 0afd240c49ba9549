// Tenants: each one's share and limit of the GPU, and its recent use. Hidden while there are none.

import { count, el, percent, say } from "./format.js";

export function makeTenantsPanel() {
  const rows = el("tbody");
  const head = el("tr", {}, ...["tenant", "share", "limit", "GPU time", "done", "live"].map((text) => el("th", { scope: "col" }, text)));
  const table = el("table", { class: "pp-tenants" }, el("thead", {}, head), rows);
  const node = el("section", { class: "pp-panel", "aria-label": "Tenants", hidden: true },
    el("div", { class: "pp-title" }, el("h2", {}, "Tenants"), el("p", {}, "part of the GPU's time in the last 2 s")), table);
  const known = new Map();

  function update(snapshot) {
    const tenants = snapshot.tenants ?? [];
    node.hidden = tenants.length === 0;
    for (const tenant of tenants) {
      let cells = known.get(tenant.name);
      if (!cells) {
        cells = Array.from({ length: 5 }, () => el("td"));
        rows.append(el("tr", {}, el("th", { scope: "row" }, tenant.name), ...cells));
        known.set(tenant.name, cells);
      }
      const limit = tenant.limit === null ? "–" : percent(tenant.limit);
      [String(tenant.share), limit, percent(tenant.gpu_share), count(tenant.completed), count(tenant.live)]
        .forEach((text, k) => say(cells[k], text));
    }
  }

  return { node, update };
}
