// The widget in Jupyter: the server's dashboard over snapshots of an engine in the kernel. live_widget.py puts its modules in.

import { el } from "./format.js";
import { createView } from "./view.js";

const KERNEL_SILENCE_MS = 5000;
const KERNEL_PATIENCE_MS = 4000;

function render({ model, el: root }) {
  const pause = el("button", { type: "button" });
  const view = createView(root, { switchPolicy, extras: [pause] });
  root.classList.add("pp-widget");
  const waiting = new Map();
  let asked = 0;
  let silence = 0;

  // The kernel answers between two cells; while a cell runs, it sends nothing.
  function switchPolicy(name) {
    asked += 1;
    const number = asked;
    return new Promise((resolve, reject) => {
      const late = () => {
        waiting.delete(number);
        reject(new Error("The kernel is busy: the policy changes when its cell is done."));
      };
      waiting.set(number, { resolve, reject, timer: setTimeout(late, KERNEL_PATIENCE_MS) });
      model.send({ kind: "policy", number, name });
    });
  }

  function answer({ kind, number, error }) {
    const who = kind === "policy" ? waiting.get(number) : undefined;
    if (!who) return;
    waiting.delete(number);
    clearTimeout(who.timer);
    if (error) who.reject(new Error(error));
    else who.resolve();
  }

  function drawPause() {
    const paused = model.get("paused");
    pause.textContent = paused ? "Go on" : "Pause";
    pause.title = paused ? "Follow the engine again" : "Hold the picture; the engine runs on";
    pause.setAttribute("aria-pressed", String(paused));
    heard();
  }

  function heard() {
    clearTimeout(silence);
    if (model.get("paused")) {
      view.setConnection("paused", "paused");
      return;
    }
    view.setConnection("live", "live");
    silence = setTimeout(() => view.setConnection("gone", "no news from the kernel"), KERNEL_SILENCE_MS);
  }

  function drawSnapshot() {
    const snapshot = model.get("snapshot");
    if (!snapshot || !snapshot.models) return;
    heard();
    view.update(snapshot);
  }

  pause.addEventListener("click", () => {
    model.set("paused", !model.get("paused"));
    model.save_changes();
  });
  const themes = new MutationObserver(() => followTheme(root));
  for (const node of [document.documentElement, document.body]) themes.observe(node, { attributes: true });
  followTheme(root);
  model.on("change:snapshot", drawSnapshot);
  model.on("change:paused", drawPause);
  model.on("msg:custom", answer);
  drawPause();
  drawSnapshot();
  return () => {
    clearTimeout(silence);
    themes.disconnect();
    for (const { timer } of waiting.values()) clearTimeout(timer);
    model.off("change:snapshot", drawSnapshot);
    model.off("change:paused", drawPause);
    model.off("msg:custom", answer);
    view.destroy();
  };
}

// JupyterLab, VS Code and Colab each show in their own way that they are dark; none follows the system setting.
function followTheme(root) {
  const { body, documentElement: html } = document;
  const dark = body.dataset.jpThemeLight === "false" || body.classList.contains("vscode-dark")
    || html.getAttribute("theme") === "dark" || html.dataset.theme === "dark";
  root.style.colorScheme = dark ? "dark" : "light";
}

export default { render };
