// Timelines over one time axis, with one cursor. uPlot draws; arrow keys move the cursor too.

import { attained, colour, compact, count, duration, element, limit, rate, setText, share, timeOfDay } from "./format.js";

const GAP_S = 45; // more than two coarse samples apart: nobody looked in between
const AXIS_FONT = "11px system-ui, sans-serif";

const stacked = (...keys) => (sample) =>
  sample[keys[0]] == null ? null : keys.reduce((sum, key) => sum + (sample[key] ?? 0), 0);

// A series is drawn from a field or a function of the sample. `of` names a series in the reading.
const LOAD = {
  title: "Blocks in use and prompt tokens due",
  top: 1,
  axis: share,
  right: { axis: compact },
  series: [
    { of: "in use", key: "utilization", stroke: "--running", fill: true, format: share },
    { of: "due", key: "waiting_tokens", stroke: "--reserved", scale: "right", format: compact },
  ],
};
const REPLICAS = {
  title: "Replicas",
  axis: count,
  whole: true,
  // What lies between two stacked series has the upper one's colour.
  bands: [
    { series: [1, 2], fill: "--muted-wash" },
    { series: [2, 3], fill: "--reserved-wash" },
  ],
  series: [
    { of: "draining", key: "num_draining", value: stacked("num_ready", "num_starting", "num_draining"), stroke: "--muted", stepped: true, format: count, quiet: true },
    { of: "starting", key: "num_starting", value: stacked("num_ready", "num_starting"), stroke: "--reserved", stepped: true, format: count, quiet: true },
    { of: "ready", key: "num_ready", stroke: "--running", fill: true, stepped: true, format: count },
    { of: "wanted", key: "num_wanted", stroke: "--ink", dash: [4, 3], stepped: true, format: count },
  ],
};
const line = (of, key, format, stroke = "--running", fill = false) => ({ of, key, format, stroke, fill });
const SERVICE = [
  { title: "Tokens/s", axis: compact, series: [line("", "tokens_per_s", rate, "--running", true)] },
  { title: "Requests/s", axis: compact, series: [line("", "requests_per_s", rate, "--running", true)] },
  {
    title: "Time to first token",
    axis: limit,
    series: [line("p95", "ttft_p95_s", duration, "--reserved"), line("p50", "ttft_p50_s", duration, "--running", true)],
  },
  {
    title: "Between tokens",
    axis: limit,
    series: [line("p95", "inter_token_p95_s", duration, "--reserved"), line("p50", "inter_token_p50_s", duration, "--running", true)],
  },
  { title: "Hit rate", top: 1, axis: share, series: [line("", "hit_rate", share, "--running", true)] },
  { title: "Within objective", top: 1, axis: share, series: [line("", "attainment", attained, "--running", true)] },
];

export class Timelines {
  constructor(scalingRoot, serviceRoot, marks, onDraw) {
    this.samples = [];
    this.range = 600;
    this.marks = marks;
    this.onDraw = onDraw;
    this.charts = [
      new Chart(LOAD, scalingRoot, this, "tall"),
      new Chart(REPLICAS, scalingRoot, this, "tall"),
      ...SERVICE.map((spec) => new Chart(spec, serviceRoot, this, "")),
    ];
    marks.attach(this.charts[1].figure, this.charts[1].canvas, this);
    document.addEventListener("shoal-theme", () => this.charts.forEach((chart) => chart.rebuild()));
    document.addEventListener("visibilitychange", () => document.hidden || this.draw());
  }

  show(range) {
    this.range = range;
    this.draw();
  }

  // The past, as the gateway kept it. What came meanwhile is kept.
  load(columns) {
    const last = columns.time_s.at(-1) ?? 0;
    const newer = this.samples.filter((sample) => sample.time_s > last);
    const names = Object.keys(columns);
    this.samples = columns.time_s.map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
    this.samples.push(...newer);
    this.draw();
  }

  add(sample) {
    if (!sample || sample.time_s <= (this.samples.at(-1)?.time_s ?? 0)) return;
    this.samples.push(sample);
    this.draw();
  }

  draw() {
    if (document.hidden) return;
    const end = this.samples.at(-1)?.time_s ?? Date.now() / 1000;
    this.window = [end - this.range, end];
    const shown = this.samples.filter((sample) => sample.time_s >= this.window[0]);
    for (const chart of this.charts) chart.draw(shown);
    this.marks.place();
    this.onDraw(this.samples);
  }
}

