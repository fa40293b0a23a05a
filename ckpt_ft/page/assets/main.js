// The page: its head, then each section by the view of its kind.

const VIEWS = { figures: figuresView, step: stepView, table: tableView };

function figuresView(section) {
  const figures = section.data.map(({ label, value, note }) => el("div", { class: "figure" },
    el("span", { class: "label" }, label), el("span", { class: "value" }, value), el("span", { class: "muted" }, note)));
  return [el("section", { class: "figures" }, ...figures)];
}

function tableView(section) {
  const { header, rows, text } = section.data;
  const heads = header.map((name, i) => ({ name, numbers: !text.includes(i) }));
  return [el("section", {}, el("h2", {}, section.title), new DataTable(heads, rows).element)];
}

document.body.append(
  el("header", {},
    el("div", {}, el("h1", {}, DATA.title), el("p", { class: "muted" }, DATA.subtitle)),
    el("button", { class: "small theme", onclick: () => setTheme(isDark() ? "light" : "dark") }, "light / dark")),
  el("main", {}, ...DATA.sections.flatMap((section) => VIEWS[section.kind](section))),
  el("footer", { class: "muted" }, DATA.made));
