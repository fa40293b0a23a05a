// The chart of memory over the step: a painted stack below an SVG of axes, phases, limits, pointer and selection.

const LEFT = 68;
const RIGHT = 12;
const TOP = 26;
const BOTTOM = 24;
const TALL = 440;

/**
 * The chart of `step`. Calls `look(moment, row)` when the pointer moves to another moment and `pick(row)` when an
 * allocation is chosen; row -1 is none.
 */
class StepChart {
  constructor(step, look, pick) {
    Object.assign(this, { step, look, pick, stretch: new Stretch(step), row: -1, hovered: -1, scale: "from zero" });
    this.moment = this.rest = step.peak;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.back = svg("svg", { "aria-hidden": "true" });
    this.front = svg("svg", { class: "front", "aria-hidden": "true" });
    this.said = el("p", { class: "unseen", "aria-live": "polite" });
    this.box = el("div", {
      class: "chart", tabindex: 0, role: "application",
      "aria-label": `Memory over the step, ${step.last} events; peak ${bytes(step.total[step.peak])}. `
        + "Arrow keys move, with Shift by a tenth; plus and minus zoom; up and down choose an allocation; P is the peak.",
    }, this.canvas, this.back, this.front, this.said);
    this.map = new Minimap(this);
    this.element = el("div", {}, this.box, this.map.element);
    this.tip = tooltip();
    this.redraw = onceAFrame(() => this.draw());
    this.repoint = onceAFrame(() => this.point());
    onWidth(this.box, (width) => {
      this.width = width - LEFT - RIGHT;
      this.draw();
    });
    onTheme(this.redraw);
    listen(this);
  }

  /** The range of bytes: from zero or from the minimum of the step, to its maximum or the limit of the card. */
  rescale() {
    const { step, scale } = this;
    const seen = Math.max(step.total[step.peak], ...(!step.reserves ? [] : step.reserved.map(([, n]) => n)));
    const top = scale === "to the limit" ? Math.max(seen, step.limit) : seen;
    this.base = scale === "what changes" ? step.least : 0;
    this.most = this.base + 1.07 * (top - this.base) || 1;
  }

  y(level) {
    return TALL - BOTTOM - ((level - this.base) / (this.most - this.base)) * (TALL - TOP - BOTTOM);
  }

  x(moment) {
    return LEFT + Math.min(Math.max(this.stretch.x(moment, this.width), -1), this.width + 1);
  }

  draw() {
    if (!this.width) return;
    this.rescale();
    this.columns = this.stretch.columns(this.width);
    paint(this.canvas, this.stretch, [this.width, TALL - TOP - BOTTOM], this.base, this.most);
    const size = { width: this.width + LEFT + RIGHT, height: TALL };
    for (const layer of [this.back, this.front]) filled(layer, { ...size, viewBox: `0 0 ${size.width} ${TALL}` }, []);
    this.back.replaceChildren(...axisTitles(TALL, "allocated", this.stretch.axis === "time" ? "time" : "event"), ...this.levels(), ...this.times(), ...this.phases(), ...this.limits(), this.peak());
    this.map.draw(this.width);
    this.point();
  }

  levels() {
    return byteMarks(this.base, this.most, 6).flatMap(([level, label]) => [
      svg("line", { class: "grid", x1: LEFT, x2: LEFT + this.width, y1: this.y(level), y2: this.y(level) }),
      svg("text", { x: LEFT - 8, y: this.y(level) + 4, "text-anchor": "end" }, label),
    ]);
  }

  times() {
    const { from, to, axis } = this.stretch;
    const scale = axis === "time" ? 1e6 : 1;
    return marks(from / scale, to / scale, 8).map((at) => svg("text", {
      x: LEFT + ((at * scale - from) / (to - from)) * this.width, y: TALL - 7, "text-anchor": "middle",
    }, axis === "time" ? seconds(at) : COUNT.format(Math.round(at))));
  }

  phases() {
    return this.step.phases.flatMap(([at, name], i) => {
      const end = (this.step.phases[i + 1] || [this.step.last])[0];
      const [x1, x2] = [this.x(at), this.x(end)];
      if (x2 - x1 < 1) return [];
      const words = x2 - x1 > 7 * name.length + 8;
      return [
        svg("line", { class: "phase", x1, x2: x1, y1: 4, y2: TALL - BOTTOM }),
        words ? svg("text", { class: "phase-name", x: (x1 + x2) / 2, y: 16, "text-anchor": "middle" }, name) : null,
      ].filter(Boolean);
    });
  }

