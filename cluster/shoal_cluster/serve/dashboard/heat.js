// A replica's blocks as a picture: which are empty, which hold a prefix and for how much longer, which are held by whom.

import { colour, count, element, fetchJson, setText } from "./format.js";

const PERIOD_MS = 1000;
const GAP = 1;

export class Heat {
  constructor(replicaId) {
    this.replicaId = replicaId;
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Block map"); // until it has been told
    this.note = element("p", "note", "asking the replica");
    const legend = element(
      "ul",
      "heat-legend",
      element("li", "empty", "empty"),
      element("li", "cached", "cached; faint goes next"),
      element("li", "held", "one sequence"),
      element("li", "shared", "shared"),
    );
    this.root = element("div", "heat", this.canvas, legend, this.note);
    this.timer = null;
  }

  start() {
    this.ask();
    this.timer ??= setInterval(() => document.hidden || this.ask(), PERIOD_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  async ask() {
    try {
      const map = await fetchJson(`replicas/${encodeURIComponent(this.replicaId)}/blocks`);
      this.draw(map, Uint8Array.from(atob(map.cells), (char) => char.charCodeAt(0)));
    } catch (error) {
      setText(this.note, error.message);
    }
  }

  draw({ num_blocks, blocks_per_cell }, cells) {
    const width = Math.max(this.canvas.parentElement.clientWidth, 120);
    const pixels = devicePixelRatio || 1;
    const size = Math.max(2, Math.min(9, Math.floor(Math.sqrt((width * 130) / Math.max(1, cells.length)))));
    const columns = Math.floor((width + GAP) / (size + GAP));
    const height = Math.ceil(cells.length / columns) * (size + GAP);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * pixels;
    this.canvas.height = height * pixels;
    const context = this.canvas.getContext("2d");
    context.scale(pixels, pixels);
    const [empty, cached, held, shared] = ["--sunken", "--cached", "--running", "--shared"].map(colour);
    const sums = { empty: 0, cached: 0, held: 0, shared: 0 };
    cells.forEach((cell, i) => {
      const kind = cell === 0 ? "empty" : cell < 128 ? "cached" : cell === 129 ? "held" : "shared";
      sums[kind] += 1;
      context.globalAlpha = kind === "cached" ? 0.35 + (0.65 * cell) / 127 : 1;
      context.fillStyle = { empty, cached, held, shared }[kind];
      context.fillRect((i % columns) * (size + GAP), Math.floor(i / columns) * (size + GAP), size, size);
    });
    const per = blocks_per_cell === 1 ? "a cell is a block" : `a cell is ${blocks_per_cell} blocks, as hot as the hottest`;
    setText(this.note, `${count(num_blocks)} blocks; ${per}`);
    const told = `${sums.held} held by one sequence, ${sums.shared} shared, ${sums.cached} cached, ${sums.empty} empty`;
    this.canvas.setAttribute("aria-label", `Block map of ${cells.length} cells: ${told}`);
  }
}
