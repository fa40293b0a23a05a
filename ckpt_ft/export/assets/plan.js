// The view of a plan: candidates as points of memory and speed, and a budget to drag.

const HIGH = 540;
const EDGE = { left: 64, right: 20, top: 30, bottom: 44 };

/** The selection: one of the budgets, and up to two points whose steps are compared. */
class Choice {
  constructor(data) {
    Object.assign(this, data);
    this.stop = data.asked;
    this.compared = [this.picks[this.stop].points[0]];
    this.listeners = [];
  }

  get pick() {
    return this.points[this.picks[this.stop].points[0]];
  }

  move(stop) {
    this.stop = Math.min(Math.max(0, stop), this.picks.length - 1);
    this.tell();
  }

  /** The position of the pick whose budget is nearest to `budget` bytes. */
  nearest(budget) {
    const far = (i) => Math.abs(this.picks[i].budget - budget);
    return this.picks.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0);
  }

  /** Compare `point` with the one chosen before; a third one starts again. */
  compare(point) {
    if (this.compared.includes(point)) this.compared = this.compared.filter((other) => other !== point);
    else this.compared = this.compared.length === 2 ? [point] : [...this.compared, point];
    this.tell();
  }

  tell() {
    this.listeners.forEach((listener) => listener());
  }
}

function choiceView(section) {
  const choice = new Choice(section.data);
  const chart = new ChoiceChart(choice);
  const picked = el("div", { "aria-live": "polite" });
  const compared = el("div", { class: "compared" });
  const show = () => {
    picked.replaceChildren(...pickOf(choice));
    compared.replaceChildren(...comparison(choice));
  };
  choice.listeners.push(show);
  show();
  return [
    el("section", {},
      el("h2", {}, section.title),
      el("p", { class: "muted" }, "Drag the budget: the pick is what ckpt-ft plan prints for it. Choose two points to compare their steps."),
      el("div", { class: "beside" }, chart.element, el("aside", {}, picked))),
    el("section", {}, el("h2", {}, "Two steps compared"), compared),
    el("section", {}, el("h2", {}, "All points"), pointsTable(choice).element),
  ];
}

/** The pick for the budget, and its flags. */
function pickOf(choice) {
  const pick = choice.picks[choice.stop];
  const point = choice.pick;
  const others = pick.points.slice(1).map((i) => choice.points[i]);
  return [
    el("h3", {}, `Pick for ${bytes(pick.budget)}`),
    el("p", { class: "big" }, point.policy),
    facts([
      ["batch", point.batch],
      [choice.unit, digits(point.speed)],
      ["a step", seconds(point.seconds)],
      ["reserved", bytes(point.reserved)],
      ["left over", bytes(pick.left)],
    ]),
    el("h3", { class: "apart" }, "Flags"),
    codeLine(point.flags),
    el("p", { class: "muted" }, "or let a recipe make the plan:"),
    codeLine(pick.flags),
    others.length ? el("h3", { class: "apart" }, "Next best for this budget") : null,
    ...others.map((other) => el("p", { class: "next" },
      el("span", { class: "place" }, other.policy), ` batch ${other.batch}, ${digits(other.speed)} ${choice.unit}`)),
  ].filter(Boolean);
}

function pointsTable(choice) {
  const number = (name, show) => ({ name, numbers: true, show });
  const heads = [{ name: "policy" }, number("batch"), number("peak allocated", bytes), number("reserved", bytes),
    number("s/step", digits), number(choice.unit, digits), { name: "" }, { name: "flags" }];
  const rows = choice.points.map((p, i) => [
    p.policy, p.batch, p.peak, p.reserved, p.seconds, p.speed, choice.frontier.includes(i) ? "frontier" : "", p.flags,
  ]);
  return new DataTable(heads, rows, (row) => choice.compare(choice.points.findIndex((p) => p.flags === row[7])));
}

