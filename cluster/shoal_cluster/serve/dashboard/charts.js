// Timelines: four small charts over one time axis, with one cursor. uPlot draws; arrow keys move the cursor too.

import { colour, compact, count, element, rate, setText, share, timeOfDay } from "./format.js";

const GAP_S = 45; // more than two coarse samples apart: nobody looked in between

const CHARTS = [
  { title: "Tokens per second", series: [{ key: "tokens_per_s", stroke: "--allocated" }], format: rate, axis: compact },
  { title: "Blocks in use", series: [{ key: "utilization", stroke: "--allocated" }], format: share, axis: share, max: 1 },
  { title: "Waiting tokens", series: [{ key: "waiting_tokens", stroke: "--reserved" }], format: compact, axis: compact },
  {
    title: "Replicas connected",
    series: [
      { key: "num_replicas", stroke: "--muted", dash: [4, 4], stepped: true, bare: true },
      { key: "num_connected", stroke: "--allocated", stepped: true },
    ],
    format: count,
    axis: count,
    whole: true,
    of: true,
  },
];

export class Timelines {
  constructor(root, ranges) {
    this.samples = [];
    this.range = 600;
    this.charts = CHARTS.map((spec) => new Chart(spec, root, this));
    ranges.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const other of ranges.children) other.setAttribute("aria-pressed", String(other === button));
      this.range = Number(button.dataset.seconds);
      this.draw();
    });
    document.addEventListener("shoal-theme", () => this.charts.forEach((chart) => chart.rebuild()));
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
    while (this.samples[0].time_s < sample.time_s - 6 * 3600) this.samples.shift();
    this.draw();
  }

  draw() {
    const end = this.samples.at(-1)?.time_s ?? Date.now() / 1000;
    this.window = [end - this.range, end];
    const shown = this.samples.filter((sample) => sample.time_s >= this.window[0]);
    for (const chart of this.charts) chart.draw(shown);
  }
}

class Chart {
  constructor(spec, root, timelines) {
    this.spec = spec;
    this.timelines = timelines;
    this.value = element("output");
    this.value.setAttribute("aria-live", "off");
    this.canvas = element("div", "plot");
    const caption = element("figcaption", "", element("span", "", spec.title), this.value);
    this.figure = element("figure", "", caption, this.canvas);
    this.figure.tabIndex = 0;
    this.figure.setAttribute("role", "group");
    this.figure.setAttribute("aria-label", `${spec.title} over time. Left and right arrows read single moments.`);
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
    this.figure.addEventListener("focus", () => this.value.setAttribute("aria-live", "polite"));
    this.figure.addEventListener("blur", () => this.point(null));
    root.append(this.figure);
    this.data = [[], ...spec.series.map(() => [])];
    this.rebuild();
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.canvas);
  }

  rebuild() {
    this.plot?.destroy();
    const { spec } = this;
    const [muted, line] = [colour("--muted"), colour("--line")];
    const axis = { stroke: muted, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const series = spec.series.map(({ stroke, dash, stepped, bare }) => ({
      stroke: colour(stroke),
      fill: bare ? undefined : colour(`${stroke}-wash`),
      width: 1.5,
      dash,
      points: { show: false },
      paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 4, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: "shoal" }, points: { size: 6 } },
        scales: {
          x: { time: true, range: () => this.timelines.window ?? [0, 1] },
          y: { range: (_, __, max) => [0, spec.max ?? nice(max ?? 0)] },
        },
        axes: [
          { ...axis, grid: { show: false }, size: 22, space: 70, values: (_, at) => at.map((s) => timeOfDay(s).slice(0, 5)) },
          {
            ...axis,
            grid: { stroke: line, width: 1 },
            size: 42,
            gap: 4,
            space: 30,
            incrs: spec.whole ? [1, 2, 5, 10, 20, 50, 100] : undefined,
            values: (_, at) => at.map(spec.axis),
          },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)] },
      },
      this.data,
      this.canvas,
    );
  }

  // As the style sheet says.
  size() {
    return { width: Math.max(this.canvas.clientWidth, 100), height: Math.max(this.canvas.clientHeight, 100) };
  }

  draw(samples) {
    const times = [];
    const columns = this.spec.series.map(() => []);
    let last = null;
    for (const sample of samples) {
      if (last !== null && sample.time_s - last > GAP_S) {
        times.push(last + 1);
        for (const column of columns) column.push(null);
      }
      last = sample.time_s;
      times.push(last);
      this.spec.series.forEach(({ key }, i) => columns[i].push(sample[key]));
    }
    this.data = [times, ...columns];
    this.plot.setData(this.data);
    this.read(this.plot.cursor.left >= 0 ? this.plot.cursor.idx : null);
  }

  // The values at one moment, or the latest.
  read(index) {
    const at = index ?? this.data[0].length - 1;
    const [main, other] = [this.data.at(-1)[at], this.spec.of ? this.data[1][at] : null];
    const value = main == null ? "–" : this.spec.format(main) + (other == null ? "" : ` of ${this.spec.format(other)}`);
    setText(this.value, index == null || main == null ? value : `${timeOfDay(this.data[0][at])}   ${value}`);
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.point(null);
    if (step === undefined || !this.data[0].length) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    const from = this.plot.cursor.left >= 0 ? (this.plot.cursor.idx ?? last) : last;
    this.point(Math.min(last, Math.max(0, from + step)));
  }

  point(index) {
    const left = index == null ? -10 : this.plot.valToPos(this.data[0][index], "x");
    this.plot.setCursor({ left, top: index == null ? -10 : 1 });
    if (index == null) this.value.setAttribute("aria-live", "off");
  }
}

// The least of 1, 2, 5 times a power of ten that holds `max`, with some air.
function nice(max) {
  if (max <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(max * 1.05));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((times) => times * power >= max * 1.05);
}
