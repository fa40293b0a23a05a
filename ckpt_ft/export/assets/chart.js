// Memory over the step: the painted stack below an SVG of axes, phases, limits, the pointer and what is chosen.

const LEFT = 68;
const RIGHT = 12;
const TOP = 26;
const BOTTOM = 24;
const TALL = 440;

/**
 * The chart of `step`. `look(moment, row)` is called when another moment is pointed at, `pick(row)` when an allocation
 * is chosen; row -1 is none.
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

  /** The bytes that the chart begins and ends at: from nothing, from what the step never falls below, to the card's. */
  rescale() {
    const { step, scale } = this;
    const seen = Math.max(step.total[step.peak], ...(step.device === "cpu" ? [] : step.reserved.map(([, n]) => n)));
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
    this.back.replaceChildren(...this.levels(), ...this.times(), ...this.phases(), ...this.limits(), this.peak());
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
    const last = step.reserved.at(-1)[1];
    const found = step.device === "cpu" ? [] : [
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

  /** Draw the pointer and what is chosen, and tell the views beside this one. */
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

  /** Go to `moment`; it stays the one looked at when the pointer leaves. */
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

  /** What lies below the pointer: a moment, and the allocation there. */
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
