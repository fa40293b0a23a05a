// The data of a step, and the part of it that is visible.

/** The allocations of a step, and sums over those that are alive at a moment. */
class Step {
  constructor(data) {
    Object.assign(this, data);
    const n = (this.count = data.bytes.length);
    this.bytes = Float64Array.from(data.bytes);
    this.made = new Int32Array(n);
    this.freed = new Int32Array(n);
    this.lasts = new Uint8Array(n); // whether it outlives the step
    this.total = new Float64Array(this.last + 2);
    const before = {};
    for (let i = 0; i < n; i++) {
      const made = (before[data.category[i]] || 0) + data.made[i];
      before[data.category[i]] = made;
      this.made[i] = made;
      this.lasts[i] = data.life[i] < 0;
      this.freed[i] = this.lasts[i] ? this.last + 1 : made + data.life[i];
      this.total[made] += data.bytes[i];
      this.total[this.freed[i]] -= data.bytes[i];
    }
    for (let m = 1; m <= this.last; m++) this.total[m] += this.total[m - 1];
    this.total = this.total.subarray(0, this.last + 1);
    this.least = this.total.reduce((least, n) => Math.min(least, n));
    this.order = Float64Array.from(this.total.keys());
    this.time = data.microseconds && Float64Array.of(0, ...data.microseconds);
    if (this.time) for (let m = 1; m <= this.last; m++) this.time[m] += this.time[m - 1];
    this.reserves = data.device !== "cpu" && data.reserved.length > 0; // in host memory nothing is
    this.used = [...new Set(data.category)].sort((a, b) => a - b);
  }

  lives(row, moment) {
    return this.made[row] <= moment && moment < this.freed[row];
  }

  /** Rows that are alive at `moment`, lowest in the stack first. */
  *alive(moment) {
    for (let i = 0; i < this.count; i++) if (this.lives(i, moment)) yield i;
  }

  /** The row at `level` bytes of the stack at `moment`; -1 above the stack. */
  rowAt(moment, level) {
    let top = 0;
    for (const i of this.alive(moment)) {
      top += this.bytes[i];
      if (level < top) return i;
    }
    return -1;
  }

  /** Bytes below `row` in the stack at `moment`. */
  below(row, moment) {
    let bottom = 0;
    for (let i = 0; i < row; i++) if (this.lives(i, moment)) bottom += this.bytes[i];
    return bottom;
  }

  /** The first moment with the most bytes from `from` to `to`. */
  fullest(from, to) {
    let best = from;
    for (let m = from + 1; m <= to; m++) if (this.total[m] > this.total[best]) best = m;
    return best;
  }

  /** Bytes of each category at `moment`, in the order of the stack. */
  byCategory(moment) {
    const sums = new Float64Array(this.categories.length);
    for (const i of this.alive(moment)) sums[this.category[i]] += this.bytes[i];
    return sums;
  }

  reservedAt(moment) {
    return this.reserved.findLast(([at]) => at <= moment)[1];
  }

  phaseAt(moment) {
    return (this.phases.findLast(([at]) => at < moment) || this.phases[0] || [0, ""])[1];
  }

  placeOf(row) {
    return this.places[this.place[row]] || "outside of modules";
  }

  opOf(row) {
    return this.ops[this.op[row]] || "there before the step";
  }

  /** The event, phase and time of a moment, as text. */
  when(moment) {
    const at = `event ${COUNT.format(moment)} of ${COUNT.format(this.last)}`;
    const time = this.time ? ` · ${seconds(this.time[moment] / 1e6)}` : "";
    return moment ? `${at} · ${this.phaseAt(moment)}${time}` : "before the step";
  }

  /** Rows of the same op in the same place of all repeated layers, this row included. */
  alike(row) {
    const same = [];
    const group = this.group[this.place[row]];
    for (let i = 0; i < this.count; i++) {
      if (this.category[i] === this.category[row] && this.op[i] === this.op[row]
        && this.phase[i] === this.phase[row] && this.group[this.place[i]] === group) same.push(i);
    }
    return same;
  }
}

/** The visible part of a step: its range of positions, and the moment that each column of pixels shows. */
class Stretch {
  constructor(step) {
    this.step = step;
    this.use("order");
  }

  /** Position the moments by "order" or by "time". */
  use(axis) {
    const kept = this.position && [this.momentAt(this.from), this.momentAt(this.to)];
    this.axis = axis;
    this.position = axis === "time" ? this.step.time : this.step.order;
    this.end = this.position[this.step.last] || 1;
    [this.from, this.to] = kept ? [this.position[kept[0]], this.position[kept[1]]] : [0, this.end];
    if (this.to <= this.from || (kept && kept[1] === this.step.last)) this.to = this.end;
  }

  /** The last moment at or before `position`. */
  momentAt(position) {
    let low = 0;
    let high = this.step.last;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.position[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** For each of `width` columns, the covered moment with the most bytes, so that no peak is lost. */
  columns(width) {
    const found = new Int32Array(width);
    let from = this.momentAt(this.from);
    for (let c = 0; c < width; c++) {
      const end = this.from + ((c + 1) / width) * (this.to - this.from);
      let to = from;
      while (to < this.step.last && this.position[to + 1] < end) to++;
      found[c] = this.step.fullest(from, to);
      from = to;
    }
    return found;
  }

  x(moment, width) {
    return ((this.position[moment] - this.from) / (this.to - this.from)) * width;
  }

  /** Scale the width by `factor` around the position at `share` of the width. */
  zoom(factor, share) {
    const kept = this.from + share * (this.to - this.from);
    const wide = this.width((this.to - this.from) * factor);
    this.show(kept - share * wide, wide);
  }

  /** Show only the range between two shares of the width. */
  select(left, right) {
    const wide = this.to - this.from;
    this.show(this.from + left * wide, this.width((right - left) * wide));
  }

  /** `wanted`, limited to between a few moments and the whole step. */
  width(wanted) {
    return Math.min(this.end, Math.max((8 * this.end) / Math.max(this.step.last, 8), wanted));
  }

  pan(share) {
    this.show(this.from + share * (this.to - this.from), this.to - this.from);
  }

  show(from, wide) {
    this.from = Math.min(Math.max(0, from), this.end - wide);
    this.to = this.from + wide;
  }

  /** Scroll just far enough to show `moment`. */
  reveal(moment) {
    const at = this.position[moment];
    const wide = this.to - this.from;
    if (at < this.from) this.show(at - 0.1 * wide, wide);
    if (at > this.to) this.show(at - 0.9 * wide, wide);
  }

  whole() {
    [this.from, this.to] = [0, this.end];
  }
}
