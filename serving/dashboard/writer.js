// A prompt for a language model, and the text that it writes, as it comes. Hidden while there is no such model.

import { el, milliseconds, say } from "./format.js";

const TOKENS = 200; // at most, of one answer

// `ask(path, options)` fetches from this server, with a key where it wants one.
export function makeWriter(ask) {
  const model = el("select", { "aria-label": "Language model" });
  const prompt = el("textarea", { rows: "2", maxlength: "4000", "aria-label": "Prompt" }, "It is a truth universally acknowledged");
  const button = el("button", { type: "submit" }, "Write");
  const answer = el("p", { class: "pp-written" });
  const facts = el("p", { role: "status" });
  let control = null;
  const form = el("form", {
    onsubmit: (event) => {
      event.preventDefault();
      if (control) control.abort();
      else write();
    },
  }, prompt, el("div", { class: "pp-controls" }, model, button));
  const node = el("section", { class: "pp-panel pp-wide pp-writer", "aria-label": "Language model", hidden: true },
    el("div", { class: "pp-title" }, el("h2", {}, "Write"), facts), form, answer);

  async function write() {
    control = new AbortController();
    say(button, "Stop");
    say(facts, "");
    const text = document.createTextNode("");
    answer.replaceChildren(el("span", {}, prompt.value), text);
    const began = performance.now();
    let first = 0;
    let tokens = 0;
    try {
      const response = await ask("v1/completions", {
        method: "POST",
        signal: control.signal,
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model: model.value, prompt: prompt.value, max_tokens: TOKENS, stream: true }),
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        first ||= performance.now();
        tokens += 1;
        text.data += event.choices[0].text;
        const each = tokens > 1 ? `, then ${milliseconds((performance.now() - first) / (tokens - 1))} each` : "";
        say(facts, `${tokens} tokens: the first after ${milliseconds(first - began)}${each}`);
      }
    } catch (error) {
      if (error.name !== "AbortError") say(facts, String(error.message ?? error));
    }
    control = null;
    say(button, "Write");
  }

  // Shows the models that are loaded now.
  async function update() {
    const response = await ask("v1/models", { cache: "no-store" });
    const names = response.ok ? (await response.json()).data.map((each) => each.id) : [];
    if (model.dataset.names !== names.join("\n")) {
      model.dataset.names = names.join("\n");
      model.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    }
    node.hidden = names.length === 0;
    model.hidden = names.length < 2;
  }

  return { node, update };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    for (const each of found) {
      if (each === "data: [DONE]") return;
      yield JSON.parse(each.slice(6));
    }
  }
}
