// A numbered log that grows at its end: the updates bring the newest lines, the rest is asked for when one is missing.

import { fetchJson } from "./format.js";

const RETRY_MS = 30_000; // where another gateway answers than the one whose updates come

export class Log {
  constructor(path, maxLines, onChange) {
    this.path = path;
    this.maxLines = maxLines;
    this.onChange = onChange;
    this.lines = [];
    this.loading = false;
    this.isPartial = false; // all but the newest lines are those of another gateway, and left out
    this.retryAt = 0;
  }

  // The newest few, oldest first. Those that are known may have changed.
  merge(newest) {
    if (!newest.length) return;
    const lastSeq = this.lines.at(-1)?.seq ?? 0;
    const same = this.lines.find((line) => line.seq === newest[0].seq);
    const isOther = same !== undefined && same.time_s !== newest[0].time_s;
    const retries = this.isPartial && Date.now() >= this.retryAt;
    const misses = retries || isOther || newest[0].seq > lastSeq + 1 || newest.at(-1).seq < lastSeq;
    if (misses && Date.now() >= this.retryAt) {
      this.load(newest);
      return;
    }
    const before = JSON.stringify(this.lines.slice(-newest.length));
    const known = misses ? [] : this.lines.filter((line) => line.seq < newest[0].seq);
    this.lines = [...known, ...newest].slice(-this.maxLines);
    if (JSON.stringify(this.lines.slice(-newest.length)) !== before) this.onChange(this.lines);
  }

  // All that the gateway keeps. Afterwards numbers may begin anew: another gateway has taken over. If another one has
  // answered than the one that sent the newest lines, as several share an address, there are only these for a while.
  async load(newest = []) {
    if (this.loading) return;
    this.loading = true;
    try {
      const told = (await fetchJson(this.path)).slice(-this.maxLines);
      const last = newest.at(-1);
      const isSame = !last || told.some((line) => line.seq === last.seq && line.time_s === last.time_s);
      this.isPartial = !isSame;
      if (!isSame) this.retryAt = Date.now() + RETRY_MS;
      this.lines = isSame ? told : newest;
      this.onChange(this.lines);
    } catch {
      // The next update asks again.
    } finally {
      this.loading = false;
    }
  }
}
