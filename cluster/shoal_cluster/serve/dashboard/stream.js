// The stream of updates: opened, watched, and opened again whenever it breaks or falls silent.

import { setText, timeOfDay } from "./format.js";

const SILENCE_MS = 4000;
const REDIAL_MS = 1500;
const $ = (id) => document.getElementById(id);

export class Stream {
  constructor(onUpdate, onOpen) {
    this.onUpdate = onUpdate;
    this.onOpen = onOpen;
    this.heardAt = performance.now();
    this.shownTime = null;
    this.live = false;
    this.open();
    setInterval(() => this.watch(), 500);
  }

  open() {
    this.source?.close();
    this.triedAt = performance.now();
    this.source = new EventSource("dashboard/stream");
    this.source.addEventListener("update", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("error", () => this.lost());
  }

  take(update) {
    this.heardAt = performance.now();
    this.shownTime = update.time_s;
    if (!this.live) {
      this.live = true;
      this.say("live");
      this.onOpen();
    }
    this.onUpdate(update);
  }

  lost() {
    this.live = false;
    this.say("broken");
  }

  // A stream may break without a word, and a browser gives up after an HTTP error.
  watch() {
    const now = performance.now();
    if (this.live && now - this.heardAt > SILENCE_MS) this.lost();
    if (this.live) return;
    this.say("broken");
    const stuck = now - this.triedAt > SILENCE_MS;
    const closed = this.source.readyState === EventSource.CLOSED && now - this.triedAt > REDIAL_MS;
    if (stuck || closed) this.open();
  }

  say(state) {
    const connection = $("connection");
    const waiting = state === "broken" && this.shownTime === null && performance.now() < SILENCE_MS;
    connection.dataset.state = waiting ? "waiting" : state;
    setText(connection, waiting ? "connecting" : state === "live" ? "live" : "reconnecting");
    const banner = $("banner");
    banner.hidden = state === "live" || waiting;
    document.body.classList.toggle("broken", !banner.hidden);
    const since = this.shownTime === null ? "Nothing has come yet." : `What you see is from ${timeOfDay(this.shownTime)}.`;
    setText(banner, banner.hidden ? "" : `The stream from the gateway is broken; reconnecting. ${since}`);
  }
}
