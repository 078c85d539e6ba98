// Functions of panel.js that need no page: text, numbers, keys, and the connection to the kernel.
import assert from "node:assert/strict";
import { test } from "node:test";
import { clamp, initialize, keyName, link, num, plural, saveStaticHtml, visible } from "../panel.js";

/** A stand-in for the model of anywidget. */
function createModel(state = {}) {
  const listeners = new Map();
  return {
    state,
    sent: [],
    get: (name) => state[name],
    send(message) {
      this.sent.push(message);
    },
    on: (name, fn) => listeners.set(name, [...(listeners.get(name) ?? []), fn]),
    off(name, fn) {
      listeners.set(
        name,
        (listeners.get(name) ?? []).filter((listener) => listener !== fn),
      );
    },
    fire: (name, ...args) => (listeners.get(name) ?? []).forEach((fn) => fn(...args)),
    listenerCount: () => [...listeners.values()].flat().length,
  };
}

test("invisible characters become escapes", () => {
  const cases = [
    ["tab\tand\nline", "tab\tand\nline"],
    ["\x1b[31mred", "\\x1b[31mred"],
    ["\u202etxt.exe", "\\u202etxt.exe"],
    ["a\u200bb\ufeff", "a\\u200bb\\ufeff"],
    ["nul\x00", "nul\\x00"],
    ["\x85\r", "\\x85\\x0d"],
    ["\u{e0041}", "\\U000e0041"],
    ["👩\u200d💻", "👩\u200d💻"],
    ["a\u200db", "a\\u200db"],
    ["soft\u00adhyphen", "soft\\xadhyphen"],
    ["e\u0301 ü 漢 🎉", "e\u0301 ü 漢 🎉"],
    ["\u2028", "\\u2028"],
    ["a\ud800b", "a\\ud800b"],
    [null, ""],
    [7, "7"],
  ];
  for (const [text, expected] of cases) assert.equal(visible(text), expected);
});

test("numbers have few digits and a typographic minus", () => {
  const cases = [
    [null, "–"],
    [NaN, "–"],
    [Infinity, "∞"],
    [-Infinity, "−∞"],
    [0, "0"],
    [0.5, "0.5"],
    [-1.23456, "−1.23"],
    [12345, "12300"],
    [0.00012345, "1.23e−4"],
    [1234567, "1.23e+6"],
  ];
  for (const [value, expected] of cases) assert.equal(num(value), expected);
  assert.equal(num(2 / 3, 2), "0.67");
});

test("a noun follows its number", () => {
  assert.deepEqual(
    [0, 1, 2].map((n) => plural(n, "rollout")),
    ["0 rollouts", "1 rollout", "2 rollouts"],
  );
});

test("an index is limited to the list", () => {
  assert.deepEqual(
    [-3, 0, 2, 9].map((i) => clamp(i, 3)),
    [0, 0, 2, 2],
  );
});

test("a key has a name with its modifiers", () => {
  const name = (key, modifiers = {}) => keyName({ key, ...modifiers });
  assert.equal(name("j"), "j");
  assert.equal(name("J", { shiftKey: true }), "J");
  assert.equal(name("Tab", { shiftKey: true }), "Shift+Tab");
  assert.equal(name("ArrowUp", { altKey: true }), "Alt+ArrowUp");
  assert.equal(name("Enter", { ctrlKey: true }), "Ctrl+Enter");
  assert.equal(name("k", { metaKey: true }), "Meta+k");
});

test("a reply settles the request with its ID", async () => {
  const model = createModel();
  const wire = link(model);
  const first = wire.request("add", { a: 1, b: 2 });
  const second = wire.request("refuse");
  const [{ id, client, command, args }, refused] = model.sent;
  assert.deepEqual([command, args], ["add", { a: 1, b: 2 }]);
  model.fire("msg:custom", { id: refused.id, client, ok: false, error: "no" });
  model.fire("msg:custom", { id, client: "another view", ok: true, reply: { sum: 0 } });
  model.fire("msg:custom", { id, client, ok: true, reply: { sum: 3 } });
  assert.deepEqual(await first, { reply: { sum: 3 }, buffers: [] });
  await assert.rejects(second, { message: "no" });
});

test("a request can be aborted, and closing the panel aborts the others", async () => {
  const model = createModel();
  const wire = link(model);
  const controller = new AbortController();
  const aborted = wire.request("wait", {}, { signal: controller.signal });
  const open = wire.request("wait");
  controller.abort();
  await assert.rejects(aborted, { name: "AbortError" });
  await assert.rejects(wire.request("wait", {}, { signal: controller.signal }), { name: "AbortError" });
  assert.equal(model.sent.length, 2);
  wire.close();
  await assert.rejects(open, { name: "AbortError" });
  assert.equal(model.listenerCount(), 0);
});

test("a gap in the sequence of ticks is reported", () => {
  const model = createModel({ tick: { seq: 4 } });
  const wire = link(model);
  const ticks = [],
    gaps = [];
  const unsubscribe = wire.onTick((tick) => ticks.push(tick.seq));
  wire.onGap((tick) => gaps.push(tick.seq));
  for (const seq of [5, 6, 9]) {
    model.state.tick = { seq };
    model.fire("change:tick");
  }
  assert.deepEqual([ticks, gaps], [[5, 6, 9], [9]]);
  unsubscribe();
  model.fire("change:tick");
  assert.deepEqual(ticks, [5, 6, 9]);
});

test("a saved notebook contains the static HTML and the ID of the panel", () => {
  const view = "application/vnd.jupyter.widget-view+json";
  const output = { data: { "text/html": "old", [view]: { model_id: "panel-1" } }, metadata: {} };
  const other = { data: { "text/html": "other", [view]: { model_id: "panel-2" } }, metadata: {} };
  const doc = { cells: [], toJSON: () => ({ cells: [{ source: "text" }, { outputs: [output, other] }] }) };
  const model = Object.assign(createModel({ comm_id: "panel-1" }), { widget_manager: { context: { model: doc } } });
  const stop = initialize({ model });
  saveStaticHtml(model, "new");
  const [text, code] = doc.toJSON().cells;
  assert.deepEqual(text, { source: "text" });
  assert.deepEqual(code.outputs, [{ data: { "text/html": "new" }, metadata: { art_nb: "panel-1" } }, other]);
  stop();
  assert.deepEqual(doc.toJSON().cells[1].outputs, [output, other]);
});
