// What happened: starts, deaths, drains, resumes, refusals, deployments; the newest first.

import { button, element, timeOfDay } from "./format.js";
import { Log } from "./log.js";

const MAX_EVENTS = 500;
const SHOWN = 40;
const GROUPS = {
  all: () => true,
  replicas: (event) => ["starting", "ready", "lost", "died", "draining", "stopped"].includes(event.kind),
  requests: (event) => ["resumed", "refused", "failed"].includes(event.kind),
  changes: (event) => ["deployed", "changed"].includes(event.kind),
};

export class Events {
  constructor(list, none, filters, onRequest) {
    this.list = list;
    this.none = none;
    this.onRequest = onRequest;
    this.group = "all";
    this.log = new Log("events", MAX_EVENTS, () => this.draw());
    for (const name of Object.keys(GROUPS)) {
      const choose = button(name, "", () => {
        this.group = name;
        for (const other of filters.children) other.setAttribute("aria-pressed", String(other === choose));
        this.draw();
      });
      choose.setAttribute("aria-pressed", String(name === "all"));
      filters.append(choose);
    }
  }

  show(newest) {
    this.log.merge(newest);
  }

  load() {
    return this.log.load();
  }

  draw() {
    if (this.list.contains(document.activeElement)) return; // a line that has the focus stays
    const shown = this.log.lines.filter(GROUPS[this.group]).slice(-SHOWN).reverse();
    this.none.hidden = shown.length > 0;
    this.list.replaceChildren(...shown.map((event) => this.line(event)));
  }

  line(event) {
    const kind = element("span", "kind", event.count > 1 ? `${event.kind} × ${event.count}` : event.kind);
    const text = element("span", "text");
    if (event.replica_id) text.append(element("span", "mono", event.replica_id), " ");
    if (event.request_id) {
      const open = button(event.request_id, "link mono", () => this.onRequest(event.request_id));
      open.setAttribute("aria-haspopup", "dialog");
      text.append(open, " ");
    }
    text.append(event.text);
    const line = element("li", "", element("time", "", timeOfDay(event.time_s)), kind, text);
    line.dataset.kind = event.kind;
    return line;
  }
}
