// The whole step, small: which stretch of it the chart shows, to be dragged.

const SMALL = 44;

class Minimap {
  constructor(chart) {
    this.chart = chart;
    this.element = svg("svg", { class: "minimap", height: SMALL, "aria-hidden": "true" });
    let grip = null;
    this.element.addEventListener("pointerdown", (event) => {
      const { stretch } = chart;
      const at = this.positionOf(event);
      grip = at >= stretch.from && at <= stretch.to ? at - stretch.from : (stretch.to - stretch.from) / 2;
      this.element.setPointerCapture(event.pointerId);
      this.drag(at - grip);
    });
    this.element.addEventListener("pointermove", (event) => {
      if (grip !== null) this.drag(this.positionOf(event) - grip);
    });
    this.element.addEventListener("pointerup", () => (grip = null));
  }

  positionOf(event) {
    const { left } = this.element.getBoundingClientRect();
    return ((event.clientX - left - LEFT) / this.chart.width) * this.chart.stretch.end;
  }

  drag(from) {
    const { stretch } = this.chart;
    stretch.show(from, stretch.to - stretch.from);
    this.chart.redraw();
  }

  draw(width) {
    const { step, stretch } = this.chart;
    const whole = new Stretch(step);
    if (stretch.axis === "time") whole.use("time");
    const most = step.total[step.peak] || 1;
    const line = [...whole.columns(width)].map((m, c) => `${LEFT + c},${SMALL - 4 - (step.total[m] / most) * (SMALL - 10)}`);
    const x = (position) => LEFT + (position / stretch.end) * width;
    filled(this.element, { width: width + LEFT + RIGHT }, []);
    this.element.replaceChildren(
      svg("path", { class: "small-total", d: `M${LEFT},${SMALL - 4}L${line.join("L")}L${LEFT + width},${SMALL - 4}Z` }),
      svg("rect", { class: "seen", x: x(stretch.from), y: 2, width: Math.max(3, x(stretch.to) - x(stretch.from)), height: SMALL - 4 }),
    );
  }
}
