// A block pool as a filled bar with its numbers.

import { count, element, setText, share } from "./format.js";

const PARTS = ["running", "reserved", "cached", "empty"];

// Total = allocated + free. Of the free ones some hold a prefix (cached) and some are promised (reserved); a promise
// takes empty blocks first. What is left is empty: it holds nothing and waits for nobody.
function parts([allocated, cached, reserved, free, total]) {
  const promised = Math.min(reserved, free);
  const empty = Math.max(0, free - cached - promised);
  return { running: allocated, reserved: promised, cached: Math.max(0, free - promised - empty), empty, total };
}

export class Pool {
  constructor(root) {
    this.bar = element("div", "bar");
    this.bar.setAttribute("role", "img");
    this.segments = PARTS.map((part) => element("span", part));
    this.bar.append(...this.segments);
    this.used = element("strong");
    this.total = element("span");
    this.numbers = PARTS.map(() => element("b"));
    const legend = element("ul", "legend");
    PARTS.forEach((part, i) => legend.append(element("li", part, element("span", "", part), this.numbers[i])));
    root.append(element("div", "pool-head", element("span", "", this.used, " in use"), this.total), this.bar, legend);
  }

  show(blocks) {
    const pool = parts(blocks);
    setText(this.used, share(pool.total ? pool.running / pool.total : 0));
    setText(this.total, `${count(pool.total)} blocks`);
    PARTS.forEach((part, i) => {
      this.segments[i].style.flexGrow = pool.total ? pool[part] / pool.total : 0;
      this.segments[i].hidden = pool[part] === 0;
      setText(this.numbers[i], count(pool[part]));
    });
    const told = PARTS.map((part) => `${pool[part]} ${part}`).join(", ");
    this.bar.setAttribute("aria-label", `Block pool of ${pool.total} blocks: ${told}`);
  }
}
