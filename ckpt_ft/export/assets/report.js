// The view of a memory report: measured beside predicted peaks of each rank, and their history over the steps.

const LOW = 300;

function runView(section) {
  const { ranks, figures } = section.data;
  const place = el("div");
  const show = (name) => place.replaceChildren(historyChart(ranks.find((rank) => `rank ${rank.rank}` === name)));
  const names = ranks.map((rank) => `rank ${rank.rank}`);
  show(names[0]);
  const known = ranks.some((rank) => rank.history.steps.length > 1);
  return [
    el("section", {},
      el("h2", {}, section.title),
      el("p", { class: "muted" }, "Peak of each phase: bars are measured, marks are predicted."),
      el("div", { class: "bars" }, ...figures.flatMap((name) => bars(name, ranks)))),
    known ? el("section", {},
      el("h2", {}, "Over the measured steps"),
      el("div", { class: "tools" }, names.length > 1 ? choose("Rank", names, names[0], show) : null, ...phaseKeys(figures)),
      place) : null,
  ].filter(Boolean);
}

const SIGNED = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1, signDisplay: "exceptZero" });

/** The bars of one figure, one for each rank. */
function bars(name, ranks) {
  const most = 1.02 * Math.max(...ranks.flatMap((rank) => [...Object.values(rank.measured), ...Object.values(rank.predicted)]));
  return ranks.map((rank, i) => {
    const { [name]: measured } = rank.measured;
    const { [name]: predicted } = rank.predicted;
    const error = measured && predicted ? `${SIGNED.format(100 * (predicted / measured - 1))} %` : "";
    const said = `${name}, rank ${rank.rank}: ${measured ? `${bytes(measured)} measured` : "not measured"}`
      + (predicted ? `, ${bytes(predicted)} predicted` : "");
    return el("div", { class: i ? "bar-row" : "bar-row first", role: "img", "aria-label": said },
      el("span", { class: "bar-name" }, i ? "" : name),
      el("span", { class: "muted" }, ranks.length > 1 ? `rank ${rank.rank}` : ""),
      el("span", { class: "bar-space" },
        el("span", { class: `bar ${name}`, style: `width: ${(100 * (measured || 0)) / most}%` }),
        predicted ? el("span", { class: "bar-mark", style: `left: ${(100 * predicted) / most}%` }) : null),
      el("span", { class: "number" }, measured ? bytes(measured) : "–"),
      el("span", { class: "number muted" }, predicted ? `${bytes(predicted)} predicted` : ""),
      el("span", { class: "number" }, error));
  });
}

function phaseKeys(figures) {
  return [...figures.map((name) => el("span", {}, el("i", { class: `swatch bar ${name}` }), name)),
    el("span", { class: "muted" }, "dashed: predicted; upright: evaluation or saving")];
}

function historyChart(rank) {
  const element = el("div");
  const tip = tooltip();
  const { steps, allocated, reserved, every } = rank.history;
  const ends = rank.history.ends.length ? rank.history.ends : steps; // older reports have none
  const events = Object.entries(rank.between).map(([name, after]) => [name, after.filter((step) => step >= steps[0])]);
  const lines = Object.entries({ ...allocated, reserved }).filter(([, values]) => values.some(Boolean));
  const all = [...lines.flatMap(([, values]) => values), ...Object.values(rank.predicted)];
  const most = 1.06 * Math.max(...all);
  onWidth(element, (width) => {
    const last = Math.max(ends.at(-1), ...events.flatMap(([, after]) => after));
    const x = (step) => LEFT + ((step - steps[0]) / (last - steps[0] || 1)) * (width - LEFT - RIGHT - 8);
    const y = (n) => LOW - BOTTOM - (n / most) * (LOW - TOP - BOTTOM);
    const picture = svg("svg", { width, height: LOW, role: "img", "aria-label": `Peaks of rank ${rank.rank} over ${steps.length} stretches of measured steps` },
      ...axisTitles(LOW, "peak", "step"),
      ...byteMarks(0, most, 5).flatMap(([n, label]) => [
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) }),
        svg("text", { x: LEFT - 8, y: y(n) + 4, "text-anchor": "end" }, label),
      ]),
      ...marks(steps[0], last, 8).filter(Number.isInteger).map((step) => svg("text", { x: x(step), y: LOW - 6, "text-anchor": "middle" }, COUNT.format(step))),
      ...Object.entries(rank.predicted).map(([name, n]) => svg("line", { class: `expected ${name}`, x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) })),
      ...events.flatMap(([name, after]) => after.map((step) => svg("line", { class: "between", x1: x(step + 0.5), x2: x(step + 0.5), y1: TOP, y2: LOW - BOTTOM }, svg("title", {}, `${name} after step ${step}`)))),
      ...lines.flatMap(([name, values]) => stretches(steps, ends).map((points) => svg("polyline", { class: `history ${name}`, points: points.map((i) => `${x(steps[i])},${y(values[i])}`).join(" ") }))),
      ...lines.flatMap(([name, values]) => (steps.length > 60 && stretches(steps, ends).length === 1 ? [] : values.map((n, i) => svg("circle", { class: `history ${name}`, cx: x(steps[i]), cy: y(n), r: 3 })))));
    picture.addEventListener("pointermove", (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      const i = steps.reduce((best, step, k) => (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at) ? k : best), 0);
      const head = every > 1 ? `highest of ${every} measured steps from step ${steps[i]}` : `step ${steps[i]}`;
      tip.show(event, el("p", { class: "when" }, head), facts(lines.map(([name, values]) => [name, bytes(values[i])])));
    });
    picture.addEventListener("pointerleave", () => tip.hide());
    element.replaceChildren(picture);
  });
  return element;
}

/** The points of a history in stretches without a gap: a line through steps that were not measured would say too much. */
function stretches(steps, ends) {
  return steps.reduce((found, step, i) => {
    if (i && step <= ends[i - 1] + 1) found.at(-1).push(i);
    else found.push([i]);
    return found;
  }, []);
}

/** The timeline of a report: the picture comes with the data; the script adds the figures below the pointer. */
function timelineView(section) {
  const { moments, series } = section.data;
  const picture = new DOMParser().parseFromString(section.data.svg, "text/html").body;
  const element = el("div", {}, ...picture.childNodes);
  const chart = element.querySelector("svg");
  const [left, right] = [Number(chart.dataset.left), Number(chart.dataset.right)];
  const names = Object.keys(series);
  const tip = tooltip();
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const at = ((x - left) / (right - left)) * (moments.at(-1) || 1);
    const i = moments.reduce((best, moment, k) => (Math.abs(moment - at) < Math.abs(moments[best] - at) ? k : best), 0);
    const total = names.reduce((sum, name) => sum + series[name][i], 0);
    tip.show(event, el("p", { class: "bytes" }, bytes(total)), facts(names.toReversed().map((name) => [name, bytes(series[name][i])])));
  });
  chart.addEventListener("pointerleave", () => tip.hide());
  return [el("section", {}, el("h2", {}, section.title), element)];
}