// The chart of candidates: bytes across, speed up, the frontier, and the budget as a line with a handle.

class ChoiceChart {
  constructor(choice) {
    this.choice = choice;
    this.drawn = svg("g");
    this.handle = this.slider(); // is not redrawn, so that a drag goes on
    this.svg = svg("svg", { height: HIGH, class: "choice", "aria-label": "Candidates by bytes reserved and speed" },
      this.drawn, this.handle);
    this.element = el("div", {}, this.svg);
    this.tip = tooltip();
    const redraw = onceAFrame(() => this.draw());
    choice.listeners.push(redraw);
    onWidth(this.element, (width) => {
      this.width = width;
      redraw();
    });
  }

  scale() {
    const { points, picks } = this.choice;
    this.most = 1.04 * Math.max(...points.map((p) => p.reserved), ...picks.map((p) => p.budget));
    const speeds = points.map((p) => p.speed);
    this.fastest = 1.05 * Math.max(...speeds);
    this.slowest = Math.min(...speeds) > this.fastest / 2 ? 0.9 * Math.min(...speeds) : 0;
  }

  x(n) {
    return EDGE.left + (n / this.most) * (this.width - EDGE.left - EDGE.right);
  }

  y(speed) {
    const share = (speed - this.slowest) / (this.fastest - this.slowest);
    return HIGH - EDGE.bottom - share * (HIGH - EDGE.top - EDGE.bottom);
  }

  draw() {
    const { choice } = this;
    this.scale();
    filled(this.svg, { width: this.width, viewBox: `0 0 ${this.width} ${HIGH}` }, []);
    const pick = choice.picks[choice.stop];
    const right = this.x(this.most);
    const focused = [...this.drawn.querySelectorAll(".dot")].indexOf(document.activeElement);
    this.drawn.replaceChildren(
      svg("rect", { class: "beyond", x: this.x(pick.limit), y: EDGE.top, width: right - this.x(pick.limit), height: HIGH - EDGE.top - EDGE.bottom }),
      ...this.axes(), ...this.lines(), this.frontier(), ...this.dots(), ...this.labels());
    this.place(pick);
    if (focused >= 0) this.drawn.querySelectorAll(".dot")[focused].focus();
  }

  axes() {
    const bottom = HIGH - EDGE.bottom;
    return [
      ...byteMarks(0, this.most, 7).map(([n, label]) => svg("text", { x: this.x(n), y: bottom + 18, "text-anchor": "middle" }, label)),
      ...marks(this.slowest, this.fastest, 6).flatMap((speed) => [
        svg("line", { class: "grid", x1: EDGE.left, x2: this.x(this.most), y1: this.y(speed), y2: this.y(speed) }),
        svg("text", { x: EDGE.left - 8, y: this.y(speed) + 4, "text-anchor": "end" }, digits(speed)),
      ]),
      ...this.choice.picks.map((pick) => svg("path", { class: "stop", d: `M${this.x(pick.budget)},${bottom}l-4,-7h8z` })),
      svg("text", { x: this.x(this.most), y: HIGH - 6, "text-anchor": "end" }, "bytes reserved, predicted"),
      svg("text", { x: EDGE.left - 50, y: 16 }, this.choice.unit),
    ];
  }

  /** Lines that connect the batch sizes of a policy. */
  lines() {
    const byPolicy = Map.groupBy(this.choice.points, (point) => point.policy);
    return [...byPolicy.values()].filter((points) => points.length > 1).map((points) => svg("polyline", {
      class: "family", points: points.map((p) => `${this.x(p.reserved)},${this.y(p.speed)}`).join(" "),
    }));
  }

  frontier() {
    const points = this.choice.frontier.map((i) => this.choice.points[i]).toSorted((a, b) => a.reserved - b.reserved);
    const steps = points.map((p, i) => (i ? `H${this.x(p.reserved)}V${this.y(p.speed)}` : `M${this.x(p.reserved)},${this.y(p.speed)}`));
    return svg("path", { class: "frontier", d: steps.join("") });
  }

