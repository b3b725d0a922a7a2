// The one dialog that full records open in.

import { element, fetchJson, setText } from "./format.js";

export class Dialog {
  constructor(root) {
    this.root = root;
    this.title = root.querySelector("h2");
    this.body = root.querySelector(".dialog-body");
    // A click beside it closes it, as people expect.
    root.addEventListener("click", (event) => event.target === root && root.close());
  }

  show(title, children, width = "") {
    this.root.className = width;
    setText(this.title, title);
    this.body.replaceChildren(...children);
    if (!this.root.open) this.root.showModal();
  }

  // Whether a person looks at `part`: an answer that comes after its dialog was closed opens and closes nothing.
  shows(part) {
    return this.root.open && this.body.contains(part);
  }

  // Fill it with `render(body)` of the JSON at `path`, or with what went wrong.
  async load(title, path, render) {
    const loading = element("p", "", "loading");
    this.show(title, [loading]);
    let children;
    try {
      children = render(await fetchJson(path));
    } catch (error) {
      children = [element("p", "problem", error.message)];
    }
    if (this.shows(loading)) this.show(title, children);
  }
}
