// How the chart of a step is used: pointer, wheel, drag and keys.

const DRAGGED = 5; // pixels from which on a press is a drag

function listen(chart) {
  const { box, stretch, step } = chart;
  let pressed = null;

  box.addEventListener("pointerdown", (event) => {
    pressed = chart.under(event);
    if (pressed) box.setPointerCapture(event.pointerId);
  });

  box.addEventListener("pointermove", (event) => {
    const found = chart.under(event);
    if (pressed) return markRange(chart, pressed.column, rangeEnd(chart, event));
    chart.hovered = found ? found.row : -1;
    chart.moment = found ? found.moment : chart.rest;
    if (found) chart.tip.show(event, ...tipOf(step, found));
    else chart.tip.hide();
    chart.repoint();
  });

  box.addEventListener("pointerup", (event) => {
    const from = pressed;
    pressed = null;
    if (!from) return;
    const end = rangeEnd(chart, event);
    if (Math.abs(end - from.column) >= DRAGGED) {
      stretch.select(Math.min(end, from.column) / chart.width, Math.max(end, from.column) / chart.width);
      chart.redraw();
    } else {
      chart.moment = chart.rest = from.moment;
      chart.choose(from.row);
    }
  });

  box.addEventListener("pointerleave", () => {
    if (pressed) return;
    chart.hovered = -1;
    chart.moment = chart.rest;
    chart.tip.hide();
    chart.repoint();
  });

  box.addEventListener("dblclick", () => {
    stretch.whole();
    chart.redraw();
  });

  box.addEventListener("wheel", (event) => {
    const found = chart.under(event);
    if (!found) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      stretch.pan((event.deltaX || event.deltaY) / chart.width);
    } else {
      stretch.zoom(1.0025 ** event.deltaY, found.column / chart.width);
    }
    chart.redraw();
  }, { passive: false });

  box.addEventListener("keydown", (event) => {
    const key = KEYS[event.key];
    if (!key || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    key(chart, event.shiftKey);
  });
}

function rangeEnd(chart, event) {
  return Math.min(Math.max(0, event.clientX - chart.box.getBoundingClientRect().left - LEFT), chart.width);
}

function markRange(chart, from, to) {
  const [x, width] = [LEFT + Math.min(from, to), Math.abs(to - from)];
  if (width < DRAGGED) return;
  chart.tip.hide();
  chart.front.replaceChildren(svg("rect", { class: "range", x, y: TOP, width, height: TALL - TOP - BOTTOM }));
}

/** By a moment, or with Shift by a tenth of what is seen. */
function along(chart, direction, far) {
  const { stretch } = chart;
  const wide = Math.max(1, stretch.momentAt(stretch.to) - stretch.momentAt(stretch.from));
  chart.go(chart.rest + direction * (far ? Math.ceil(wide / 10) : 1));
}

/** To the next allocation up or down the stack at this moment. */
function updown(chart, direction) {
  const rows = [...chart.step.alive(chart.rest)];
  const at = rows.indexOf(chart.row);
  const next = at < 0 ? (direction > 0 ? 0 : rows.length - 1) : at + direction;
  if (rows[next] !== undefined) chart.choose(rows[next]);
}

function closer(chart, factor) {
  const { stretch } = chart;
  const share = (stretch.position[chart.rest] - stretch.from) / (stretch.to - stretch.from);
  stretch.zoom(factor, Math.min(Math.max(share, 0), 1));
  chart.redraw();
}

/** To the peak, close enough to tell what stands beside it. */
function toPeak(chart) {
  const { stretch, step } = chart;
  const wide = stretch.width(stretch.end / 25);
  stretch.show(stretch.position[step.peak] - wide / 2, wide);
  chart.go(step.peak);
}

const KEYS = {
  ArrowLeft: (chart, far) => along(chart, -1, far),
  ArrowRight: (chart, far) => along(chart, 1, far),
  ArrowUp: (chart) => updown(chart, 1),
  ArrowDown: (chart) => updown(chart, -1),
  Home: (chart) => chart.go(0),
  End: (chart) => chart.go(chart.step.last),
  "+": (chart) => closer(chart, 0.5),
  "=": (chart) => closer(chart, 0.5),
  "-": (chart) => closer(chart, 2),
  p: toPeak,
  0: (chart) => {
    chart.stretch.whole();
    chart.redraw();
  },
  Escape: (chart) => chart.choose(-1),
};

/** What the tooltip says of an allocation, or of the moment above the stack. */
function tipOf(step, { moment, row }) {
  const head = el("p", { class: "when" }, step.when(moment));
  const total = el("p", {}, `${bytes(step.total[moment])} allocated`);
  if (row < 0) return [head, total];
  return [
    el("p", { class: "bytes" }, el("i", { class: "swatch", style: `background: ${categoryColour(step.categories[step.category[row]])}` }),
      `${bytes(step.bytes[row])} `, el("span", { class: "muted" }, step.categories[step.category[row]])),
    el("p", { class: "place" }, step.placeOf(row)),
    el("p", {}, step.opOf(row)),
    el("p", { class: "muted" }, `made: ${step.when(step.made[row])}`),
    el("p", { class: "muted" }, `freed: ${step.lasts[row] ? "not in this step" : step.when(step.freed[row])}`),
    el("hr"),
    el("p", { class: "muted" }, `at ${step.when(moment)}: ${bytes(step.total[moment])} in all`),
  ];
}
