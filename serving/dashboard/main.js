// The page: snapshots from the server's events, the policy back to it, a key where the server wants one.

import { el } from "./format.js";
import { createView } from "./view.js";
import { makeWriter } from "./writer.js";

const SILENCE_MS = 6000; // the server sends five snapshots a second
const RETRY_S = [1, 2, 4, 8];

const theme = el("button", { type: "button" });
const metrics = link("metrics", "metrics");
const writer = makeWriter((path, options) => fetch(path, { ...options, headers: headers(options.headers) }));
const view = createView(document.getElementById("view"), {
  switchPolicy,
  extras: [theme],
  panels: [writer.node],
  foot: [link("docs", "addresses"), metrics],
});
let key = sessionStorage.getItem("paellapy-key") ?? "";
let stream = null;
let attempt = 0;
let offered = "";

function link(href, text) {
  return el("a", { href }, text);
}

function headers(more = {}) {
  return key ? { ...more, "X-API-Key": key } : more;
}

async function problem(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function switchPolicy(name) {
  const response = await fetch("dashboard/policy", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json", "X-Paellapy": "1" }),
    body: JSON.stringify({ policy: name }),
  });
  if (!response.ok) throw new Error(await problem(response));
}

// --- events: by fetch and not by EventSource, which cannot send a key

async function listen(signal) {
  const response = await fetch("dashboard/events", { headers: headers(), signal, cache: "no-store" });
  if (response.status === 401) {
    askForKey();
    return "key";
  }
  if (!response.ok) throw new Error(await problem(response));
  view.ask(null);
  metrics.hidden = key !== ""; // a link cannot send one
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return "over";
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    // Only the latest counts: a page that was busy does not draw what is past.
    const latest = events.at(-1);
    if (latest?.startsWith("data: ")) {
      attempt = 0;
      stream?.heard();
      view.setConnection("live", "live");
      const snapshot = JSON.parse(latest.slice(6));
      view.update(snapshot);
      offerToWrite(snapshot);
    }
  }
}

// The writer asks again for its models whenever a model has come or gone.
function offerToWrite({ ready, loading }) {
  const now = `${ready} ${loading.length}`;
  if (now === offered) return;
  offered = now;
  writer.update().catch(() => {
    offered = "";
  });
}

async function connect() {
  disconnect();
  const control = new AbortController();
  let timer = 0;
  const mine = {
    heard() {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE_MS);
    },
    stop() {
      clearTimeout(timer);
      control.abort();
    },
  };
  stream = mine;
  mine.heard();
  let why = "";
  try {
    if ((await listen(control.signal)) === "key") return;
  } catch (error) {
    why = error instanceof TypeError || error.name === "AbortError" ? "" : error.message;
  }
  clearTimeout(timer);
  if (stream === mine) retry(why);
}

function disconnect() {
  const old = stream;
  stream = null;
  old?.stop();
}

function retry(why) {
  let left = RETRY_S[Math.min(attempt, RETRY_S.length - 1)];
  attempt += 1;
  const mine = { stop: () => clearInterval(ticker) };
  const tell = () => view.setConnection("gone", `${why || "server gone"}, retrying in ${left} s`);
  const ticker = setInterval(() => {
    left -= 1;
    if (left > 0) tell();
    else connect();
  }, 1000);
  stream = mine;
  tell();
}

function askForKey() {
  disconnect();
  metrics.hidden = true;
  const input = el("input", { type: "password", "aria-label": "API key", autocomplete: "off", placeholder: "API key" });
  const form = el("form", {
    onsubmit: (event) => {
      event.preventDefault();
      key = input.value.trim();
      sessionStorage.setItem("paellapy-key", key);
      view.setConnection("connecting", "connecting …");
      connect();
    },
  }, input, el("button", { type: "submit" }, "Open"));
  const text = key ? "This server does not know this API key." : "This server needs an API key.";
  view.ask(el("div", { class: "pp-controls" }, el("span", {}, text), form));
  view.setConnection("gone", "key needed");
  input.focus();
}

// Nobody looks at a hidden page: let the server rest.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    disconnect();
    view.setConnection("paused", "paused while hidden");
  } else connect();
});

// --- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");

function drawTheme() {
  const chosen = localStorage.getItem("paellapy-theme");
  const now = chosen ?? (dark.matches ? "dark" : "light");
  if (chosen) document.documentElement.dataset.theme = chosen;
  theme.textContent = now === "dark" ? "Light" : "Dark";
  theme.title = `Change to ${now === "dark" ? "light" : "dark"} colours`;
  theme.onclick = () => {
    localStorage.setItem("paellapy-theme", now === "dark" ? "light" : "dark");
    drawTheme();
  };
}

dark.addEventListener("change", drawTheme);
drawTheme();
connect();
