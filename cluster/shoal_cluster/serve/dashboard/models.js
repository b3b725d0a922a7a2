// What is asked for: the model and each of its adapters, a row each. Without adapters there is nothing to tell apart.

import { NONE, compact, count, element, setText, share } from "./format.js";

export class Models {
  constructor(section, table, left) {
    this.section = section;
    this.body = table.tBodies[0];
    this.left = left;
    this.rows = new Map();
  }

  show({ models, num_models_left_out, replicas, num_replicas_left_out }) {
    const known = count(replicas.length + num_replicas_left_out);
    this.section.hidden = models.length < 2;
    const names = new Set(models.map(([name]) => name));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.remove();
      this.rows.delete(name);
    }
    models.forEach(([name, num_replicas, requests, prompt, cached, output], place) => {
      let row = this.rows.get(name);
      if (!row) this.rows.set(name, (row = this.row(name)));
      if (this.body.rows[place] !== row) this.body.insertBefore(row, this.body.rows[place] ?? null);
      const hits = prompt ? share(cached / prompt) : NONE;
      const facts = [`${count(num_replicas)} of ${known}`, count(requests), compact(prompt), hits, compact(output)];
      facts.forEach((text, i) => setText(row.cells[i + 1], text));
      row.classList.toggle("absent", num_replicas === 0);
    });
    this.left.hidden = num_models_left_out === 0;
    setText(this.left, `and ${num_models_left_out} more: shoal status lists them all`);
  }

  row(name) {
    const head = element("th", "mono", name);
    head.scope = "row";
    head.title = name;
    return element("tr", "", head, ...Array.from({ length: 5 }, () => element("td", "number")));
  }
}
