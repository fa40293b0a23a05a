// The stack of a step's allocations, painted pixel by pixel: at 20,000 of them elements would be too slow.

const SHADES = 3; // of a category: neighbours in the stack tell apart

/** Paint the `stretch` of a step onto `canvas`, `size` wide and high, from `base` to `most` bytes. */
function paint(canvas, stretch, size, base, most) {
  const { step } = stretch;
  const ratio = devicePixelRatio || 1;
  const [width, height] = size.map((pixels) => Math.round(pixels * ratio));
  const columns = stretch.columns(width);
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const palette = step.categories.map((name) => shades(colour(`--${name}`)));
  const edge = step.categories.map((name) => packed(colour(`--${name}`).map((part) => part * 0.62)));
  const perPixel = (most - base) / height;
  const stack = new Stack(step);
  for (let c = 0; c < width; c++) {
    let level = 0;
    let drawn = height; // the lowest row of pixels that is still free lies above it
    stack.moveTo(columns[c], (i, category) => {
      level += step.bytes[i];
      const top = Math.max(0, Math.round(height - (level - base) / perPixel));
      if (top >= drawn) return;
      const fill = palette[category][i % SHADES];
      for (let y = top; y < drawn; y++) pixels[y * width + c] = fill;
      if (drawn - top >= 5 * ratio) pixels[top * width + c] = edge[category];
      drawn = top;
    });
  }
  filled(canvas, { width, height, style: `width: ${size[0]}px; height: ${size[1]}px` }, []);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Who lives, as moments go by: rows of a category are in the order in which they were made. */
class Stack {
  constructor(step) {
    this.step = step;
    this.parts = step.used.map((category) => {
      const from = step.category.indexOf(category);
      const to = step.category.lastIndexOf(category) + 1;
      return { category, next: from, to, alive: new Int32Array(to - from), count: 0 };
    });
  }

  /** Go on to `moment` and `visit(row, category)` who lives there, lowest first. */
  moveTo(moment, visit) {
    const { made, freed } = this.step;
    for (const part of this.parts) {
      const { alive, category } = part;
      while (part.next < part.to && made[part.next] <= moment) alive[part.count++] = part.next++;
      let kept = 0;
      for (let k = 0; k < part.count; k++) {
        const row = alive[k];
        if (freed[row] <= moment) continue;
        alive[kept++] = row;
        visit(row, category);
      }
      part.count = kept;
    }
  }
}

function shades(rgb) {
  return [1, 0.93, 0.87].map((factor) => packed(rgb.map((part) => part * factor)));
}

function packed([r, g, b]) {
  return (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
}

/** The outline of `row` over `columns`, as the path of an SVG: `y(level)` says where a level of bytes lies. */
function outline(step, row, columns, x, y) {
  const tops = [];
  const bottoms = [];
  for (let c = 0; c < columns.length; c++) {
    if (!step.lives(row, columns[c])) continue;
    const bottom = step.below(row, columns[c]);
    bottoms.push(`${x(c)},${y(bottom)} ${x(c + 1)},${y(bottom)}`);
    tops.push(`${x(c + 1)},${y(bottom + step.bytes[row])} ${x(c)},${y(bottom + step.bytes[row])}`);
  }
  return tops.length ? `M${bottoms.join("L")}L${tops.reverse().join("L")}Z` : "";
}
