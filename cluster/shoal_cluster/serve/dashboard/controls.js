// What an administrator may do here. The key is kept by this page alone, until it is closed or locked.

import { button, element, fetchJson, setText, words } from "./format.js";

export class Controls {
  constructor(opener, dialog) {
    this.opener = opener;
    this.dialog = dialog;
    this.key = null;
    this.limits = {};
    this.settings = {};
    this.tuned = [];
    opener.addEventListener("click", () => this.open());
  }

  // The settings in force, as each update brings them.
  show({ settings, tuned }) {
    this.settings = settings;
    this.tuned = tuned;
  }

  open() {
    if (this.key === null) this.dialog.show("Controls", [this.keyForm()], "narrow");
    else this.dialog.show("Controls", [this.settingsForm(), this.lockLine()], "narrow");
  }

  keyForm() {
    const input = element("input");
    input.type = "password";
    input.required = true;
    input.autocomplete = "off";
    input.id = "admin-key";
    const label = element("label", "", "Admin key");
    label.htmlFor = input.id;
    const problem = status();
    const form = element("form", "key", label, input, submit("Unlock"), problem);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        this.limits = (await fetchJson("controls", { headers: bearer(input.value) })).limits;
        this.key = input.value;
        document.body.classList.add("unlocked");
        this.opener.removeAttribute("aria-label");
        if (this.dialog.shows(this.dialog.body.querySelector("form.key"))) this.open();
      } catch (error) {
        setText(problem, error.message);
        input.select();
      }
    });
    return form;
  }

  settingsForm() {
    const problem = status();
    const form = element("form", "settings");
    const shown = this.settings; // what it changes it changes from there: somebody else may have set the rest meanwhile
    for (const [name, [low, high]] of Object.entries(this.limits)) {
      const input = element("input");
      input.type = "number";
      input.id = `setting-${name}`;
      input.name = name;
      input.min = low;
      input.max = high;
      input.step = name.startsWith("m") ? 1 : "any";
      input.value = shown[name];
      input.required = true;
      const label = element("label", "", words(name), this.tuned.includes(name) ? element("small", "", " tuned") : "");
      label.htmlFor = input.id;
      form.append(label, input, element("span", "limits", `${low} to ${high}`));
    }
    const reset = button("Back to the deployment's", "quiet", () => this.tune({}, true, problem));
    form.append(element("div", "buttons", submit("Apply"), reset), problem);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, Number(value)]));
      const changes = Object.fromEntries(Object.entries(given).filter(([name, value]) => value !== shown[name]));
      this.tune(changes, false, problem);
    });
    return form;
  }

  async tune(changes, reset, problem) {
    if (!reset && !Object.keys(changes).length) {
      setText(problem, "Nothing has been changed.");
      return;
    }
    try {
      this.show(await this.post("controls/tune", { changes, reset }));
      if (!this.dialog.shows(problem)) return;
      this.open();
      setText(this.dialog.body.querySelector(".problem"), "In force.");
    } catch (error) {
      setText(problem, error.message);
    }
  }

  lockLine() {
    const lock = button("Lock", "quiet", () => {
      this.key = null;
      document.body.classList.remove("unlocked");
      this.opener.setAttribute("aria-label", "Controls, locked");
      this.dialog.root.close();
    });
    return element("div", "buttons lock", element("span", "note", "Each replica's card has a button to drain it."), lock);
  }

  drain(replica_id) {
    const problem = status();
    const yes = button("Drain it", "danger", async () => {
      yes.disabled = true;
      try {
        await this.post(`controls/drain/${encodeURIComponent(replica_id)}`);
        if (this.dialog.shows(problem)) this.dialog.root.close();
      } catch (error) {
        setText(problem, error.message);
        yes.disabled = false;
      }
    });
    const told = "It takes nothing new, its streams finish or go on elsewhere, and another replica takes its place.";
    this.dialog.show(`Drain ${replica_id}?`, [element("p", "", told), element("div", "buttons", yes), problem], "narrow");
  }

  post(path, body) {
    const headers = { ...bearer(this.key), "content-type": "application/json" };
    return fetchJson(path, { method: "POST", headers, body: JSON.stringify(body ?? {}) });
  }
}

const bearer = (key) => ({ authorization: `Bearer ${key}` });

function submit(text) {
  const made = element("button", "primary", text);
  made.type = "submit";
  return made;
}

function status() {
  const made = element("p", "problem");
  made.setAttribute("role", "status");
  return made;
}
