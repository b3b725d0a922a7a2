// Numbers as people read them, and small tools for elements.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const count = (value) => (value == null ? NONE : whole.format(value));
export const compact = (value) => (value == null ? NONE : value < 10000 ? whole.format(value) : short.format(value));
export const share = (value) => (value == null ? NONE : `${whole.format(value * 100)}%`);
export const rate = (value) => (value == null ? NONE : value < 100 ? value.toFixed(1) : compact(value));
export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));
export const decimal = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(Math.abs(value) < 1 ? 3 : 1));

// Two digits near a hundred percent, where they matter.
export const attained = (value) => (value == null ? NONE : value === 1 ? "100%" : `${(Math.floor(value * 1000) / 10).toFixed(1)}%`);

// Three digits, so that a value that moves does not change its width.
export function duration(seconds) {
  if (seconds == null) return NONE;
  const ms = seconds * 1000;
  if (ms < 999.5) return `${ms.toFixed(ms < 9.995 ? 2 : ms < 99.95 ? 1 : 0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return lasting(seconds);
}

// The same for a round number: no more digits than it has.
export const limit = (seconds) => (seconds ? duration(seconds).replace(/\.(\d*?)0+ /, (_, kept) => (kept ? `.${kept} ` : " ")) : "0");

// How long something has gone on, coarsely.
export function lasting(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

// A field's name as words.
export const words = (name) =>
  name.replace(/^num_/, "").replace(/_s$/, " (s)").replace(/\bttft|ttft\b|_ttft/, (m) => m.toUpperCase()).replaceAll("_", " ");

// An element with a class and children; children are nodes or text.
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(text, className, onClick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// Text is only written when it differs, so that selections and screen readers are left alone.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A CSS custom property as a plain colour, for canvases: light-dark() must be resolved by the browser.
export function colour(name) {
  const probe = element("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

// The body of a JSON answer. Throws what went wrong, in words.
export async function fetchJson(path, options) {
  let answer;
  try {
    answer = await fetch(`dashboard/${path}`, options);
  } catch (error) {
    throw new Error(`no answer from the gateway: ${error.message}`);
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(body?.error?.message ?? `HTTP ${answer.status}`);
  return body;
}
