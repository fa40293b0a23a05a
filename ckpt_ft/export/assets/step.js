// A step: its allocations, and who lives at a moment. Sums of what the trace says, nothing more.

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
    this.used = [...new Set(data.category)].sort((a, b) => a - b);
  }

  lives(row, moment) {
    return this.made[row] <= moment && moment < this.freed[row];
  }

  /** Rows that live at `moment`, lowest in the stack first. */
  *alive(moment) {
    for (let i = 0; i < this.count; i++) if (this.lives(i, moment)) yield i;
  }

  /** The row that lies at `level` bytes of the stack at `moment`; -1 above it. */
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

  /** Of the moments `from` ... `to` the first one that holds the most. */
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

  /** When a moment is, in words. */
  when(moment) {
    const at = `event ${COUNT.format(moment)} of ${COUNT.format(this.last)}`;
    const time = this.time ? ` · ${seconds(this.time[moment] / 1e6)}` : "";
    return moment ? `${at} · ${this.phaseAt(moment)}${time}` : "before the step";
  }

  /** Rows made by the same op in the same place of other layers, this one included. */
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
