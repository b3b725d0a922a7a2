// Numbers as people read them, and small tools for elements.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const count = (value) => (value == null ? NONE : whole.format(value));
export const compact = (value) => (value == null ? NONE : value < 10000 ? whole.format(value) : short.format(value));
export const share = (value) => (value == null ? NONE : `${whole.format(value * 100)}%`);
export const rate = (value) => (value == null ? NONE : value < 10 ? value.toFixed(1) : compact(value));
export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// An element with a class and children; children are nodes or text.
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
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
