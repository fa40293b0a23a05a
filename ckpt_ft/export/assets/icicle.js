// The bytes of a moment by module: each row of the icicle is one level of the module tree.

const LEVEL = 30; // pixels of a row
const NARROW = 2; // cells narrower than this many pixels are left out
const OUTSIDE = "outside of modules";

/** The tree of module names, and the node of each place; a node comes after its parent. */
class Tree {
  constructor(name, places) {
    this.nodes = [{ name, path: name, parent: -1, depth: 0, children: [] }];
    const known = new Map();
    this.leaf = places.map((place) => {
      let at = 0;
      let path = "";
      for (const part of place ? place.split(".") : [OUTSIDE]) {
        path = path ? `${path}.${part}` : part;
        if (!known.has(path)) {
          known.set(path, this.nodes.length);
          this.nodes[at].children.push(this.nodes.length);
          this.nodes.push({ name: part, path, parent: at, depth: this.nodes[at].depth + 1, children: [] });
        }
        at = known.get(path);
      }
      return at;
    });
  }

  /** Bytes of each node by category at a moment of `step`. */
  sums(step, moment) {
    const kinds = step.categories.length;
    const sums = new Float64Array(this.nodes.length * kinds);
    for (const i of step.alive(moment)) sums[this.leaf[step.place[i]] * kinds + step.category[i]] += step.bytes[i];
    for (let node = this.nodes.length - 1; node > 0; node--) {
      for (let k = 0; k < kinds; k++) sums[this.nodes[node].parent * kinds + k] += sums[node * kinds + k];
    }
    return this.nodes.map((_, node) => sums.subarray(node * kinds, (node + 1) * kinds));
  }
}

class Icicle {
  constructor(step) {
    this.step = step;
    const groups = step.group.map((group) => step.groups[group]);
    this.trees = { together: new Tree(step.name || "step", groups), apart: new Tree(step.name || "step", step.places) };
    this.use(true);
    this.moment = step.peak;
    this.levels = el("div", { class: "icicle", role: "tree", "aria-label": "Bytes by module" });
    this.path = el("nav", { class: "path", "aria-label": "The module that is shown" });
    this.element = el("div", {}, this.path, this.levels);
    this.tip = tooltip();
    this.draw = onceAFrame(() => this.drawn());
    onWidth(this.levels, (width) => {
      this.width = width;
      this.draw();
    });
  }

  use(together) {
    this.tree = this.trees[together ? "together" : "apart"];
    this.root = 0;
  }

  look(moment) {
    this.moment = moment;
    this.draw();
  }

  drawn() {
    if (!this.width) return;
    this.sums = this.tree.sums(this.step, this.moment);
    const cells = [];
    const place = (first, left, width, depth) => {
      if (width < NARROW) return;
      const node = this.endOfChain(first);
      cells.push(this.cell(first, node, left, width, depth));
      const scale = width / total(this.sums[node]);
      for (const child of this.tree.nodes[node].children) {
        const part = total(this.sums[child]) * scale;
        place(child, left, part, depth + 1);
        left += part;
      }
    };
    if (total(this.sums[this.root])) place(this.root, 0, this.width, 0);
    const deepest = Math.max(0, ...cells.map((cell) => Number(cell.dataset.depth)));
    this.levels.style.height = `${(Math.max(deepest, this.deepest || 0) + 1) * LEVEL}px`;
    this.deepest = Math.max(deepest, this.deepest || 0);
    this.levels.replaceChildren(...cells);
    this.path.replaceChildren(...this.crumbs());
  }

  /** The innermost module that holds all bytes of `node`: "model", "model.layers", "model.layers.*" are one cell. */
  endOfChain(node) {
    const all = total(this.sums[node]);
    const only = node ? this.tree.nodes[node].children.find((child) => total(this.sums[child]) === all) : undefined;
    return only === undefined ? node : this.endOfChain(only);
  }

  cell(first, node, left, width, depth) {
    const { path } = this.tree.nodes[node];
    const name = first === node ? this.tree.nodes[node].name : path.slice(this.tree.nodes[first].path.lastIndexOf(".") + 1);
    const held = this.sums[node];
    const label = width > 40 ? `${name} ${width > 120 ? bytes(total(held)) : ""}` : "";
    return el("div", {
      class: "cell", role: "treeitem", tabindex: 0, "data-depth": depth, "aria-level": depth + 1,
      "aria-label": `${path}: ${bytes(total(held))}`,
      style: `left: ${left}px; width: ${width - 1}px; top: ${depth * LEVEL}px; --kinds: ${this.kinds(held)}`,
      onclick: () => this.into(node),
      onkeydown: (event) => {
        if (event.key === "Enter") this.into(node);
        if (event.key === "Backspace") this.into(Math.max(this.tree.nodes[this.root].parent, 0));
      },
      onpointermove: (event) => this.tip.show(event, ...this.tipOf(path, held)),
      onpointerleave: () => this.tip.hide(),
    }, label);
  }

  /** A gradient of the categories' colours in proportion to their bytes. */
  kinds(held) {
    let from = 0;
    const stops = [];
    held.forEach((n, k) => {
      if (!n) return;
      const to = from + (100 * n) / total(held);
      stops.push(`${categoryColour(this.step.categories[k])} ${from.toFixed(1)}% ${to.toFixed(1)}%`);
      from = to;
    });
    return `linear-gradient(90deg, ${stops.join(", ")})`;
  }

  tipOf(path, held) {
    const rows = [...held.entries()].filter(([, n]) => n).map(([k, n]) => [this.step.categories[k], bytes(n)]);
    return [el("p", { class: "bytes" }, bytes(total(held))), el("p", { class: "place" }, path), facts(rows)];
  }

  into(node) {
    this.tip.hide();
    this.root = node === this.root ? Math.max(this.tree.nodes[node].parent, 0) : node;
    this.deepest = 0;
    this.draw();
  }

  crumbs() {
    const found = [];
    for (let node = this.root; node >= 0; node = this.tree.nodes[node].parent) {
      const to = node;
      found.unshift(el("button", { class: "small", onclick: () => this.into(to) }, this.tree.nodes[node].name));
    }
    return found.length > 1 ? found : [];
  }
}

function total(held) {
  return held.reduce((sum, n) => sum + n, 0);
}
