// The page: opens the stream and hands every update to the parts.

import { Timelines } from "./charts.js";
import { Controls } from "./controls.js";
import { Dialog } from "./dialog.js";
import { Events } from "./events.js";
import { fetchJson, setText } from "./format.js";
import { Marks } from "./marks.js";
import { Models } from "./models.js";
import { Pool } from "./pool.js";
import { Cards } from "./replicas.js";
import { Routes } from "./routes.js";
import { Stream } from "./stream.js";
import { Strip } from "./strip.js";

const RELOAD_MS = 600_000; // what has grown old is then thinned as the gateway keeps it
const $ = (id) => document.getElementById(id);

const dialog = new Dialog($("record"));
const controls = new Controls($("controls"), dialog);
const strip = new Strip($("strip"), $("totals"));
const pool = new Pool($("cluster-pool"));
const cards = new Cards($("cards"), $("left-out"), $("no-replicas"), controls);
const models = new Models($("models"), $("model-rows"), $("models-left-out"));
const now = { count: $("wanted"), reason: $("scaling-reason"), age: $("scaling-age"), bounds: $("bounds") };
const marks = new Marks($("decisions"), $("no-decisions"), now, dialog);
const timelines = new Timelines($("scaling-charts"), $("service-charts"), marks, (samples) => strip.draw(samples));
const routes = new Routes(
  { table: $("routes"), none: $("no-routes"), shares: $("shares"), counted: $("counted"), form: $("explain") },
  dialog,
);
const events = new Events($("event-list"), $("no-events"), $("event-groups"), (id) => routes.explain(id));

$("ranges").addEventListener("click", (event) => {
  const chosen = event.target.closest("button");
  if (!chosen) return;
  for (const other of $("ranges").children) other.setAttribute("aria-pressed", String(other === chosen));
  timelines.show(Number(chosen.dataset.seconds));
  loadHistory();
});

function show(update) {
  setText($("model"), [update.model, update.devices].filter(Boolean).join(" · "));
  document.title = `Shoal · ${update.model}`;
  const replicas = update.replicas.map((row) =>
    Object.fromEntries(update.replica_columns.map((name, i) => [name, row[i]])),
  );
  strip.show(update);
  const { allocated, cached, reserved, free, total } = update.blocks;
  pool.show([allocated, cached, reserved, free, total]);
  cards.show(update, replicas);
  models.show(update);
  const ready = replicas.filter((replica) => replica.state === "ready").length;
  const known = replicas.length + update.num_replicas_left_out;
  setText($("replica-count"), update.num_replicas_left_out ? `${known} known` : `${ready} of ${known} ready`);
  marks.show(update.scaling, update.time_s);
  controls.show(update.scaling);
  routes.show(update, replicas);
  events.show(update.events);
  timelines.add(update.sample);
}

let loads = 0;

async function loadHistory() {
  const number = ++loads;
  const charts = [$("scaling-charts"), $("service-charts")];
  for (const root of charts) root.setAttribute("aria-busy", "true");
  try {
    const columns = await fetchJson(`history?seconds=${timelines.range}`);
    if (number === loads) timelines.load(columns); // else of a range that was left meanwhile
  } catch {
    // The stream says that the gateway is away; when it is back, this is called again.
  } finally {
    if (number === loads) for (const root of charts) root.setAttribute("aria-busy", "false");
  }
}

function loadPast() {
  loadHistory();
  events.load();
  marks.load();
}

new Stream(show, loadPast);
setInterval(loadHistory, RELOAD_MS);