  limits() {
    const { step } = this;
    const ends = [...step.reserved.slice(1).map(([at]) => at), step.last];
    const path = step.reserved.map(([at, n], i) => `M${this.x(at)},${this.y(n)}H${this.x(ends[i])}`).join("");
    const last = step.reserves ? step.reserved.at(-1)[1] : 0;
    const found = !step.reserves ? [] : [
      svg("path", { class: "reserved-line", d: path }),
      svg("text", { x: LEFT + this.width - 4, y: this.y(last) - 5, "text-anchor": "end" }, `reserved ${bytes(last)}`),
    ];
    if (step.limit && step.limit <= this.most) {
      const y = this.y(step.limit);
      found.push(svg("line", { class: "limit", x1: LEFT, x2: LEFT + this.width, y1: y, y2: y }));
      found.push(svg("text", { class: "limit-name", x: LEFT + this.width - 4, y: y - 5, "text-anchor": "end" },
        `limit ${bytes(step.limit)}`));
    }
    return found;
  }

  peak() {
    const { step } = this;
    const [x, y] = [this.x(step.peak), this.y(step.total[step.peak])];
    const inside = x >= LEFT && x <= LEFT + this.width;
    const right = x > LEFT + 0.7 * this.width;
    return inside && svg("g", { class: "peak" },
      svg("path", { d: `M${x},${y - 2}l-5,-8h10z` }),
      svg("text", { x: x + (right ? -9 : 9), y: y - 5, "text-anchor": right ? "end" : "start" },
        `peak ${bytes(step.total[step.peak])}`));
  }

  /** Draw the pointer and the selection, and update the views beside the chart. */
  point() {
    if (!this.width) return;
    const { step, columns } = this;
    const x = Math.min(Math.max(this.x(this.moment), LEFT), LEFT + this.width);
    const parts = [svg("line", { class: "pointer", x1: x, x2: x, y1: TOP, y2: TALL - BOTTOM })];
    for (const [row, kind] of [[this.hovered, "hovered"], [this.row, "chosen"]]) {
      if (row >= 0) {
        parts.push(svg("path", { class: kind, d: outline(step, row, columns, (c) => LEFT + c, (n) => Math.min(this.y(n), TALL - BOTTOM)) }));
      }
    }
    this.front.replaceChildren(...parts);
    this.look(this.moment, this.hovered);
  }

  /** Go to `moment` and stay there when the pointer leaves. */
  go(moment) {
    this.moment = this.rest = Math.min(Math.max(0, moment), this.step.last);
    this.stretch.reveal(this.moment);
    this.said.textContent = `${this.step.when(this.moment)}: ${bytes(this.step.total[this.moment])}`;
    this.redraw();
  }

  choose(row) {
    this.row = row;
    if (row >= 0) {
      this.said.textContent = `${bytes(this.step.bytes[row])}, ${this.step.placeOf(row)}, ${this.step.opOf(row)}`;
    }
    this.pick(row);
    this.repoint();
  }

  /** The moment and the allocation below the pointer. */
  under(event) {
    const { left, top } = this.box.getBoundingClientRect();
    const column = Math.round(event.clientX - left - LEFT);
    if (!this.columns || column < 0 || column >= this.width) return null;
    const moment = this.columns[column];
    const share = (TALL - BOTTOM - (event.clientY - top)) / (TALL - TOP - BOTTOM);
    const level = this.base + share * (this.most - this.base);
    return { column, moment, row: share < 0 ? -1 : this.step.rowAt(moment, level) };
  }
}

// Painting: pixel by pixel, because 20,000 elements would be too slow.

const SHADES = 3; // of a category, to tell neighbours in the stack apart