  /** The points; the pick and the frontier are on top. */
  dots() {
    const { choice } = this;
    const weight = (i) => 2 * (choice.points[i] === choice.pick) + choice.frontier.includes(i);
    return [...choice.points.keys()].sort((a, b) => weight(a) - weight(b)).map((i) => {
      const point = choice.points[i];
      const state = [
        point === choice.pick ? "pick" : "",
        choice.compared.includes(i) ? `side-${choice.compared.indexOf(i) + 1}` : "",
        point.reserved > choice.picks[choice.stop].limit ? "too-large" : "",
        choice.frontier.includes(i) ? "edge" : "",
      ].join(" ");
      return svg("circle", {
        class: `dot ${state}`, cx: this.x(point.reserved), cy: this.y(point.speed), r: point === choice.pick ? 8 : 5.5,
        tabindex: 0, role: "button", "aria-pressed": String(choice.compared.includes(i)),
        "aria-label": `${point.policy}, batch ${point.batch}: ${bytes(point.reserved)}, ${digits(point.speed)} ${choice.unit}`,
        onclick: () => choice.compare(i),
        onkeydown: (event) => event.key === "Enter" && choice.compare(i),
        onpointermove: (event) => this.tip.show(event, ...this.tipOf(point)),
        onpointerleave: () => this.tip.hide(),
      });
    });
  }

  tipOf(point) {
    return [
      el("p", { class: "place" }, point.policy),
      facts([["batch", point.batch], ["reserved", bytes(point.reserved)], ["peak allocated", bytes(point.peak)],
        [this.choice.unit, digits(point.speed)], ["a step", seconds(point.seconds)]]),
    ];
  }

  /** Names of the pick, the compared points and the frontier, where they cover no point and no other name. */
  labels() {
    const { choice } = this;
    const wanted = [...new Set([choice.points.indexOf(choice.pick), ...choice.compared, ...choice.frontier])];
    const taken = choice.points.map((p) => box(this.x(p.reserved), this.y(p.speed), 7, 7));
    const found = [];
    for (const i of wanted) {
      const point = choice.points[i];
      const words = `${point.policy} · ${point.batch}`;
      const wide = 6.3 * words.length;
      const [x, y] = [this.x(point.reserved), this.y(point.speed)];
      const places = [[11, 4], [-11 - wide, 4], [-wide / 2, -13], [-wide / 2, 21], [11, -12], [11, 20], [-11 - wide, -12], [-11 - wide, 20]];
      const free = places.map(([dx, dy]) => ({ x: x + dx, y: y + dy, box: [x + dx, y + dy - 11, x + dx + wide, y + dy + 3] }))
        .find((place) => place.box[0] > EDGE.left && place.box[2] < this.width && place.box[1] > EDGE.top - 10 && !taken.some((other) => overlap(other, place.box)));
      if (!free) continue;
      taken.push(free.box);
      found.push(svg("text", { class: `point-name ${point === choice.pick ? "pick" : ""}`, x: free.x, y: free.y }, words));
    }
    return found;
  }

