// A numbered log that grows at its end: the updates bring the newest lines, the rest is asked for when one is missing.

import { fetchJson } from "./format.js";

export class Log {
  constructor(path, maxLines, onChange) {
    this.path = path;
    this.maxLines = maxLines;
    this.onChange = onChange;
    this.lines = [];
    this.loading = false;
  }

  // The newest few, oldest first. Those that are known may have changed.
  merge(newest) {
    if (!newest.length) return;
    const lastSeq = this.lines.at(-1)?.seq ?? 0;
    if (newest[0].seq > lastSeq + 1 || newest.at(-1).seq < lastSeq) {
      this.load();
      return;
    }
    const before = JSON.stringify(this.lines.slice(-newest.length));
    this.lines = [...this.lines.filter((line) => line.seq < newest[0].seq), ...newest].slice(-this.maxLines);
    if (JSON.stringify(this.lines.slice(-newest.length)) !== before) this.onChange(this.lines);
  }

  // All that the gateway keeps. Afterwards numbers may begin anew: another gateway has taken over.
  async load() {
    if (this.loading) return;
    this.loading = true;
    try {
      this.lines = (await fetchJson(this.path)).slice(-this.maxLines);
      this.onChange(this.lines);
    } catch {
      // The next update asks again.
    } finally {
      this.loading = false;
    }
  }
}
