// The picture of the choice: bytes across, speed up, the frontier, and the budget as a line with a handle.

class ChoiceChart {
  constructor(choice) {
    this.choice = choice;
    this.drawn = svg("g");
    this.handle = this.slider(); // stays where it is while it is dragged: what is drawn anew is behind it
    this.svg = svg("svg", { height: HIGH, class: "choice", "aria-label": "Candidates by bytes reserved and speed" },
      this.drawn, this.handle);
    this.element = el("div", {}, this.svg);
    this.tip = tooltip();
    const redraw = onceAFrame(() => this.draw());
    choice.listeners.push(redraw);
    onWidth(this.element, (width) => {
      this.width = width;
      redraw();
    });
  }

  scale() {
    const { points, picks } = this.choice;
    this.most = 1.04 * Math.max(...points.map((p) => p.reserved), ...picks.map((p) => p.budget));
    const speeds = points.map((p) => p.speed);
    this.fastest = 1.05 * Math.max(...speeds);
    this.slowest = Math.min(...speeds) > this.fastest / 2 ? 0.9 * Math.min(...speeds) : 0;
  }

  x(n) {
    return EDGE.left + (n / this.most) * (this.width - EDGE.left - EDGE.right);
  }

  y(speed) {
    const share = (speed - this.slowest) / (this.fastest - this.slowest);
    return HIGH - EDGE.bottom - share * (HIGH - EDGE.top - EDGE.bottom);
  }

  draw() {
    const { choice } = this;
    this.scale();
    filled(this.svg, { width: this.width, viewBox: `0 0 ${this.width} ${HIGH}` }, []);
    const pick = choice.picks[choice.stop];
    const right = this.x(this.most);
    const focused = [...this.drawn.querySelectorAll(".dot")].indexOf(document.activeElement);
    this.drawn.replaceChildren(
      svg("rect", { class: "beyond", x: this.x(pick.limit), y: EDGE.top, width: right - this.x(pick.limit), height: HIGH - EDGE.top - EDGE.bottom }),
      ...this.axes(), ...this.lines(), this.frontier(), ...this.dots(), ...this.labels());
    this.place(pick);
    if (focused >= 0) this.drawn.querySelectorAll(".dot")[focused].focus();
  }

  axes() {
    const bottom = HIGH - EDGE.bottom;
    return [
      ...byteMarks(0, this.most, 7).map(([n, label]) => svg("text", { x: this.x(n), y: bottom + 18, "text-anchor": "middle" }, label)),
      ...marks(this.slowest, this.fastest, 6).flatMap((speed) => [
        svg("line", { class: "grid", x1: EDGE.left, x2: this.x(this.most), y1: this.y(speed), y2: this.y(speed) }),
        svg("text", { x: EDGE.left - 8, y: this.y(speed) + 4, "text-anchor": "end" }, digits(speed)),
      ]),
      ...this.choice.picks.map((pick) => svg("path", { class: "stop", d: `M${this.x(pick.budget)},${bottom}l-4,-7h8z` })),
      svg("text", { x: this.x(this.most), y: HIGH - 6, "text-anchor": "end" }, "bytes reserved, predicted"),
      svg("text", { x: EDGE.left - 50, y: 16 }, this.choice.unit),
    ];
  }

  /** The batch sizes of one policy, joined. */
  lines() {
    const byPolicy = Map.groupBy(this.choice.points, (point) => point.policy);
    return [...byPolicy.values()].filter((points) => points.length > 1).map((points) => svg("polyline", {
      class: "family", points: points.map((p) => `${this.x(p.reserved)},${this.y(p.speed)}`).join(" "),
    }));
  }

  frontier() {
    const points = this.choice.frontier.map((i) => this.choice.points[i]).toSorted((a, b) => a.reserved - b.reserved);
    const steps = points.map((p, i) => (i ? `H${this.x(p.reserved)}V${this.y(p.speed)}` : `M${this.x(p.reserved)},${this.y(p.speed)}`));
    return svg("path", { class: "frontier", d: steps.join("") });
  }

