// Work beside requests: background jobs, leases, other processes. Hidden while there is none.

import { count, duration, el, say } from "./format.js";

const JOB_KINDS = { background: "background job", leases: "leases", process: "other process" };

export function makeJobsPanel() {
  const body = el("tbody");
  const head = (text, name = "") => el("th", { scope: "col", class: name }, text);
  const table = el("table", { class: "pp-slow" },
    el("thead", {}, el("tr", {}, head("job", "pp-text"), head("kind", "pp-text pp-minor"), head("state", "pp-text"),
      head("priority", "pp-minor"), head("share", "pp-minor"), head("done"), head("per s"), head("waited", "pp-minor"))), body);
  const node = el("section", { class: "pp-panel pp-wide", "aria-label": "Jobs beside requests", hidden: true },
    el("div", { class: "pp-title" }, el("h2", {}, "Beside requests"), el("p", {}, "jobs, leases and other processes")), table);

  function update(snapshot) {
    const jobs = snapshot.jobs ?? [];
    node.hidden = jobs.length === 0;
    while (body.children.length > jobs.length) body.lastChild.remove();
    while (body.children.length < jobs.length) {
      body.append(el("tr", {}, ...["pp-text pp-who", "pp-text pp-minor", "pp-text", "pp-minor", "pp-minor", "", "", "pp-minor"]
        .map((name) => el("td", { class: name }))));
    }
    jobs.forEach((job, k) => {
      const texts = [job.name, JOB_KINDS[job.kind] ?? job.kind, job.state, String(job.priority), job.share.toFixed(2),
        count(job.steps ?? job.launches ?? 0), job.steps_per_s === undefined ? "" : job.steps_per_s.toFixed(1),
        job.waited_ms === undefined ? "" : duration(job.waited_ms / 1000)];
      texts.forEach((text, i) => say(body.children[k].children[i], text));
    });
  }

  return { node, update };
}
