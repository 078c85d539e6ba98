// Two or more runs: curves with intervals, settings that differ, and rollouts of the same scenario side by side.
import { axisText, COLORS, createChart, pointAt } from "./comparison/chart.js";
import { createEmbeddedViewer } from "./embedded-viewer.js";
import {
  announcer,
  clamp,
  coalesce,
  fill,
  freezeButton,
  h,
  initialize,
  keys,
  link,
  marked,
  mount,
  moveFocus,
  muted,
  num,
  plural,
} from "./panel.js";

/** Return the name of a run with its color. @param {string} name @param {number} i number of the run */
const runName = (name, i) =>
  h("span.c-run", h("i.c-key", { style: { background: `var(${COLORS[i]})` } }), h("span.text", marked(name)));

const NUMBERS = "table.c-table.c-numbers"; // all columns but the first contain numbers

/** Return a table. @param {string} label @param {any[]} head @param {any[]} rows @param {string} [kind] tag and classes */
const table = (label, head, rows, kind = "table.c-table") =>
  h(
    "div.c-scroll",
    { tabIndex: 0, role: "region", label },
    h(
      kind,
      h(
        "thead",
        h(
          "tr",
          head.map((cell) => h("th", { scope: "col" }, cell)),
        ),
      ),
      h("tbody", rows),
    ),
  );

/** Create a menu. `set` takes values and titles. @param {string} label @param {(value: string) => void} onchange */
function createSelect(label, onchange) {
  const node = h("select.select", { label, title: label, onchange: () => onchange(node.value) });
  const set = (/** @type {string[][]} */ all, /** @type {string} */ value) =>
    fill(
      node,
      all.map(([name, title]) => h("option", { value: name, selected: name === value }, title)),
    );
  return { node, set };
}

/** Create the place in which rollouts of a scenario are read side by side. @param {any} app */
function createReading(app) {
  const viewer = createEmbeddedViewer(app),
    heading = h("span.grow"),
    back = h("button.button", { title: "Previous rollouts (p)", onclick: () => step(-1) }, "Previous"),
    next = h("button.button", { title: "Next rollouts (n)", onclick: () => step(1) }, "Next");
  const bar = h(
    "div.c-bar",
    { role: "toolbar", label: "Rollouts of the scenario" },
    heading,
    back,
    next,
    h("button.button", { title: "Close (Escape)", onclick: close }, "Close"),
  );
  const node = h("section.c-reading", { label: "Rollouts of the scenario", hidden: true }, bar, viewer.node);
  let open = /** @type {any} */ (null),
    requests = 0;

  async function show(row, place = 0, lists = null) {
    const groups = row.groups.filter(Boolean).map(({ group }) => group);
    app.notify("");
    const request = ++requests;
    lists ??= (await app.wire.request("pairs", { groups })).reply.rows.filter((rows) => rows.length);
    if (request !== requests) return; // another scenario was chosen
    const total = Math.max(0, ...lists.map((rows) => rows.length));
    if (!total) return app.notify("All rollouts of this scenario failed.");
    open = { row, place, lists, total };
    const compared = lists.slice(0, 4),
      ids = compared.map((rows) => rows[Math.min(place, rows.length - 1)]);
    node.hidden = false;
    fill(heading, h("strong", marked(row.scenario)), muted(` · rank ${place + 1} of ${total} by reward`));
    if (compared.length < lists.length) heading.append(muted(` · ${compared.length} of ${lists.length} runs`));
    back.disabled = place === 0;
    next.disabled = place + 1 >= total;
    await (ids.length > 1 ? viewer.compare(ids) : viewer.show(ids[0]));
    app.announce(`${row.scenario}: rank ${place + 1} of ${total}`);
    node.scrollIntoView({ block: "nearest" });
  }
  const notified = (promise) => promise.catch((error) => app.notify(error.message));
  function step(by) {
    if (!open) return;
    const place = clamp(open.place + by, open.total);
    if (place !== open.place) notified(show(open.row, place, open.lists));
  }
  function close() {
    if (!open) return false;
    const { row } = open;
    open = null;
    viewer.close();
    node.hidden = true;
    app.root.querySelector(`[data-scenario="${CSS.escape(row.key)}"]`)?.focus();
  }
  return { node, step, close, show: (row) => notified(show(row)), end: viewer.close };
}

/** Create the list of scenarios that several runs have. @param {any} app @param {(row: any) => void} choose */
function createScenarios(app, choose) {
  const list = h("div"),
    more = h(
      "button.button",
      { hidden: true, onclick: () => load(rows.length).catch((error) => app.notify(error.message)) },
      "Show more",
    );
  const node = h("section", { label: "The same scenario" }, list, h("div.c-more", more));
  let rows = /** @type {any[]} */ ([]);

  const mean = (group) => (group?.mean == null ? "–" : num(group.mean));
  const row = (entry) =>
    h(
      "tr",
      h(
        "th",
        { scope: "row" },
        h(
          "button.c-scenario",
          { "data-scenario": entry.key, title: "Read the rollouts side by side (Enter)", onclick: () => choose(entry) },
          h("span.text", marked(entry.scenario)),
          muted(` ${entry.split}`),
        ),
      ),
      entry.groups.map((group) =>
        h("td.num", { title: group ? `step ${group.step}, ${plural(group.rollouts, "rollout")}` : "" }, mean(group)),
      ),
      h("td.num", num(entry.spread)),
    );

  async function load(first = 0) {
    const { reply } = await app.wire.request("scenarios", { first }),
      focused = /** @type {any} */ (app.root.getRootNode()).activeElement?.dataset?.scenario;
    const page = reply.rows.map((entry) => ({ ...entry, key: `${entry.split}/${entry.scenario}` }));
    rows = [...rows.slice(0, first), ...page];
    more.hidden = rows.length >= reply.total;
    const text = rows.length
      ? `Mean rewards of ${plural(reply.total, "scenario")}, largest differences first. Choose one to read its rollouts.`
      : "No scenario with a name occurs in several runs. Set `scenario_id` in the metadata of your groups.";
    fill(list, h("h3.c-title", "The same scenario"), h("p.c-text", text));
    if (rows.length)
      list.append(
        table(
          "Mean rewards by scenario",
          ["scenario", ...app.names.map(runName), "difference"],
          rows.map(row),
          NUMBERS,
        ),
      );
    if (focused !== undefined) list.querySelector(`[data-scenario="${CSS.escape(focused)}"]`)?.focus();
  }
  return { node, load };
}