  /** The budget: a line with a handle that moves from budget to budget, by pointer or keys. */
  slider() {
    const { choice } = this;
    const label = svg("text", { "text-anchor": "middle", y: 17 });
    const handle = svg("g", { class: "budget", tabindex: 0, role: "slider", "aria-label": "Budget" },
      svg("line", { y1: 24, y2: HIGH - EDGE.bottom }), svg("rect", { y: 1, height: 23, rx: 6 }), label);
    let dragged = false;
    const follow = (event) => {
      const { left } = this.svg.getBoundingClientRect();
      const share = (event.clientX - left - EDGE.left) / (this.width - EDGE.left - EDGE.right);
      choice.move(choice.nearest(share * this.most));
    };
    handle.addEventListener("pointerdown", (event) => {
      dragged = true;
      handle.setPointerCapture(event.pointerId);
    });
    handle.addEventListener("pointermove", (event) => dragged && follow(event));
    handle.addEventListener("pointerup", () => (dragged = false));
    handle.addEventListener("keydown", (event) => {
      const to = {
        ArrowLeft: choice.stop - 1, ArrowDown: choice.stop - 1, ArrowRight: choice.stop + 1, ArrowUp: choice.stop + 1,
        Home: 0, End: choice.picks.length - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choice.move(to);
    });
    return handle;
  }

  place(pick) {
    const x = this.x(pick.budget);
    const [line, plate, label] = this.handle.children;
    label.textContent = `budget ${bytes(pick.budget)}`;
    const wide = 7 * label.textContent.length + 14;
    const middle = Math.min(Math.max(x, wide / 2 + 2), this.width - wide / 2 - 2);
    filled(line, { x1: x, x2: x }, []);
    filled(plate, { x: middle - wide / 2, width: wide }, []);
    filled(label, { x: middle }, []);
    filled(this.handle, {
      "aria-valuemin": this.choice.picks[0].budget, "aria-valuemax": this.choice.picks.at(-1).budget,
      "aria-valuenow": pick.budget,
      "aria-valuetext": `${bytes(pick.budget)}: ${this.choice.pick.policy}, batch ${this.choice.pick.batch}`,
    }, []);
  }
}

function box(x, y, wide, high) {
  return [x - wide, y - high, x + wide, y + high];
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

// The comparison of two steps: memory over time, and what the second one saves and recomputes.

const LOW = 300;

function comparison(choice) {
  const [first, second] = choice.compared.map((i) => choice.points[i]);
  if (!second) {
    const chosen = first ? `${first.policy} · ${first.batch} is chosen. ` : "";
    return [el("p", { class: "muted" }, `${chosen}Choose ${first ? "another point" : "two points"} in the chart above or in the table below.`)];
  }
  const swap = el("button", { class: "small", onclick: () => {
    choice.compared.reverse();
    choice.tell();
  } }, "swap");
  const legend = el("div", { class: "tools" },
    el("span", {}, el("i", { class: "swatch side-1" }), `${first.policy} · ${first.batch}`),
    el("span", {}, el("i", { class: "swatch side-2" }), `${second.policy} · ${second.batch}`), swap);
  return [legend, overlay(first.outline, second.outline), ...verdict(choice, first, second)];
}

function totals(outline) {
  const series = Object.values(outline.series);
  return outline.microseconds.map((_, i) => series.reduce((sum, values) => sum + values[i], 0));
}

function overlay(first, second) {
  const element = el("div", { class: "overlay" });
  const sides = [first, second].map((outline) => ({ ...outline, total: totals(outline) }));
  const end = Math.max(...sides.map((side) => side.microseconds.at(-1))) || 1;
  const most = 1.05 * Math.max(...sides.map((side) => side.peak));
  onWidth(element, (width) => {
    const x = (at) => LEFT + (at / end) * (width - LEFT - RIGHT);
    const y = (n) => LOW - BOTTOM - (n / most) * (LOW - TOP - BOTTOM);
    const line = (side) => side.total.map((n, i) => (i ? `H${x(side.microseconds[i])}V${y(n)}` : `M${x(side.microseconds[0])},${y(n)}`)).join("");
    const floor = (side) => `V${y(0)}H${x(0)}Z`;
    element.replaceChildren(svg("svg", { width, height: LOW, "aria-hidden": "true" },
      ...axisTitles(LOW, "allocated", "time"),
      ...byteMarks(0, most, 5).flatMap(([n, label]) => [
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) }),
        svg("text", { x: LEFT - 8, y: y(n) + 4, "text-anchor": "end" }, label),
      ]),
      ...marks(0, end / 1e6, 8).map((at) => svg("text", { x: x(1e6 * at), y: LOW - 6, "text-anchor": "middle" }, seconds(at))),
      svg("path", { class: "side side-1", d: line(sides[0]) + floor(sides[0]) }),
      svg("path", { class: "side side-2", d: line(sides[1]) + floor(sides[1]) }),
      ...sides.flatMap((side, k) => side.phases.slice(1).map(([at, name]) => {
        const late = x(at) > width - 80;
        return svg("g", { class: `turn side-${k + 1}` },
          svg("line", { x1: x(at), x2: x(at), y1: k ? 14 : 4, y2: LOW - BOTTOM }),
          svg("text", { x: x(at) + (late ? -4 : 4), y: k ? 24 : 12, "text-anchor": late ? "end" : "start" }, name));
      }))));
  });
  return element;
}