class Chart {
  constructor(spec, root, timelines, kind) {
    this.spec = spec;
    this.timelines = timelines;
    this.values = spec.series.map((series) => {
      const key = element("i");
      key.style.setProperty("--key", `var(${series.stroke})`);
      if (series.dash) key.className = "dashed";
      const value = element("b");
      return { item: element("span", "", key, series.of ? `${series.of} ` : "", value), value };
    });
    this.when = element("time");
    this.output = element("output", "", ...[...this.values].reverse().map(({ item }) => item), this.when);
    this.output.setAttribute("aria-live", "off");
    this.canvas = element("div", "plot");
    const caption = element("figcaption", "", element("span", "title", spec.title), this.output);
    this.figure = element("figure", kind, caption, this.canvas);
    this.figure.tabIndex = 0;
    this.figure.setAttribute("role", "group");
    this.figure.setAttribute("aria-label", `${spec.title} over time. Left and right arrows, Home and End read single moments.`);
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
    this.figure.addEventListener("focus", () => this.output.setAttribute("aria-live", "polite"));
    this.figure.addEventListener("blur", () => this.point(null));
    root.append(this.figure);
    this.data = [[], ...spec.series.map(() => [])];
    this.rows = [];
    this.rebuild();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  rebuild() {
    this.plot?.destroy();
    const { spec } = this;
    const [muted, grid, mark] = ["--muted", "--line", "--mark"].map(colour);
    const axis = { stroke: muted, font: AXIS_FONT, ticks: { show: false } };
    const series = spec.series.map(({ stroke, fill, dash, stepped, scale }) => ({
      scale: scale ?? "y",
      stroke: colour(stroke),
      fill: fill ? colour(`${stroke}-wash`) : undefined,
      width: 1.5,
      dash,
      points: { show: false },
      paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    const y = { ...axis, size: 48, gap: 4, space: 28, incrs: spec.whole ? [1, 2, 5, 10, 20, 50, 100] : undefined };
    const axes = [
      { ...axis, grid: { show: false }, size: 20, space: 70, values: (_, at) => at.map((s) => timeOfDay(s).slice(0, 5)) },
      { ...y, grid: { stroke: grid, width: 1 }, values: (_, at) => at.map(spec.axis) },
    ];
    const scales = {
      x: { time: true, range: () => this.timelines.window ?? [0, 1] },
      y: { range: (_, __, max) => [0, spec.top ?? (spec.whole ? Math.max(2, (max ?? 0) + 1) : nice(max ?? 0))] },
    };
    if (spec.right) {
      axes.push({ ...y, side: 1, scale: "right", grid: { show: false }, values: (_, at) => at.map(spec.right.axis) });
      scales.right = { range: (_, __, max) => [0, Math.max(10, nice(max ?? 0))] };
    } else if (this.figure.classList.contains("tall")) {
      axes.push({ ...y, side: 1, scale: "y", grid: { show: false }, values: (_, at) => at.map(() => "") });
    }
    const hooks = { setCursor: [(plot) => this.read(plot.cursor.idx)] };
    if (this.figure.classList.contains("tall")) hooks.draw = [(plot) => this.drawMarks(plot, mark)];
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 6, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: "shoal" }, points: { size: 6 } },
        scales,
        axes,
        series: [{}, ...series],
        bands: spec.bands?.map((band) => ({ ...band, fill: colour(band.fill) })),
        hooks,
      },
      this.data,
      this.canvas,
    );
  }

  // As the style sheet says.
  size() {
    return { width: Math.max(this.canvas.clientWidth, 100), height: Math.max(this.canvas.clientHeight, 60) };
  }

  resize() {
    this.plot.setSize(this.size());
    this.timelines.marks.place();
  }

  // A hair line for each decision, through both charts.
  drawMarks(plot, stroke) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.setLineDash([2, 3]);
    for (const { time_s } of this.timelines.marks.within(this.timelines.window)) {
      const x = Math.round(plot.valToPos(time_s, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  draw(samples) {
    const times = [];
    const columns = this.spec.series.map(() => []);
    const rows = [];
    let last = null;
    for (const sample of samples) {
      if (last !== null && sample.time_s - last > GAP_S) {
        times.push(last + 1);
        rows.push(null);
        for (const column of columns) column.push(null);
      }
      last = sample.time_s;
      times.push(last);
      rows.push(sample);
      this.spec.series.forEach(({ key, value }, i) => columns[i].push(value ? value(sample) : sample[key]));
    }
    this.rows = rows;
    this.data = [times, ...columns];
    this.plot.setData(this.data);
    this.read(this.plot.cursor.left >= 0 ? this.plot.cursor.idx : null);
  }

  // The values at one moment, or the latest.
  read(index) {
    const row = this.rows[index ?? this.rows.length - 1];
    this.spec.series.forEach(({ key, format, quiet }, i) => {
      setText(this.values[i].value, format(row?.[key]));
      this.values[i].item.hidden = Boolean(quiet && !row?.[key]);
    });
    setText(this.when, index == null || !row ? "" : timeOfDay(row.time_s));
    this.when.dateTime = index == null || !row ? "" : new Date(row.time_s * 1000).toISOString();
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.target !== this.figure || !this.rows.length) return;
    if (event.key === "Escape") this.point(null);
    if (!step) return;
    event.preventDefault();
    this.output.setAttribute("aria-live", "polite");
    const from = this.plot.cursor.left >= 0 ? this.plot.cursor.idx : this.rows.length - (step < 0 ? 0 : 1);
    this.point(Math.max(0, Math.min(this.rows.length - 1, from + step)));
  }

  point(index) {
    const left = index == null ? -10 : this.plot.valToPos(this.data[0][index], "x");
    this.plot.setCursor({ left, top: index == null ? -10 : 1 });
    if (index == null) this.output.setAttribute("aria-live", "off");
  }
}

// The least of 1, 2, 5 times a power of ten that holds `max`, with some air.
function nice(max) {
  if (max <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(max * 1.05));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((times) => times * power >= max * 1.05);
}
