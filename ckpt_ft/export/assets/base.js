"use strict";
// Shared by all views: elements, formatting of figures, colours, copying.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** The titles of a chart's axes, in its margin on the left. */
function axisTitles(high, up, along) {
  return [svg("text", { x: 2, y: 14 }, up), svg("text", { x: 2, y: high - 7 }, along)];
}

/** An element with attributes and children. `on...` are listeners; texts are never parsed as HTML. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// Ties go to the even digit, as in Python: 1.125 GiB is "1.12 GiB" here and there.
const DECIMALS = [0, 1, 2, 3].map(
  (digits) => new Intl.NumberFormat("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven", useGrouping: false,
  }),
);
const COUNT = new Intl.NumberFormat("en");
const DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const UNITS = [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1], ["B", 1, 0]];

/** Bytes as the console prints them. */
function bytes(n) {
  const [unit, size, digits] = UNITS.find(([, size]) => Math.abs(n) >= size) || UNITS[3];
  return `${DECIMALS[digits].format(n / size)} ${unit}`;
}

/** The unit of the marks of an axis up to `n` bytes. */
function axisUnit(n) {
  return UNITS.find(([, size]) => n >= size) || UNITS[3];
}

function seconds(s) {
  return s >= 1 ? `${DIGITS.format(s)} s` : `${DIGITS.format(1000 * s)} ms`;
}

/** Three significant digits, as the console prints speeds. */
function digits(value) {
  return DIGITS.format(value);
}

/** Round marks of an axis from `from` to `to`, about `count` of them. */
function marks(from, to, count) {
  const rough = (to - from) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to * (1 + 1e-9); i++) found.push(i * step);
  return found;
}

/** Marks of an axis of bytes, round in its unit. */
function byteMarks(least, most, count) {
  const [unit, size] = axisUnit(most);
  return marks(least / size, most / size, count).map((value) => [value * size, `${DIGITS.format(value)} ${unit}`]);
}

const themeListeners = [];
function onTheme(listener) {
  themeListeners.push(listener);
}
function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  themeListeners.forEach((listener) => listener());
}
function isDark() {
  const chosen = document.documentElement.style.colorScheme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themeListeners.forEach((l) => l()));

const colours = new Map();
onTheme(() => colours.clear());

/** The colour of a CSS custom property in the current theme, as [r, g, b]. */
function colour(name) {
  if (!colours.has(name)) {
    const probe = el("i", { style: `color: var(${name})` });
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number));
    probe.remove();
  }
  return colours.get(name);
}

function categoryColour(category) {
  return `var(--${category})`;
}

/** Copy `text`, and confirm it on `button` for a moment. */
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: "position: fixed; opacity: 0" }, text); // pages from disk have no clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = "copied";
  setTimeout(() => (button.textContent = label), 1200);
}

function copyButton(text, label = "copy") {
  return el("button", { class: "small", onclick: (event) => copy(text(), event.currentTarget) }, label);
}

/** A toggle button. */
function toggle(label, on, changed) {
  const button = el("button", { class: "small", "aria-pressed": String(on) }, label);
  button.addEventListener("click", () => {
    on = !on;
    button.setAttribute("aria-pressed", String(on));
    changed(on);
  });
  return button;
}

/** Buttons of which one is on. */
function choose(label, names, chosen, changed) {
  const buttons = names.map((name) => el("button", { class: "small", "aria-pressed": String(name === chosen) }, name));
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    changed(names[i]);
  }));
  return el("span", { class: "choose", role: "group", "aria-label": label }, ...buttons);
}

/** A function that calls `draw` before the next frame, once for any number of calls. */
function onceAFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Call `draw(width)` when the width of `element` changes. */
function onWidth(element, draw) {
  let known = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== known) draw((known = width));
  }).observe(element);
}

/** A box beside the pointer, kept inside the window. */
function tooltip() {
  const box = el("div", { class: "tooltip", hidden: true });
  document.body.append(box);
  return {
    show(event, ...children) {
      box.replaceChildren(...children);
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const right = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
      box.style.left = `${Math.max(4, right)}px`;
      box.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - height - 8))}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

/** Rows of "name value" as a definition list; a value may be an element. */
function facts(rows) {
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
