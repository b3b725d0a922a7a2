// Scaling decisions: a mark for each on the time axis, the newest as a list, and the full record of one.

import { button, count, decimal, element, setText, timeOfDay, words } from "./format.js";
import { Log } from "./log.js";

const NEAR_PX = 14;
const MAX_DECISIONS = 256;
const SHOWN = 5;

export class Marks {
  constructor(list, none, now, dialog) {
    this.list = list;
    this.none = none;
    this.now = now;
    this.dialog = dialog;
    this.log = new Log("decisions", MAX_DECISIONS, () => this.change());
    this.lane = element("div", "lane");
    this.lane.setAttribute("role", "toolbar");
    this.lane.setAttribute("aria-label", "Scaling decisions in this time range, oldest first");
    this.lane.addEventListener("keydown", (event) => this.onKey(event));
  }

  attach(figure, canvas, timelines) {
    this.timelines = timelines;
    this.canvas = canvas;
    figure.insertBefore(this.lane, canvas);
  }

  show(scaling, time_s) {
    this.log.merge(scaling.marks);
    const looked = scaling.looked_s == null ? "" : `looked ${Math.max(0, Math.round(time_s - scaling.looked_s))} s ago`;
    setText(this.now.count, scaling.num_wanted == null ? "–" : String(scaling.num_wanted));
    setText(this.now.reason, scaling.reason || "The autoscaler has not spoken yet.");
    setText(this.now.age, looked);
    const { min_replicas: low, max_replicas: high } = scaling.settings;
    setText(this.now.bounds, `of ${low} to ${high}${scaling.tuned.length ? " · tuned" : ""}`);
  }

  load() {
    return this.log.load();
  }

  within([from, until] = [0, 0]) {
    return this.log.lines.filter((mark) => mark.time_s >= from && mark.time_s <= until + 2);
  }

  change() {
    const newest = this.log.lines.slice(-SHOWN).reverse();
    this.none.hidden = newest.length > 0;
    this.list.replaceChildren(...newest.map((mark) => this.line(mark)));
    this.timelines.draw();
  }

  line(mark) {
    const open = button("", "link", () => this.open([mark]));
    open.append(element("span", `step ${direction(mark)}`, `${mark.num_before} → ${mark.num_after}`));
    open.append(element("span", "reason", mark.reason.replace(/^(up|down|hold): /, "")));
    open.setAttribute("aria-haspopup", "dialog");
    return element("li", "", element("time", "", timeOfDay(mark.time_s)), open);
  }

  // Marks that would cover each other become one.
  place() {
    const plot = this.timelines?.charts?.[1]?.plot;
    if (!plot || !this.timelines.window) return;
    const offset = plot.over.offsetLeft;
    const groups = [];
    for (const mark of this.within(this.timelines.window)) {
      const x = plot.valToPos(mark.time_s, "x");
      const last = groups.at(-1);
      if (last && x - last.x < NEAR_PX) last.marks.push(mark);
      else groups.push({ x, marks: [mark] });
    }
    const focused = this.lane.contains(document.activeElement) ? document.activeElement : null;
    const seq = focused?.marks.at(-1).seq;
    while (this.lane.children.length > groups.length) this.lane.lastChild.remove();
    while (this.lane.children.length < groups.length) {
      const made = button("", "mark", () => this.open(made.marks));
      made.setAttribute("aria-haspopup", "dialog");
      this.lane.append(made);
    }
    groups.forEach(({ x, marks }, i) => {
      const made = this.lane.children[i];
      const last = marks.at(-1);
      made.marks = marks;
      made.style.left = `${offset + x}px`;
      made.className = `mark ${marks.length > 1 ? "many" : direction(last)}`;
      setText(made, marks.length > 1 ? String(marks.length) : direction(last) === "up" ? "▲" : "▼");
      const told = `${last.num_before} to ${last.num_after} replicas at ${timeOfDay(last.time_s)}: ${last.reason}`;
      const name = marks.length > 1 ? `${marks.length} decisions, the last: ${told}` : told;
      made.setAttribute("aria-label", name);
      made.title = name;
      made.tabIndex = i === groups.length - 1 ? 0 : -1;
    });
    if (focused === null) return; // its place may be another decision's now
    const holder = [...this.lane.children].find((made) => made.marks.some((mark) => mark.seq === seq));
    if (holder !== document.activeElement) holder?.focus();
  }

  // One stop for the tab key; arrows go from mark to mark.
  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const all = [...this.lane.children];
    const at = all.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    event.stopPropagation();
    all[Math.max(0, Math.min(all.length - 1, at + step))].focus();
  }

  open(marks) {
    const [first, last] = [marks[0], marks.at(-1)];
    const title = marks.length === 1 ? `${first.num_before} → ${first.num_after} replicas` : `${marks.length} decisions`;
    if (marks.length > 1) {
      const lines = element("ol", "decisions", ...[...marks].reverse().map((mark) => this.line(mark)));
      this.dialog.show(title, [lines]);
      return;
    }
    this.dialog.load(title, `decisions/${last.seq}`, whole);
  }
}

const direction = (mark) => (mark.num_after > mark.num_before ? "up" : "down");

function whole(record) {
  const told = [
    `${count(record.num_running)} ran`,
    `${count(record.num_starting)} were starting`,
    `decision ${record.seq}`,
  ];
  const parts = [
    element("p", "asked", element("b", "", `${timeOfDay(record.time_s)} `), `${told.join(", ")}.`),
    element("p", "reason", record.reason),
    element("h3", "", "What it weighed"),
    pairs(record.terms),
    element("h3", "", "Settings then"),
    pairs(record.settings),
  ];
  if (record.replicas.length) parts.push(element("h3", "", "Replicas as it saw them"), element("div", "wide", replicas(record)));
  return parts;
}

function pairs(values) {
  const list = element("dl", "pairs");
  for (const [name, value] of Object.entries(values)) {
    list.append(element("div", "", element("dt", "", words(name)), element("dd", "", decimal(value))));
  }
  return list;
}

function replicas(record) {
  const table = element("table", "terms");
  const names = ["age_s", "num_allocated_blocks", "num_total_blocks", "num_running", "num_waiting_tokens"];
  const head = element("tr", "", ...["replica", ...names.map(words)].map((name, i) => cell("th", name, i > 0)));
  const rows = record.replicas.map((replica) =>
    element(
      "tr",
      "",
      element("td", "mono", replica.replica_id),
      ...names.map((name) => cell("td", replica[name] == null ? "–" : decimal(replica[name]), true)),
    ),
  );
  table.append(element("thead", "", head), element("tbody", "", ...rows));
  return table;
}

function cell(tag, text, number) {
  const made = element(tag, number ? "number" : "", text);
  if (tag === "th") made.scope = "col";
  return made;
}