/** What the second step saves and what it recomputes, with the largest parts of each. */
function verdict(choice, first, second) {
  const saved = first.outline.peak - second.outline.peak;
  const slower = second.seconds / second.batch / (first.seconds / first.batch) - 1;
  const held = differences(first.outline.held, second.outline.held, 3, 3);
  const longer = ({ row, other }) => row[3] - (other ? other[3] : 0);
  const again = differences(second.outline.backward, first.outline.backward, 2, 2).filter((part) => part.more > 0)
    .sort((a, b) => longer(b) - longer(a));
  const kernels = again.reduce((sum, part) => sum + part.more, 0);
  const time = again.reduce((sum, part) => sum + Math.max(0, longer(part)), 0);
  const sum = el("p", { class: "verdict" },
    `${second.policy} · ${second.batch} ${saved >= 0 ? "saves" : "takes"} ${bytes(Math.abs(saved))} ${saved >= 0 ? "" : "more "}at the peak and is `
    + `${DIGITS.format(Math.abs(100 * slower))} % ${slower >= 0 ? "slower" : "faster"} a sample; `
    + (kernels ? `in backward it runs ${COUNT.format(kernels)} more kernels, which take ${seconds(time / 1e6)}.` : "it recomputes nothing."));
  const rows = (parts, cells) => parts.slice(0, 8).map((part) => el("tr", {}, ...cells(part)));
  const cell = (text, number) => el("td", { class: number ? "number" : "" }, text);
  return [sum, el("div", { class: "two" },
    el("div", {}, el("h3", {}, "Held at the peak: second minus first"), el("table", { class: "plain" }, el("tbody", {},
      ...rows(held.map((part) => ({ ...part, more: -part.more })), ({ row, more }) => [
        cell(row[0] || OUTSIDE), cell(row[1]), cell(row[2]), cell(`${more > 0 ? "+" : ""}${bytes(more)}`, true)])))),
    el("div", {}, el("h3", {}, "Recomputed in backward"), el("table", { class: "plain" }, el("tbody", {},
      ...rows(again, (part) => [
        cell(part.row[0] || OUTSIDE), cell(part.row[1]), cell(`${COUNT.format(part.more)} kernels`, true),
        cell(seconds(longer(part) / 1e6), true)]))))),
  ];
}

/** Rows of `some` minus the rows of `others` with the same first `key` texts, by column `at`; largest first. */
function differences(some, others, key, at) {
  const name = (row) => JSON.stringify(row.slice(0, key));
  const known = new Map(others.map((row) => [name(row), row]));
  const found = some.map((row) => ({ row, other: known.get(name(row)), more: row[at] - (known.get(name(row)) || [])[at] || 0 }));
  for (const part of found) if (!part.other) part.more = part.row[at];
  const gone = others.filter((row) => !some.some((kept) => name(kept) === name(row)));
  return [...found, ...gone.map((row) => ({ row, more: -row[at] }))].filter((part) => part.more)
    .sort((a, b) => Math.abs(b.more) - Math.abs(a.more));
}
