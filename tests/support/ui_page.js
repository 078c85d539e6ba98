// A page with one panel: anywidget's front-end model over HTTP, as small as it can be.
const here = location.pathname.replace(/\/$/, "");

/** Bytes from base64. */
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);

class Model {
  constructor(state) {
    this.state = state;
    this.listeners = new Map();
    this.changed = {};
    window.sent = [];
    window.unanswered = new Set();
  }
  get(name) {
    return this.state[name];
  }
  set(name, value) {
    this.state[name] = value;
    this.changed[name] = value;
    this.fire(`change:${name}`);
  }
  save_changes() {
    post({ method: "update", state: this.changed });
    this.changed = {};
  }
  send(content) {
    window.sent.push(content);
    if (content.command) window.unanswered.add(`${content.client}/${content.id}`);
    post({ method: "custom", content });
  }
  on(name, fn) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), fn]);
  }
  off(name, fn) {
    this.listeners.set(
      name,
      (this.listeners.get(name) ?? []).filter((one) => one !== fn),
    );
  }
  fire(name, ...args) {
    for (const fn of this.listeners.get(name) ?? []) fn(...args);
  }
}

let posted = Promise.resolve(); // one after the other, as over a socket
const post = (data) => {
  posted = posted.catch(() => {}).then(() => fetch(`${here}/send`, { method: "POST", body: JSON.stringify(data) }));
};

const state = await (await fetch(`${here}/state`)).json();
const model = (window.model = new Model(state));
const events = new EventSource(`${here}/events`);
events.onmessage = ({ data }) => {
  const { type, message, buffers } = JSON.parse(data);
  if (type === "comm_close") return window.close_panel?.();
  if (message.method === "custom") {
    window.unanswered.delete(`${message.content.client}/${message.content.id}`);
    model.fire("msg:custom", message.content, buffers.map(bytes));
  }
  if (message.method === "update") {
    Object.assign(model.state, message.state);
    for (const name of Object.keys(message.state)) model.fire(`change:${name}`);
  }
};
const style = document.createElement("style");
style.textContent = state._css;
document.head.append(style);
const url = URL.createObjectURL(new Blob([state._esm], { type: "text/javascript" }));
const { default: panel } = await import(url);
await new Promise((resolve) => (events.readyState === 1 ? resolve() : (events.onopen = resolve)));
const el = document.getElementById("panel");
const start = performance.now();
const clean = await panel.render({ model, el });
window.rendered = { start, done: performance.now() };
window.close_panel = () => {
  clean?.();
  el.replaceChildren();
  events.close();
};
