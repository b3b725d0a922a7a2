// Light, dark, or as the system says. Runs before the page is painted.
"use strict";
{
  const KEY = "shoal-theme";
  const THEMES = ["auto", "light", "dark"];
  const NAMES = { auto: "◐ auto", light: "○ light", dark: "● dark" };
  const root = document.documentElement;

  let theme = "auto";
  try {
    theme = localStorage.getItem(KEY) ?? "auto";
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }
  if (!THEMES.includes(theme)) theme = "auto";

  const apply = () => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = NAMES[theme];
      button.setAttribute("aria-label", `Theme: ${theme}`);
    }
    document.dispatchEvent(new Event("shoal-theme"));
  };

  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // As above.
      }
      apply();
    });
  });
}
