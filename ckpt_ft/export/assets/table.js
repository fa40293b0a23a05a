// Tables that can be searched, sorted and copied as CSV; only the first rows are shown at first.

const SHOWN = 15;

/**
 * A table of `rows` under `heads` ({name, numbers, show}). A cell is a text, or a number that `show` formats; the CSV
 * has the plain number.
 */
class DataTable {
  constructor(heads, rows, chosen = () => {}) {
    const order = heads.map((_, i) => i);
    if (innerWidth < 600) order.sort((one, other) => isBytes(heads[other]) - isBytes(heads[one]));
    Object.assign(this, { heads, rows, order, chosen, found: rows, shown: SHOWN, sorted: -1, falling: false });
    this.search = el("input", { type: "search", placeholder: "search", "aria-label": "Search the table" });
    this.search.addEventListener("input", () => this.filter());
    this.count = el("span", { class: "muted", "aria-live": "polite" });
    this.more = el("button", { onclick: () => this.draw((this.shown += 10 * SHOWN)) }, "show more");
    this.head = el("tr", {}, ...order.map((i) => this.headCell(heads[i], i)));
    this.body = el("tbody");
    this.element = el("div", { class: "data-table" },
      el("div", { class: "tools" }, this.search, this.count, copyButton(() => this.csv(), "copy as CSV")),
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, this.head), this.body)), this.more);
    this.draw();
  }

  headCell(head, i) {
    return el("th", { scope: "col", class: head.numbers ? "number" : "", "aria-sort": "none" },
      el("button", { onclick: () => this.sort(i) }, head.name));
  }

  filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = this.rows.filter((row) => {
      const text = this.texts(row).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.shown = SHOWN;
    this.draw();
  }

  sort(column) {
    this.falling = this.sorted === column ? !this.falling : this.heads[column].numbers;
    this.sorted = column;
    const way = this.falling ? -1 : 1;
    const order = (a, b) => (a[column] < b[column] ? -way : a[column] > b[column] ? way : 0);
    this.rows = [...this.rows].sort(order);
    [...this.head.children].forEach((cell, i) => {
      cell.setAttribute("aria-sort", this.order[i] === column ? (this.falling ? "descending" : "ascending") : "none");
    });
    this.filter();
  }

  texts(row) {
    return row.map((cell, i) => (this.heads[i].show ? this.heads[i].show(cell) : String(cell)));
  }

  draw() {
    const rows = this.found.slice(0, this.shown);
    this.body.replaceChildren(...rows.map((row) => {
      const texts = this.texts(row);
      return el("tr", { onclick: () => this.chosen(row) },
        ...this.order.map((i) => el("td", { class: this.heads[i].numbers ? "number" : "" }, texts[i])));
    }));
    const all = `${COUNT.format(this.found.length)} of ${COUNT.format(this.rows.length)} rows`;
    this.count.textContent = rows.length < this.found.length ? `${all}, ${COUNT.format(rows.length)} shown` : all;
    this.more.hidden = rows.length >= this.found.length;
  }

  csv() {
    const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));
    return [this.heads.map((head) => head.name), ...this.found].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  }
}

/** Whether a column has bytes; a phone, which shows the first columns alone, shows these first. */
function isBytes(head) {
  return head.show === bytes || /bytes|reserved|allocated|memory/.test(head.name);
}

/** Several tables, one of which is shown. */
function tabs(tables) {
  const names = Object.keys(tables);
  const place = el("div");
  const show = (name) => place.replaceChildren(tables[name].element);
  show(names[0]);
  return el("div", {},
    names.length > 1 ? choose("Tables", names, names[0], show) : el("p", { class: "muted" }, names[0]), place);
}
