// Two steps over one another, and what the second one saves and re-runs.

const LOW = 300;

function comparison(choice) {
  const [first, second] = choice.compared.map((i) => choice.points[i]);
  if (!second) {
    const chosen = first ? `${first.policy} · ${first.batch} is one. ` : "";
    return [el("p", { class: "muted" }, `${chosen}Choose ${first ? "another point" : "two points"} in the picture above, or rows of the table below.`)];
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

/** What the second one saves and what it runs again, each with its largest parts. */
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
    + (kernels ? `in backward it runs ${COUNT.format(kernels)} kernels more, which take ${seconds(time / 1e6)}.` : "it re-runs nothing."));
  const rows = (parts, cells) => parts.slice(0, 8).map((part) => el("tr", {}, ...cells(part)));
  const cell = (text, number) => el("td", { class: number ? "number" : "" }, text);
  return [sum, el("div", { class: "two" },
    el("div", {}, el("h3", {}, "Held at the peak: the second less the first"), el("table", { class: "plain" }, el("tbody", {},
      ...rows(held.map((part) => ({ ...part, more: -part.more })), ({ row, more }) => [
        cell(row[0] || OUTSIDE), cell(row[1]), cell(row[2]), cell(`${more > 0 ? "+" : ""}${bytes(more)}`, true)])))),
    el("div", {}, el("h3", {}, "Run again in backward"), el("table", { class: "plain" }, el("tbody", {},
      ...rows(again, (part) => [
        cell(part.row[0] || OUTSIDE), cell(part.row[1]), cell(`${COUNT.format(part.more)} kernels`, true),
        cell(seconds(longer(part) / 1e6), true)]))))),
  ];
}

/** Rows of `some` less those of `others` that begin with the same `key` texts, by the figure at `at`; largest first. */
function differences(some, others, key, at) {
  const name = (row) => JSON.stringify(row.slice(0, key));
  const known = new Map(others.map((row) => [name(row), row]));
  const found = some.map((row) => ({ row, other: known.get(name(row)), more: row[at] - (known.get(name(row)) || [])[at] || 0 }));
  for (const part of found) if (!part.other) part.more = part.row[at];
  const gone = others.filter((row) => !some.some((kept) => name(kept) === name(row)));
  return [...found, ...gone.map((row) => ({ row, more: -row[at] }))].filter((part) => part.more)
    .sort((a, b) => Math.abs(b.more) - Math.abs(a.more));
}
