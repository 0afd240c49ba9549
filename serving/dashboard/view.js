// Draws snapshots of an engine (scheduler/engine/monitor.py). The page and the widget in Jupyter share it.

import { duration, el, mark, say } from "./format.js";
import { makeModelsPanel } from "./models.js";
import { makeJobsPanel } from "./jobs.js";
import { makeSlowPanel } from "./slow.js";
import { makeSmPanel } from "./sm_grid.js";
import { makeTenantsPanel } from "./tenants.js";
import { makeTextsPanel } from "./texts.js";
import { makeTiles } from "./tiles.js";

// `switchPolicy(name)` returns a promise; `extras` are further controls, `panels` further panels.
export function createView(root, { switchPolicy, extras = [], foot = [], panels = [] }) {
  const device = el("span", { class: "pp-device" });
  const status = el("span", { class: "pp-status", role: "status", "data-state": "connecting" }, "connecting …");
  const policy = el("select", { disabled: true });
  const choice = el("label", { hidden: true }, "Policy", policy);
  const about = el("p", { class: "pp-about", role: "status" });
  const banner = el("div", { class: "pp-banner", role: "alert", hidden: true });
  const head = el("header", { class: "pp-head" },
    el("h1", { class: "pp-brand" }, "paellapy"), device, status, el("span", { class: "pp-space" }),
    el("div", { class: "pp-controls" }, choice, ...extras), about);
  const tiles = makeTiles();
  const sms = makeSmPanel();
  const models = makeModelsPanel();
  const tenants = makeTenantsPanel();
  const texts = makeTextsPanel();
  const slow = makeSlowPanel();
  const jobs = makeJobsPanel();
  const uptime = el("span");
  const body = el("div", { class: "pp-body", hidden: true }, tiles.node,
    el("div", { class: "pp-panels" }, sms.node, models.node, texts.node, ...panels, tenants.node, jobs.node, slow.node), el("footer", { class: "pp-foot" }, uptime, ...foot));
  const waiting = el("p", { class: "pp-empty" }, "Waiting for the first numbers …");
  root.classList.add("pp-view");
  root.replaceChildren(head, banner, waiting, body);
  let switching = false;
  let wrong = "";
  let latest = null;
  let connection = { state: "connecting", text: "connecting …" };

  policy.addEventListener("change", async () => {
    switching = policy.disabled = true;
    wrong = "";
    try {
      await switchPolicy(policy.value);
    } catch (error) {
      wrong = String(error.message ?? error);
    }
    switching = false;
    if (latest) update(latest);
  });

  function update(snapshot) {
    latest = snapshot;
    say(device, snapshot.virtual ? `${snapshot.device}: this host computes the data, so latencies are longer` : snapshot.device);
    body.hidden = choice.hidden = false;
    waiting.hidden = true;
    tiles.update(snapshot);
    sms.update(snapshot);
    models.update(snapshot);
    texts.update(snapshot);
    tenants.update(snapshot);
    slow.update(snapshot);
    jobs.update(snapshot);
    drawPolicy(snapshot.policy);
    say(uptime, `paellapy ${snapshot.version} · up ${duration(snapshot.uptime_s)}`);
    drawConnection();
    if (!banner.dataset.kept) {
      banner.hidden = snapshot.state !== "failed";
      if (!banner.hidden) say(banner, `The GPU failed and takes no more requests: ${snapshot.failure}`);
    }
  }

  function drawPolicy({ current, choices }) {
    const names = choices.map((c) => c.name).join("\n");
    if (policy.dataset.names !== names) {
      policy.dataset.names = names;
      policy.replaceChildren(...choices.map((c) => el("option", { value: c.name, title: c.about }, c.name)));
    }
    if (!switching) {
      if (policy.value !== current) policy.value = current;
      policy.disabled = connection.state !== "live";
    }
    mark(about, "pp-wrong", wrong);
    say(about, wrong || (choices.find((c) => c.name === current)?.about ?? ""));
  }

  function drawConnection() {
    let { state, text } = connection;
    if (state === "live" && latest && latest.state !== "running") {
      state = latest.state === "failed" ? "failed" : "paused";
      text = { failed: "GPU failed", draining: "stopping", closed: "closed", restarting: "engine restarting" }[latest.state] ?? latest.state;
    }
    if (state === "live" && latest?.ready === false) {
      state = latest.failed.length ? "failed" : "paused";
      text = latest.loading.length && !latest.failed.length ? "loading models" : "not ready";
    }
    if (status.dataset.state !== state) status.dataset.state = state;
    say(status, text);
    mark(body, "pp-stale", connection.state === "gone");
    if (!switching) policy.disabled = !latest || connection.state !== "live";
  }

  return {
    update,
    setConnection(state, text) {
      connection = { state, text };
      drawConnection();
    },
    // Shows a message that needs an answer; null removes it.
    ask(node) {
      banner.hidden = node === null;
      waiting.hidden = node !== null || latest !== null;
      if (node === null) delete banner.dataset.kept;
      else {
        banner.dataset.kept = "1";
        banner.replaceChildren(node);
      }
    },
    destroy() {
      sms.destroy();
      root.replaceChildren();
    },
  };
}
