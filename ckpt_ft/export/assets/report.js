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

/** The stacked categories of a report that was read back, whose single allocations are not known. */
function timelineView(section) {
  const { moments, series, marks, peak, source } = section.data;
  const [names, last] = [Object.keys(series), moments.at(-1) || 1];
  const tops = names.map((name, k) => moments.map((_, i) => names.slice(0, k + 1).reduce((sum, below) => sum + series[below][i], 0)));
  const highest = Math.max(0, ...(tops.at(-1) || []));
  const most = 1.1 * highest || 1;
  const element = el("div");
  const tip = tooltip();
  onWidth(element, (width) => {
    const x = (moment) => LEFT + (moment / last) * (width - LEFT - RIGHT);
    const y = (n) => LOW - BOTTOM - (n / most) * (LOW - TOP - BOTTOM);
    const edge = (levels) => moments.map((moment, i) => `${x(moment)},${y(levels ? levels[i] : 0)}`);
    const said = `Memory over the step, ${source}: peak ${bytes(highest)}`;
    const picture = svg("svg", { width, height: LOW, role: "img", "aria-label": said },
      ...byteMarks(0, most, 5).map(([n, label]) => svg("text", { x: LEFT - 8, y: y(n) + 4, "text-anchor": "end" }, label)),
      ...names.map((name, k) => svg("polygon", { points: [...edge(tops[k]), ...edge(tops[k - 1]).reverse()].join(" "), fill: categoryColour(name) }, svg("title", {}, name))),
      ...marks.flatMap(([at, phase], i) => {
        const line = svg("line", { class: "between", x1: x(at), x2: x(at), y1: TOP, y2: LOW - BOTTOM });
        const [end] = marks[i + 1] || [last];
        return x(end) - x(at) > 8 * phase.length ? [line, svg("text", { x: x(at) + 4, y: LOW - 7 }, phase)] : [line];
      }),
      svg("text", { x: x(peak), y: y(highest) - 5, "text-anchor": peak > last / 2 ? "end" : "start" }, `peak ${bytes(highest)}`));
    picture.addEventListener("pointermove", (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      const i = moments.reduce((best, moment, k) => (Math.abs(x(moment) - at) < Math.abs(x(moments[best]) - at) ? k : best), 0);
      tip.show(event, el("p", { class: "bytes" }, bytes(tops.length ? tops.at(-1)[i] : 0)), facts(names.toReversed().map((name) => [name, bytes(series[name][i])])));
    });
    picture.addEventListener("pointerleave", () => tip.hide());
    element.replaceChildren(picture);
  });
  const keys = names.map((name) => el("span", {}, el("i", { class: "swatch", style: `background: ${categoryColour(name)}` }), name));
  return [el("section", {}, el("h2", {}, section.title), el("div", { class: "tools" }, ...keys), element)];
}
