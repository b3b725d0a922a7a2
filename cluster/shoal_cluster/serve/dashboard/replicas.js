// A card per replica. Cards are kept by id, so that nothing flickers.

import { button, compact, count, duration, element, lasting, rate, setText, share } from "./format.js";
import { Heat } from "./heat.js";
import { Pool } from "./pool.js";

const STALE_S = 2;

const FACTS = {
  running: (r) => `${count(r.num_running)} of ${count(r.max_num_seqs)}`,
  waiting: (r) => count(r.num_waiting),
  "tokens due": (r) => compact(r.waiting_tokens),
  "tokens/s": (r) => rate(r.tokens_per_s),
  "last step": (r) => duration(r.step_ms / 1000),
  "hit rate": (r) => share(r.hit_rate),
};

const SILENT = {
  starting: "It loads the model.",
  draining: "It takes nothing new and finishes its streams.",
};

class Card {
  constructor(id, controls) {
    this.id = id;
    this.root = element("article", "card");
    this.root.setAttribute("aria-labelledby", `replica-${id}`);
    this.state = element("span", "state");
    this.node = element("span", "node");
    this.age = element("span", "age");
    this.poolRoot = element("div", "pool");
    this.pool = new Pool(this.poolRoot);
    this.factsRoot = element("dl", "facts");
    this.facts = Object.keys(FACTS).map((name) => {
      const value = element("dd");
      this.factsRoot.append(element("div", "", element("dt", "", name), value));
      return value;
    });
    this.none = element("p", "none");
    this.heat = null;
    this.toggle = button("Block map", "quiet", () => this.toggleHeat());
    this.toggle.setAttribute("aria-expanded", "false");
    this.drain = button("Drain", "quiet admin", () => controls.drain(id));
    this.foot = element("div", "card-foot", this.toggle, this.drain);
    const name = element("h3", "mono", id);
    name.id = `replica-${id}`;
    this.root.append(
      element("div", "card-head", name, this.state),
      element("p", "origin", this.node, this.age),
      this.poolRoot,
      this.factsRoot,
      this.none,
      this.foot,
    );
  }

  toggleHeat() {
    const open = this.heat === null;
    this.toggle.setAttribute("aria-expanded", String(open));
    if (open) {
      this.heat = new Heat(this.id);
      this.foot.before(this.heat.root);
      this.heat.start();
    } else {
      this.close();
    }
  }

  close() {
    this.heat?.stop();
    this.heat?.root.remove();
    this.heat = null;
  }

  show(replica, time_s, devices) {
    const silent = replica.age_s == null;
    this.root.dataset.state = replica.state;
    setText(this.state, replica.role ? `${replica.state} · ${replica.role}` : replica.state);
    setText(this.node, [replica.node_id ? `node ${replica.node_id}` : "", silent ? "" : devices].filter(Boolean).join(" · "));
    const up = replica.started_s == null ? "" : `${silent ? "for" : "up"} ${lasting(time_s - replica.started_s)}`;
    const stale = !silent && replica.age_s > STALE_S;
    const age = silent ? "" : `data ${replica.age_s < 60 ? `${replica.age_s.toFixed(1)} s` : lasting(replica.age_s)} old`;
    setText(this.age, stale ? age : [up, age].filter(Boolean).join(" · "));
    this.age.classList.toggle("stale", stale);
    for (const part of [this.poolRoot, this.factsRoot, this.foot]) part.hidden = silent;
    this.none.hidden = !silent;
    if (silent) {
      setText(this.none, SILENT[replica.state] ?? "It has said nothing yet.");
      return;
    }
    this.pool.show(replica.blocks);
    Object.values(FACTS).forEach((fact, i) => setText(this.facts[i], fact(replica)));
  }
}

export class Cards {
  constructor(root, left, none, controls) {
    this.root = root;
    this.left = left;
    this.none = none;
    this.controls = controls;
    this.cards = new Map();
  }

  show(update, replicas) {
    const ids = new Set(replicas.map((replica) => replica.replica_id));
    for (const [id, card] of this.cards) {
      if (ids.has(id)) continue;
      card.close();
      card.root.remove();
      this.cards.delete(id);
    }
    replicas.forEach((replica, place) => {
      let card = this.cards.get(replica.replica_id);
      if (!card) this.cards.set(replica.replica_id, (card = new Card(replica.replica_id, this.controls)));
      const there = this.root.children[place];
      if (there !== card.root && !card.root.contains(document.activeElement)) this.root.insertBefore(card.root, there ?? null);
      card.show(replica, update.time_s, update.devices);
    });
    this.none.hidden = replicas.length > 0;
    this.left.hidden = update.num_replicas_left_out === 0;
    setText(this.left, `and ${update.num_replicas_left_out} more: shoal status lists them all`);
  }
}