  /** The points, those that matter most on top. */
  dots() {
    const { choice } = this;
    const weight = (i) => 2 * (choice.points[i] === choice.pick) + choice.frontier.includes(i);
    return [...choice.points.keys()].sort((a, b) => weight(a) - weight(b)).map((i) => {
      const point = choice.points[i];
      const state = [
        point === choice.pick ? "pick" : "",
        choice.compared.includes(i) ? `side-${choice.compared.indexOf(i) + 1}` : "",
        point.reserved > choice.picks[choice.stop].limit ? "too-large" : "",
        choice.frontier.includes(i) ? "edge" : "",
      ].join(" ");
      return svg("circle", {
        class: `dot ${state}`, cx: this.x(point.reserved), cy: this.y(point.speed), r: point === choice.pick ? 8 : 5.5,
        tabindex: 0, role: "button", "aria-pressed": String(choice.compared.includes(i)),
        "aria-label": `${point.policy}, batch ${point.batch}: ${bytes(point.reserved)}, ${digits(point.speed)} ${choice.unit}`,
        onclick: () => choice.compare(i),
        onkeydown: (event) => event.key === "Enter" && choice.compare(i),
        onpointermove: (event) => this.tip.show(event, ...this.tipOf(point)),
        onpointerleave: () => this.tip.hide(),
      });
    });
  }

  tipOf(point) {
    return [
      el("p", { class: "place" }, point.policy),
      facts([["batch", point.batch], ["reserved", bytes(point.reserved)], ["peak allocated", bytes(point.peak)],
        [this.choice.unit, digits(point.speed)], ["a step", seconds(point.seconds)]]),
    ];
  }

  /** Names beside the points that matter, where they hide neither points nor one another. */
  labels() {
    const { choice } = this;
    const wanted = [...new Set([choice.points.indexOf(choice.pick), ...choice.compared, ...choice.frontier])];
    const taken = choice.points.map((p) => box(this.x(p.reserved), this.y(p.speed), 7, 7));
    const found = [];
    for (const i of wanted) {
      const point = choice.points[i];
      const words = `${point.policy} · ${point.batch}`;
      const wide = 6.3 * words.length;
      const [x, y] = [this.x(point.reserved), this.y(point.speed)];
      const places = [[11, 4], [-11 - wide, 4], [-wide / 2, -13], [-wide / 2, 21], [11, -12], [11, 20], [-11 - wide, -12], [-11 - wide, 20]];
      const free = places.map(([dx, dy]) => ({ x: x + dx, y: y + dy, box: [x + dx, y + dy - 11, x + dx + wide, y + dy + 3] }))
        .find((place) => place.box[0] > EDGE.left && place.box[2] < this.width && place.box[1] > EDGE.top - 10 && !taken.some((other) => overlap(other, place.box)));
      if (!free) continue;
      taken.push(free.box);
      found.push(svg("text", { class: `point-name ${point === choice.pick ? "pick" : ""}`, x: free.x, y: free.y }, words));
    }
    return found;
  }

  /** The budget: a line with a handle, to be dragged or moved by keys from stop to stop. */
  slider() {
    const { choice } = this;
    const label = svg("text", { "text-anchor": "middle", y: 17 });
    const handle = svg("g", { class: "budget", tabindex: 0, role: "slider", "aria-label": "Budget" },
      svg("line", { y1: 24, y2: HIGH - EDGE.bottom }), svg("rect", { y: 1, height: 23, rx: 6 }), label);
    let dragged = false;
    const follow = (event) => {
      const { left } = this.svg.getBoundingClientRect();
      const share = (event.clientX - left - EDGE.left) / (this.width - EDGE.left - EDGE.right);
      choice.move(choice.nearest(share * this.most));
    };
    handle.addEventListener("pointerdown", (event) => {
      dragged = true;
      handle.setPointerCapture(event.pointerId);
    });
    handle.addEventListener("pointermove", (event) => dragged && follow(event));
    handle.addEventListener("pointerup", () => (dragged = false));
    handle.addEventListener("keydown", (event) => {
      const to = {
        ArrowLeft: choice.stop - 1, ArrowDown: choice.stop - 1, ArrowRight: choice.stop + 1, ArrowUp: choice.stop + 1,
        Home: 0, End: choice.picks.length - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choice.move(to);
    });
    return handle;
  }

  place(pick) {
    const x = this.x(pick.budget);
    const [line, plate, label] = this.handle.children;
    label.textContent = `budget ${bytes(pick.budget)}`;
    const wide = 7 * label.textContent.length + 14;
    const middle = Math.min(Math.max(x, wide / 2 + 2), this.width - wide / 2 - 2);
    filled(line, { x1: x, x2: x }, []);
    filled(plate, { x: middle - wide / 2, width: wide }, []);
    filled(label, { x: middle }, []);
    filled(this.handle, {
      "aria-valuemin": this.choice.picks[0].budget, "aria-valuemax": this.choice.picks.at(-1).budget,
      "aria-valuenow": pick.budget,
      "aria-valuetext": `${bytes(pick.budget)}: ${this.choice.pick.policy}, batch ${this.choice.pick.batch}`,
    }, []);
  }
}

function box(x, y, wide, high) {
  return [x - wide, y - high, x + wide, y + high];
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}
