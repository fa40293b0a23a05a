// The stretch of a step that is looked at: which positions are seen, and which moment each column of pixels shows.

class Stretch {
  constructor(step) {
    this.step = step;
    this.use("order");
  }

  /** Moments lie by their order, or by time. */
  use(axis) {
    const kept = this.position && [this.momentAt(this.from), this.momentAt(this.to)];
    this.axis = axis;
    this.position = axis === "time" ? this.step.time : this.step.order;
    this.end = this.position[this.step.last] || 1;
    [this.from, this.to] = kept ? [this.position[kept[0]], this.position[kept[1]]] : [0, this.end];
    if (this.to <= this.from || (kept && kept[1] === this.step.last)) this.to = this.end;
  }

  /** The last moment that has begun at `position`. */
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

  /** For each of `width` columns the fullest moment that it covers, so that no peak is lost. */
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

  /** Make the stretch `factor` as wide, with `share` of its width staying where it is. */
  zoom(factor, share) {
    const kept = this.from + share * (this.to - this.from);
    const wide = this.width((this.to - this.from) * factor);
    this.show(kept - share * wide, wide);
  }

  /** Make what lies between two shares of the width all that is seen. */
  select(left, right) {
    const wide = this.to - this.from;
    this.show(this.from + left * wide, this.width((right - left) * wide));
  }

  /** A width of at least a few moments, and at most the whole step. */
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

  /** Move no further than needed for `moment` to be seen. */
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
