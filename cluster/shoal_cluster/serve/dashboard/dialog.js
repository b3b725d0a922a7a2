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

  // Fill it with `render(body)` of the JSON at `path`, or with what went wrong.
  async load(title, path, render) {
    this.show(title, [element("p", "", "loading")]);
    try {
      this.show(title, render(await fetchJson(path)));
    } catch (error) {
      this.show(title, [element("p", "problem", error.message)]);
    }
  }
}
