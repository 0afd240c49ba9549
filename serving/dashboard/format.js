// Elements, and numbers as people read them.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function svgEl(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Changes nothing where the text is the same, so that a screen reader or a selection keeps its place.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, on) {
  if (node.classList.contains(name) !== Boolean(on)) node.classList.toggle(name, Boolean(on));
}

export function digits(value, significant = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.max(0, significant - 1 - size));
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 9999.5) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 999.5) return `${(value / 1000).toFixed(2)} s`;
  if (value > 0 && value < 0.9995) return `${digits(value * 1000)} µs`;
  return `${digits(value)} ms`;
}

// A configured number: shown as it was written, not with the digits of a measurement.
export function chosenTime(value) {
  if (value >= 1000) return `${Number((value / 1000).toPrecision(3))} s`;
  return value < 1 ? `${Number((value * 1000).toPrecision(3))} µs` : `${Number(value.toPrecision(3))} ms`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  if (value > 99.9 && value < 100) return ">99.9%";
  if (value === 0 || value === 100) return `${value}%`;
  if (value < 0.0001) return "<0.0001%";
  return `${value < 1 ? digits(value, 2) : value.toFixed(1)}%`;
}

export function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let k = 0;
  while (value >= 999.5 && k < units.length - 1) {
    value /= 1000;
    k += 1;
  }
  return `${k ? digits(value) : value} ${units[k]}`;
}
