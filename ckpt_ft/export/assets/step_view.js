// The view of a step: the chart, the moment under the pointer, the bytes by module, and tables.

function stepView(section) {
  const step = new Step(section.data);
  const icicle = new Icicle(step);
  const here = el("div", { class: "here" });
  const life = el("div", { class: "life" });
  const look = (moment) => {
    here.replaceChildren(...atMoment(step, moment));
    icicle.look(moment);
  };
  const chart = new StepChart(step, look, (row) => life.replaceChildren(...lifeOf(step, row, chart)));
  life.replaceChildren(...lifeOf(step, -1, chart));
  return [
    el("section", {},
      el("h2", {}, section.title),
      controls(chart, step),
      el("div", { class: "beside" }, chart.element, el("aside", {}, here, life))),
    el("section", {},
      el("h2", {}, "Memory by module"),
      el("p", { class: "muted" }, "Bytes of each module at the moment under the pointer of the chart. Click a module to zoom in."),
      el("div", { class: "tools" }, toggle("merge repeated layers", true, (on) => {
        icicle.use(on);
        icicle.deepest = 0;
        icicle.draw();
      })),
      icicle.element),
    el("section", {}, el("h2", {}, "Figures"), stepTables(step, chart)),
  ];
}

function controls(chart, step) {
  const again = (change) => () => {
    change();
    chart.redraw();
  };
  const { stretch } = chart;
  const small = (label, title, change) => el("button", { class: "small", title, onclick: again(change) }, label);
  return el("div", { class: "tools" },
    step.time ? choose("What the axis shows", ["by event", "by time"], "by event", (name) => {
      stretch.use(name === "by time" ? "time" : "order");
      chart.redraw();
    }) : null,
    small("+", "zoom in (+)", () => closer(chart, 0.5)),
    small("−", "zoom out (−)", () => closer(chart, 2)),
    small("whole step", "double-click, or 0", () => stretch.whole()),
    small("to the peak", "P", () => toPeak(chart)),
    choose("Scale", ["from zero", "what changes", ...(step.limit ? ["to the limit"] : [])], "from zero", (name) => {
      chart.scale = name;
      chart.redraw();
    }),
    el("span", { class: "muted hint" }, "wheel or drag to zoom · click an allocation for its lifetime"));
}

/** The allocated bytes of a moment by category. */
function atMoment(step, moment) {
  const held = step.byCategory(moment);
  const all = step.total[moment];
  const rows = step.used.toReversed().map((k) => el("tr", {},
    el("td", {}, el("i", { class: "swatch", style: `background: ${categoryColour(step.categories[k])}` }), step.categories[k]),
    el("td", { class: "number" }, bytes(held[k])),
    el("td", { class: "number muted" }, share(held[k], all))));
  const reserved = !step.reserves ? [] : [
    ["reserved", bytes(step.reservedAt(moment))],
    ...(step.limit ? [["left of the limit", bytes(step.limit - step.reservedAt(moment))]] : []),
  ];
  return [
    el("h3", {}, moment === step.peak ? "At the peak" : "At this moment"),
    el("p", { class: "muted" }, step.when(moment)),
    el("p", { class: "big" }, bytes(all)),
    el("table", { class: "plain" }, el("tbody", {}, ...rows)),
    facts(reserved),
  ];
}

function share(part, all) {
  const percent = Math.round((100 * part) / (all || 1));
  return part && !percent ? "< 1 %" : `${percent} %`;
}

/** The lifetime of an allocation. */
function lifeOf(step, row, chart) {
  if (row < 0) return [el("p", { class: "muted" }, "Click an allocation, or choose one with the arrow keys, to see its lifetime.")];
  const alike = step.alike(row);
  const stays = step.lasts[row];
  return [
    el("h3", {}, "Allocation"),
    el("p", { class: "big" }, bytes(step.bytes[row])),
    el("p", { class: "place" }, step.placeOf(row)),
    facts([
      ["op", step.opOf(row)],
      ["category", step.categories[step.category[row]]],
      ["bytes", COUNT.format(step.bytes[row])],
      ["allocated", moment(chart, step.made[row])],
      ["freed", stays ? "not in this step" : moment(chart, step.freed[row])],
      ["lifetime", `${COUNT.format(step.freed[row] - step.made[row])} events${lasted(step, row)}`],
      ["at the peak", step.lives(row, step.peak) ? "alive" : "not alive"],
      ["in repeated layers", `${COUNT.format(alike.length)}, in total ${bytes(total(alike.map((i) => step.bytes[i])))}`],
    ]),
  ];
}

function lasted(step, row) {
  if (!step.time || step.lasts[row]) return "";
  return ` · ${seconds((step.time[step.freed[row]] - step.time[step.made[row]]) / 1e6)}`;
}

/** A moment as a link that moves the chart there. */
function moment(chart, at) {
  return el("button", { class: "link", onclick: () => chart.go(at) }, chart.step.when(at));
}

function stepTables(step, chart) {
  const number = (name, show) => ({ name, numbers: true, show });
  const text = (name) => ({ name });
  const all = Array.from(step.bytes.keys(), (i) => [
    step.bytes[i], step.categories[step.category[i]], step.placeOf(i), step.ops[step.op[i]],
    step.phase_names[step.phase[i]], step.made[i], step.lasts[i] ? "" : step.freed[i], i,
  ]);
  const allocations = new DataTable(
    [number("bytes", bytes), text("category"), text("module"), text("op"), text("phase"),
      number("allocated at event", COUNT.format), number("freed at event", (n) => (n === "" ? "" : COUNT.format(n))), number("number")],
    all.sort((a, b) => b[0] - a[0]), (row) => chart.choose(row[7]));
  return tabs({
    "what holds the peak": new DataTable(
      [text("module"), text("op"), text("category"), number("count", COUNT.format), number("bytes", bytes)],
      holders(step, step.peak)),
    "every allocation": allocations,
    "by phase": new DataTable([text("phase"), number("peak", bytes), number("from event", COUNT.format), number("to event", COUNT.format)],
      step.phases.map(([at, name], i) => {
        const end = (step.phases[i + 1] || [step.last])[0];
        return [name, step.total[step.fullest(at, end)], at, end];
      })),
  });
}

/** The holders of a moment, largest first; allocations in repeated layers are merged. */
function holders(step, moment) {
  const groups = new Map();
  for (const i of step.alive(moment)) {
    const place = step.groups[step.group[step.place[i]]] || "outside of modules";
    const row = [place, step.ops[step.op[i]], step.categories[step.category[i]]];
    const key = JSON.stringify(row);
    const group = groups.get(key) || groups.set(key, [...row, 0, 0]).get(key);
    group[3] += 1;
    group[4] += step.bytes[i];
  }
  return [...groups.values()].sort((a, b) => b[4] - a[4]);
}