/** @param {HTMLElement} root @param {ReturnType<typeof link>} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({ root, wire, model, announce: announcer(root), names: [] });
  const status = h("span.muted.grow", { role: "status" }),
    note = h("div.c-note", { role: "status", hidden: true }),
    legend = h("div"),
    settings = h("section", { label: "Settings that differ" });
  app.notify = (/** @type {string} */ text) => {
    note.hidden = !text;
    fill(note, marked(text));
  };
  const metric = createSelect("Metric", (value) => choose({ metric: value })),
    axis = createSelect("Horizontal axis", (value) => choose({ axis: value }));
  const reading = createReading(app),
    scenarios = createScenarios(app, reading.show),
    chart = createChart((position) => drawLegend(position));
  let curves = /** @type {any[]} */ ([]),
    choice = /** @type {any} */ ({ metric: "", axis: "step", ...model.get("choice") });
  root.classList.add("art-comparison");
  root.append(
    h(
      "div.c-bar",
      { role: "toolbar", label: "Comparison" },
      h("strong", "Compare"),
      metric.node,
      muted("by"),
      axis.node,
      status,
      freezeButton(wire),
    ),
    note,
    chart.node,
    legend,
    scenarios.node,
    reading.node,
    settings,
  );
  chart.follow(/** @type {Element} */ (root.parentElement));

  /** Return the value of a run at a position, with its interval. @param {any} curve @param {number|null} position */
  function valueCells(curve, position) {
    const i = position == null ? (curve.x?.length ?? 0) - 1 : pointAt(curve, position);
    if (!(i >= 0)) return ["–", "–", "–"];
    const interval = curve.low[i] == null ? "–" : `${num(curve.low[i])} to ${num(curve.high[i])}`;
    const place = choice.axis === "step" ? "" : ` · ${axisText(choice.axis, curve.x[i])}`;
    return [num(curve.value[i]), interval, `${curve.step[i]}${place}`];
  }

  function drawLegend(/** @type {number|null} */ position = null) {
    const rows = curves.map((curve, i) =>
      h(
        "tr",
        h("th", { scope: "row" }, runName(app.names[i], i)),
        valueCells(curve, position).map((cell) => h("td.num", cell)),
      ),
    );
    fill(legend, table("Values", ["run", choice.metric, "95 % interval", "step"], rows, NUMBERS));
  }

  /** Show another metric or axis. @param {any} change */
  function choose(change) {
    choice = { ...choice, ...change };
    model.set("choice", choice);
    model.save_changes();
    load();
  }

  function drawSettings({ settings: rows, more_settings: more, has_settings: hasSettings }) {
    fill(settings, h("h3.c-title", "Settings that differ"));
    const cells = ([name, ...values]) =>
      h(
        "tr",
        h("th", { scope: "row" }, h("span.mono", marked(name))),
        values.map((value) => h("td", h("span.mono", marked(value)))),
      );
    settings.append(
      rows.length
        ? table("Settings that differ", ["setting", ...app.names.map(runName)], rows.map(cells))
        : h("p.c-text", hasSettings ? "All recorded settings are equal." : "No settings were recorded."),
    );
    if (more) settings.append(h("p.c-text", `${more} more settings differ.`));
  }

  async function loadRuns() {
    const { reply } = await wire.request("runs");
    app.names = reply.runs;
    if (!reply.metrics.includes(choice.metric)) choice.metric = reply.metrics[0] ?? "train/reward";
    metric.set(
      reply.metrics.map((name) => [name, name]),
      choice.metric,
    );
    axis.set(reply.axes, choice.axis);
    drawSettings(reply);
  }

  const load = coalesce(
    async () => {
      app.notify("");
      await loadRuns();
      let reply,
        { metric: name, axis: unit } = choice;
      do {
        ({ reply } = await wire.request("curves", { metric: name, axis: unit }));
        curves = reply.curves;
        fill(status, `${plural(reply.rollouts, "rollout")}${reply.done ? "" : ", reading more…"}`);
        const last = curves.map((curve, i) => `${app.names[i]} ${valueCells(curve, null)[0]}`);
        chart.set(unit, curves, `${name} by ${unit}: ${last.join(", ")} at the end`);
        drawLegend();
      } while (!reply.done && choice.metric === name && choice.axis === unit);
      if (reply.lost.length) app.notify(`Could not read: ${reply.lost.join("; ")}`);
      await scenarios.load();
    },
    (message, error) => {
      if (error.name !== "AbortError") app.notify(message);
    },
  );

  const move = (/** @type {number} */ by) => moveFocus(root, "[data-scenario]", by);
  const stopKeys = keys(root, {
    j: () => move(1),
    k: () => move(-1),
    n: () => reading.step(1),
    p: () => reading.step(-1),
    Escape: reading.close,
  });
  wire.onTick(load);
  wire.onGap(load);
  load();
  return () => {
    stopKeys();
    chart.end();
    reading.end();
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
