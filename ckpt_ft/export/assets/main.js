// The page: its header, then the view of each section.

const VIEWS = { figures: figuresView, run: runView, step: stepView, timeline: timelineView, tables: tablesView };

function figuresView(section) {
  const figures = section.data.map(({ label, value, note }) => el("div", { class: "figure" },
    el("span", { class: "label" }, label), el("span", { class: "value" }, value), el("span", { class: "muted" }, note)));
  return [el("section", { class: "figures" }, ...figures)];
}

function tablesView(section) {
  const tables = section.data.map(({ title, header, rows, text }) => [
    title, new DataTable(header.map((name, i) => ({ name, numbers: !text.includes(i) })), rows),
  ]);
  return [el("section", {}, el("h2", {}, section.title), tabs(Object.fromEntries(tables)))];
}

document.body.append(
  el("header", {},
    el("div", {}, el("h1", {}, DATA.title), el("p", { class: "answer" }, DATA.answer),
      el("p", { class: "muted" }, DATA.subtitle), el("p", { class: "muted place" }, DATA.asked)),
    el("button", { class: "small theme", onclick: () => setTheme(isDark() ? "light" : "dark") }, "light / dark")),
  el("main", {}, ...DATA.sections.flatMap((section) => VIEWS[section.kind](section))),
  el("footer", { class: "muted" }, DATA.made));

// Inside another page, which gives its frame this height. Told again and again: the other page may not listen yet.
if (parent !== window) {
  const tell = () => parent.postMessage({ height: document.body.offsetHeight + 8 }, "*");
  new ResizeObserver(tell).observe(document.body);
  setInterval(tell, 1000);
}
