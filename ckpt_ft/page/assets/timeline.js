// A step in short, as a report's JSON has it: bytes by category at some hundred moments.

function timelineView(section) {
  const { moments, series, marks: phases, peak, source } = section.data;
  const names = Object.keys(series);
  const totals = moments.map((_, i) => names.reduce((sum, name) => sum + series[name][i], 0));
  const most = 1.08 * Math.max(...totals);
  const element = el("div");
  const tip = tooltip();
  onWidth(element, (width) => {
    const x = (moment) => LEFT + (moment / moments.at(-1)) * (width - LEFT - RIGHT);
    const y = (n) => TALL - BOTTOM - (n / most) * (TALL - TOP - BOTTOM);
    let floor = moments.map(() => 0);
    const areas = names.map((name) => {
      const top = floor.map((n, i) => n + series[name][i]);
      const edge = (levels) => levels.map((n, i) => `${x(moments[i])},${y(n)}`);
      const path = `M${edge(top).join("L")}L${edge(floor).reverse().join("L")}Z`;
      floor = top;
      return svg("path", { d: path, fill: categoryColour(name) });
    });
    const high = Math.max(...totals);
    const picture = svg("svg", { width, height: TALL, role: "img", "aria-label": `Memory over the step, ${source}: peak ${bytes(high)}` },
      ...byteMarks(0, most, 6).flatMap(([n, label]) => [
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) }),
        svg("text", { x: LEFT - 8, y: y(n) + 4, "text-anchor": "end" }, label),
      ]),
      ...areas,
      ...phases.map(([at, name]) => svg("g", {}, svg("line", { class: "phase", x1: x(at), x2: x(at), y1: 4, y2: TALL - BOTTOM }),
        svg("text", { class: "phase-name", x: x(at) + 5, y: 16 }, name))),
      svg("text", { class: "phase-name", x: x(peak), y: y(high) - 6, "text-anchor": x(peak) > width / 2 ? "end" : "start" }, `peak ${bytes(high)}`));
    picture.addEventListener("pointermove", (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      const i = moments.reduce((best, moment, k) => (Math.abs(x(moment) - at) < Math.abs(x(moments[best]) - at) ? k : best), 0);
      tip.show(event, el("p", { class: "bytes" }, bytes(totals[i])),
        facts(names.toReversed().map((name) => [name, bytes(series[name][i])])));
    });
    picture.addEventListener("pointerleave", () => tip.hide());
    element.replaceChildren(picture);
  });
  const keys = names.map((name) => el("span", {}, el("i", { class: "swatch", style: `background: ${categoryColour(name)}` }), name));
  return [el("section", {}, el("h2", {}, section.title), el("div", { class: "tools" }, ...keys), element)];
}
