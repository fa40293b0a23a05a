// The timeline of a memory report: the picture comes with the data; the script adds the figures below the pointer.

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
