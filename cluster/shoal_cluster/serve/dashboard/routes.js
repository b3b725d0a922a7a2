// Where requests went: each replica's share, the last decisions, and the full record of one with all its terms.

import { count, decimal, element, setText, share, timeOfDay } from "./format.js";

const BARRIER = /_(blocks|slots)$/;

export class Routes {
  constructor({ table, none, shares, counted, form }, dialog) {
    this.body = table.tBodies[0];
    this.none = none;
    this.shares = new Shares(shares, counted);
    this.dialog = dialog;
    this.rows = new Map();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const id = form.querySelector("input").value.trim();
      if (id) this.explain(id);
    });
  }

  show(update, replicas) {
    this.shares.show(replicas, update.num_routed);
    const { routes } = update;
    this.none.hidden = routes.length > 0;
    this.body.parentElement.hidden = routes.length === 0;
    const keys = new Set(routes.map(key));
    for (const [known, row] of this.rows) {
      // A row that has the focus stays until the focus moves on.
      if (keys.has(known) || row.contains(document.activeElement)) continue;
      row.remove();
      this.rows.delete(known);
    }
    routes.forEach((route, place) => {
      let row = this.rows.get(key(route));
      if (!row) this.rows.set(key(route), (row = this.row(route)));
      if (this.body.rows[place] !== row && !row.contains(document.activeElement)) {
        this.body.insertBefore(row, this.body.rows[place] ?? null);
      }
    });
  }

  row(route) {
    const open = element("button", "link mono", route.request_id);
    open.type = "button";
    open.title = route.request_id;
    open.setAttribute("aria-haspopup", "dialog");
    const hits = element("meter");
    hits.max = Math.max(1, route.num_prompt_blocks);
    hits.value = route.num_cached_blocks;
    const cached = `${count(route.num_cached_blocks)} of ${count(route.num_prompt_blocks)}`;
    hits.setAttribute("aria-label", `${cached} prompt blocks cached`);
    const row = element(
      "tr",
      "",
      element("td", "when", timeOfDay(route.time_s)),
      element("td", "request", open),
      element("td", "mono chosen", route.replica_id || "nobody"),
      element("td", "number prompt", count(route.num_prompt_tokens)),
      element("td", "cached", element("div", "", hits, element("span", "", cached))),
      element("td", "why", why(route)),
    );
    row.addEventListener("click", () => this.explain(route.request_id));
    return row;
  }

  explain(id) {
    this.dialog.load(id, `routes/${encodeURIComponent(id)}`, (body) => body.flatMap(whole));
  }
}

// A bar per replica: its part of the last decisions, and how much of their prompts it had.
class Shares {
  constructor(root, counted) {
    this.root = root;
    this.counted = counted;
    this.rows = new Map();
  }

  show(replicas, num_routed) {
    setText(this.counted, num_routed ? `of the last ${count(num_routed)} decisions` : "");
    const shown = num_routed ? replicas.filter((replica) => replica.age_s != null) : [];
    const most = Math.max(...shown.map((replica) => replica.routed), 1e-9);
    const ids = new Set(shown.map((replica) => replica.replica_id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.root.remove();
      this.rows.delete(id);
    }
    const sorted = [...shown].sort((a, b) => (a.replica_id < b.replica_id ? -1 : 1));
    for (const replica of sorted) {
      let row = this.rows.get(replica.replica_id);
      if (!row) this.rows.set(replica.replica_id, (row = this.row(replica.replica_id)));
      row.bar.style.width = `${(100 * replica.routed) / most}%`;
      row.hit.style.width = `${100 * replica.route_hits}%`;
      setText(row.part, share(replica.routed));
      setText(row.hits, `${share(replica.route_hits)} hits`);
    }
  }

  row(id) {
    const [bar, hit] = [element("span", "part"), element("span", "hit")];
    bar.append(hit);
    const [part, hits] = [element("b"), element("span", "hits")];
    const root = element("li", "", element("span", "mono", id), element("span", "track", bar), part, hits);
    this.root.append(root);
    return { root, bar, hit, part, hits };
  }
}

// The reason without what the other columns say.
const why = (route) => route.reason.replace(`${route.replica_id}: `, "").replace(/; \d+ of \d+ prompt blocks cached/, "");
const key = (route) => `${route.request_id} ${route.time_s}`;

function whole(record) {
  if (record.text) return [element("p", "note", record.text)];
  const asked = [
    `${count(record.num_prompt_tokens)} prompt tokens`,
    `${count(record.num_prompt_blocks)} full blocks of ${record.block_size}`,
    `${count(record.num_blocks_needed)} blocks needed`,
  ];
  if (record.phase) asked.push(`placed for ${record.phase}`);
  if (record.excluded.length) asked.push(`not ${record.excluded.join(", ")}`);
  const names = [...new Set(record.candidates.flatMap((candidate) => Object.keys(candidate.terms)))];
  const table = element("table", "terms");
  const head = element("tr", "", heading("rank"), heading("replica", false), heading("score"));
  for (const name of names) head.append(heading(name.replaceAll("_", " "), true, BARRIER.test(name)));
  head.append(heading("age, ms", true, true));
  table.append(element("thead", "", head), element("tbody", "", ...record.candidates.map((c) => candidateRow(c, names))));
  return [
    element("p", "asked", element("b", "", `${timeOfDay(record.time_s)} `), `${record.request_id}: ${asked.join(", ")}.`),
    element("p", "reason", record.reason),
    element("div", "wide", table),
    element("p", "note", `By ${record.by}. A lower score is better. Blocks and slots are not added to it: without enough of them a replica ranks last. The age is that of what the replica had told.`),
  ];
}

function heading(text, number = true, barrier = false) {
  const cell = element("th", `${number ? "number" : ""}${barrier ? " barrier" : ""}`, text);
  cell.scope = "col";
  return cell;
}

function candidateRow(candidate, names) {
  const row = element(
    "tr",
    candidate.rank === 1 ? "best" : "",
    element("td", "number", candidate.rank == null ? "–" : String(candidate.rank)),
    element("td", "mono", candidate.replica_id),
  );
  if (candidate.rank == null) {
    const why = element("td", "rejected", candidate.rejected);
    why.colSpan = names.length + 2;
    row.append(why);
    return row;
  }
  row.append(element("td", "number score", decimal(candidate.score)));
  for (const name of names) {
    const value = candidate.terms[name];
    row.append(element("td", `number${BARRIER.test(name) ? " barrier" : ""}`, value == null ? "–" : decimal(value)));
  }
  row.append(element("td", "number barrier", candidate.age_s == null ? "–" : decimal(1000 * candidate.age_s)));
  return row;
}
