// A card per replica, and the block pool as a filled bar. Cards are kept by id, so that nothing flickers.

import { compact, count, duration, element, rate, setText, share } from "./format.js";

const PARTS = ["allocated", "reserved", "cached", "empty"];
const STALE_S = 3;

// Total = allocated + free. Of the free ones some hold a prefix (cached) and some are promised (reserved); a promise
// takes empty blocks first. `empty` is what is left.
function parts([allocated, cached, reserved, free, total]) {
  const promised = Math.min(reserved, free);
  const empty = Math.max(0, free - cached - promised);
  const kept = Math.max(0, free - promised - empty);
  return { allocated, reserved: promised, cached: kept, empty, free, total };
}

export class Pool {
  constructor(root) {
    this.bar = element("div", "bar");
    this.bar.setAttribute("role", "img");
    this.segments = PARTS.map((part) => element("span", part));
    this.bar.append(...this.segments);
    this.used = element("strong");
    this.free = element("span", "free");
    this.numbers = PARTS.map(() => element("b"));
    const legend = element("ul", "legend");
    PARTS.forEach((part, i) => legend.append(element("li", part, element("span", "", part), this.numbers[i])));
    root.append(element("div", "pool-head", element("span", "", this.used, " of blocks in use"), this.free), this.bar, legend);
  }

  show(blocks) {
    const pool = parts(blocks);
    setText(this.used, share(pool.total ? pool.allocated / pool.total : 0));
    setText(this.free, `${count(pool.free)} of ${count(pool.total)} free`);
    PARTS.forEach((part, i) => {
      this.segments[i].style.flexGrow = pool.total ? pool[part] / pool.total : 0;
      this.segments[i].hidden = pool[part] === 0;
      setText(this.numbers[i], count(pool[part]));
    });
    const words = PARTS.map((part) => `${pool[part]} ${part}`).join(", ");
    this.bar.setAttribute("aria-label", `Block pool of ${pool.total}: ${words}`);
  }
}

const FACTS = {
  running: (r) => `${count(r.num_running)} of ${count(r.max_num_seqs)}`,
  waiting: (r) => count(r.num_waiting),
  "waiting tokens": (r) => compact(r.waiting_tokens),
  "tokens/s": (r) => rate(r.tokens_per_s),
  "last step": (r) => duration(r.step_ms / 1000),
  "hit rate": (r) => share(r.hit_rate),
};

class Card {
  constructor(id) {
    this.root = element("article", "card");
    this.root.setAttribute("role", "listitem");
    this.root.setAttribute("aria-label", `Replica ${id}`);
    this.state = element("span", "state");
    this.node = element("span", "node");
    this.age = element("span", "age");
    const pool = element("div", "pool");
    this.pool = new Pool(pool);
    const facts = element("dl", "facts");
    this.facts = Object.keys(FACTS).map((name) => {
      const value = element("dd");
      facts.append(element("div", "", element("dt", "", name), value));
      return value;
    });
    this.root.append(
      element("div", "card-head", element("h3", "mono", id), this.state),
      element("p", "origin", this.node, this.age),
      pool,
      facts,
    );
  }

  show(replica) {
    this.root.dataset.state = replica.state;
    setText(this.state, replica.state);
    setText(this.node, replica.node_id ? `node ${replica.node_id}` : "node unknown");
    const silent = replica.blocks[4] === 0;
    setText(this.age, silent ? "has said nothing yet" : `data ${duration(replica.age_s)} old`);
    this.age.classList.toggle("stale", !silent && replica.age_s > STALE_S);
    this.pool.show(replica.blocks);
    Object.values(FACTS).forEach((fact, i) => setText(this.facts[i], silent ? "–" : fact(replica)));
  }
}

export class Cards {
  constructor(root, left) {
    this.root = root;
    this.left = left;
    this.cards = new Map();
  }

  show(update) {
    const replicas = update.replicas.map((row) =>
      Object.fromEntries(update.replica_columns.map((name, i) => [name, row[i]])),
    );
    const ids = new Set(replicas.map((replica) => replica.replica_id));
    for (const [id, card] of this.cards) {
      if (ids.has(id)) continue;
      card.root.remove();
      this.cards.delete(id);
    }
    replicas.forEach((replica, place) => {
      let card = this.cards.get(replica.replica_id);
      if (!card) this.cards.set(replica.replica_id, (card = new Card(replica.replica_id)));
      if (this.root.children[place] !== card.root) this.root.insertBefore(card.root, this.root.children[place] ?? null);
      card.show(replica);
    });
    this.left.hidden = update.num_replicas_left_out === 0;
    setText(this.left, `and ${update.num_replicas_left_out} more: shoal status lists them all`);
    return replicas;
  }
}