/** Paint the `stretch` of a step onto `canvas`, `size` wide and high, from `base` to `most` bytes. */
function paint(canvas, stretch, size, base, most) {
  const { step } = stretch;
  const ratio = devicePixelRatio || 1;
  const [width, height] = size.map((pixels) => Math.round(pixels * ratio));
  const columns = stretch.columns(width);
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const palette = step.categories.map((name) => shades(colour(`--${name}`)));
  const edge = step.categories.map((name) => packed(colour(`--${name}`).map((part) => part * 0.62)));
  const perPixel = (most - base) / height;
  const stack = new Stack(step);
  for (let c = 0; c < width; c++) {
    let level = 0;
    let drawn = height; // rows of pixels from here on are painted
    stack.moveTo(columns[c], (i, category) => {
      level += step.bytes[i];
      const top = Math.max(0, Math.round(height - (level - base) / perPixel));
      if (top >= drawn) return;
      const fill = palette[category][i % SHADES];
      for (let y = top; y < drawn; y++) pixels[y * width + c] = fill;
      if (drawn - top >= 5 * ratio) pixels[top * width + c] = edge[category];
      drawn = top;
    });
  }
  filled(canvas, { width, height, style: `width: ${size[0]}px; height: ${size[1]}px` }, []);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The allocations that are alive, moment by moment; rows of a category are in the order of their allocation. */
class Stack {
  constructor(step) {
    this.step = step;
    this.parts = step.used.map((category) => {
      const from = step.category.indexOf(category);
      const to = step.category.lastIndexOf(category) + 1;
      return { category, next: from, to, alive: new Int32Array(to - from), count: 0 };
    });
  }

  /** Advance to `moment` and call `visit(row, category)` for each live row, lowest first. */
  moveTo(moment, visit) {
    const { made, freed } = this.step;
    for (const part of this.parts) {
      const { alive, category } = part;
      while (part.next < part.to && made[part.next] <= moment) alive[part.count++] = part.next++;
      let kept = 0;
      for (let k = 0; k < part.count; k++) {
        const row = alive[k];
        if (freed[row] <= moment) continue;
        alive[kept++] = row;
        visit(row, category);
      }
      part.count = kept;
    }
  }
}

function shades(rgb) {
  return [1, 0.93, 0.87].map((factor) => packed(rgb.map((part) => part * factor)));
}

function packed([r, g, b]) {
  return (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
}

/** The outline of `row` over `columns` as an SVG path; `y(level)` is the position of a level of bytes. */
function outline(step, row, columns, x, y) {
  const tops = [];
  const bottoms = [];
  for (let c = 0; c < columns.length; c++) {
    if (!step.lives(row, columns[c])) continue;
    const bottom = step.below(row, columns[c]);
    bottoms.push(`${x(c)},${y(bottom)} ${x(c + 1)},${y(bottom)}`);
    tops.push(`${x(c + 1)},${y(bottom + step.bytes[row])} ${x(c)},${y(bottom + step.bytes[row])}`);
  }
  return tops.length ? `M${bottoms.join("L")}L${tops.reverse().join("L")}Z` : "";
}

// The minimap: the whole step in small, with the visible part to drag.

const SMALL = 44;

class Minimap {
  constructor(chart) {
    this.chart = chart;
    this.element = svg("svg", { class: "minimap", height: SMALL, "aria-hidden": "true" });
    let grip = null;
    this.element.addEventListener("pointerdown", (event) => {
      const { stretch } = chart;
      const at = this.positionOf(event);
      grip = at >= stretch.from && at <= stretch.to ? at - stretch.from : (stretch.to - stretch.from) / 2;
      this.element.setPointerCapture(event.pointerId);
      this.drag(at - grip);
    });
    this.element.addEventListener("pointermove", (event) => {
      if (grip !== null) this.drag(this.positionOf(event) - grip);
    });
    this.element.addEventListener("pointerup", () => (grip = null));
  }

  positionOf(event) {
    const { left } = this.element.getBoundingClientRect();
    return ((event.clientX - left - LEFT) / this.chart.width) * this.chart.stretch.end;
  }

  drag(from) {
    const { stretch } = this.chart;
    stretch.show(from, stretch.to - stretch.from);
    this.chart.redraw();
  }

  draw(width) {
    const { step, stretch } = this.chart;
    const whole = new Stretch(step);
    if (stretch.axis === "time") whole.use("time");
    const most = step.total[step.peak] || 1;
    const line = [...whole.columns(width)].map((m, c) => `${LEFT + c},${SMALL - 4 - (step.total[m] / most) * (SMALL - 10)}`);
    const x = (position) => LEFT + (position / stretch.end) * width;
    filled(this.element, { width: width + LEFT + RIGHT }, []);
    this.element.replaceChildren(
      svg("path", { class: "small-total", d: `M${LEFT},${SMALL - 4}L${line.join("L")}L${LEFT + width},${SMALL - 4}Z` }),
      svg("rect", { class: "seen", x: x(stretch.from), y: 2, width: Math.max(3, x(stretch.to) - x(stretch.from)), height: SMALL - 4 }),
    );
  }
}

// Pointer, wheel and keys.

const DRAGGED = 5; // pixels from which a press counts as a drag

function listen(chart) {
  const { box, stretch, step } = chart;
  let pressed = null;

  box.addEventListener("pointerdown", (event) => {
    pressed = chart.under(event);
    if (pressed) box.setPointerCapture(event.pointerId);
  });

  box.addEventListener("pointermove", (event) => {
    const found = chart.under(event);
    if (pressed) return markRange(chart, pressed.column, rangeEnd(chart, event));
    chart.hovered = found ? found.row : -1;
    chart.moment = found ? found.moment : chart.rest;
    if (found) chart.tip.show(event, ...tipOf(step, found));
    else chart.tip.hide();
    chart.repoint();
  });

  box.addEventListener("pointerup", (event) => {
    const from = pressed;
    pressed = null;
    if (!from) return;
    const end = rangeEnd(chart, event);
    if (Math.abs(end - from.column) >= DRAGGED) {
      stretch.select(Math.min(end, from.column) / chart.width, Math.max(end, from.column) / chart.width);
      chart.redraw();
    } else {
      chart.moment = chart.rest = from.moment;
      chart.choose(from.row);
    }
  });

  box.addEventListener("pointerleave", () => {
    if (pressed) return;
    chart.hovered = -1;
    chart.moment = chart.rest;
    chart.tip.hide();
    chart.repoint();
  });

  box.addEventListener("dblclick", () => {
    stretch.whole();
    chart.redraw();
  });

  box.addEventListener("wheel", (event) => {
    const found = chart.under(event);
    if (!found) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      stretch.pan((event.deltaX || event.deltaY) / chart.width);
    } else {
      stretch.zoom(1.0025 ** event.deltaY, found.column / chart.width);
    }
    chart.redraw();
  }, { passive: false });

  box.addEventListener("keydown", (event) => {
    const key = KEYS[event.key];
    if (!key || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    key(chart, event.shiftKey);
  });
}

function rangeEnd(chart, event) {
  return Math.min(Math.max(0, event.clientX - chart.box.getBoundingClientRect().left - LEFT), chart.width);
}

function markRange(chart, from, to) {
  const [x, width] = [LEFT + Math.min(from, to), Math.abs(to - from)];
  if (width < DRAGGED) return;
  chart.tip.hide();
  chart.front.replaceChildren(svg("rect", { class: "range", x, y: TOP, width, height: TALL - TOP - BOTTOM }));
}

/** Move by a moment, or with Shift by a tenth of the visible part. */
function along(chart, direction, far) {
  const { stretch } = chart;
  const wide = Math.max(1, stretch.momentAt(stretch.to) - stretch.momentAt(stretch.from));
  chart.go(chart.rest + direction * (far ? Math.ceil(wide / 10) : 1));
}

/** Choose the next allocation up or down the stack at this moment. */
function updown(chart, direction) {
  const rows = [...chart.step.alive(chart.rest)];
  const at = rows.indexOf(chart.row);
  const next = at < 0 ? (direction > 0 ? 0 : rows.length - 1) : at + direction;
  if (rows[next] !== undefined) chart.choose(rows[next]);
}

function closer(chart, factor) {
  const { stretch } = chart;
  const share = (stretch.position[chart.rest] - stretch.from) / (stretch.to - stretch.from);
  stretch.zoom(factor, Math.min(Math.max(share, 0), 1));
  chart.redraw();
}

/** Go to the peak and zoom in on its surroundings. */
function toPeak(chart) {
  const { stretch, step } = chart;
  const wide = stretch.width(stretch.end / 25);
  stretch.show(stretch.position[step.peak] - wide / 2, wide);
  chart.go(step.peak);
}

const KEYS = {
  ArrowLeft: (chart, far) => along(chart, -1, far),
  ArrowRight: (chart, far) => along(chart, 1, far),
  ArrowUp: (chart) => updown(chart, 1),
  ArrowDown: (chart) => updown(chart, -1),
  Home: (chart) => chart.go(0),
  End: (chart) => chart.go(chart.step.last),
  "+": (chart) => closer(chart, 0.5),
  "=": (chart) => closer(chart, 0.5),
  "-": (chart) => closer(chart, 2),
  p: toPeak,
  0: (chart) => {
    chart.stretch.whole();
    chart.redraw();
  },
  Escape: (chart) => chart.choose(-1),
};

/** The tooltip of an allocation, or of a moment above the stack. */
function tipOf(step, { moment, row }) {
  const head = el("p", { class: "when" }, step.when(moment));
  const total = el("p", {}, `${bytes(step.total[moment])} allocated`);
  if (row < 0) return [head, total];
  return [
    el("p", { class: "bytes" }, el("i", { class: "swatch", style: `background: ${categoryColour(step.categories[step.category[row]])}` }),
      `${bytes(step.bytes[row])} `, el("span", { class: "muted" }, step.categories[step.category[row]])),
    el("p", { class: "place" }, step.placeOf(row)),
    el("p", {}, step.opOf(row)),
    el("p", { class: "muted" }, `allocated: ${step.when(step.made[row])}`),
    el("p", { class: "muted" }, `freed: ${step.lasts[row] ? "not in this step" : step.when(step.freed[row])}`),
    el("hr"),
    el("p", { class: "muted" }, `at ${step.when(moment)}: ${bytes(step.total[moment])} in total`),
  ];
}
