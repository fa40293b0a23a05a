// The choice: policies at batch sizes as points of bytes and speed, and a budget that one moves.

const HIGH = 540;
const EDGE = { left: 64, right: 20, top: 30, bottom: 44 };

/** What is chosen: a stop of the budget, and up to two points whose steps are compared. */
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

  /** The stop whose budget is nearest to `budget` bytes. */
  nearest(budget) {
    const far = (i) => Math.abs(this.picks[i].budget - budget);
    return this.picks.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0);
  }

  /** Compare `point` with the one chosen before it; a third begins anew. */
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
      el("p", { class: "muted" }, "Move the budget from mark to mark: the pick is what ckpt-ft plan says for it. Choose two points to lay their steps over one another."),
      el("div", { class: "beside" }, chart.element, el("aside", {}, picked))),
    el("section", {}, el("h2", {}, "Two steps, one over the other"), compared),
    el("section", {}, el("h2", {}, "All points"), pointsTable(choice).element),
  ];
}

/** The pick for the budget, and what to type for it. */
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
    el("h3", { class: "apart" }, "To type"),
    codeLine(point.flags),
    el("p", { class: "muted" }, "or let a recipe plan for itself:"),
    codeLine(pick.flags),
    others.length ? el("h3", { class: "apart" }, "Next best there") : null,
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
