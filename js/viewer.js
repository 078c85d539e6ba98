// The rollout viewer: rollout list, conversation, comparison, tokens, rewards, boards.
import { announcer, fill, h, initialize, keys, marked, mount, signed } from "./panel.js";
import { createCompare, createSteps } from "./viewer/compare.js";
import { createFacts } from "./viewer/facts.js";
import { createFinding } from "./viewer/finding.js";
import { createIndex } from "./viewer/index.js";
import { createInspector } from "./viewer/lens.js";
import { createList } from "./viewer/list.js";
import { createReader } from "./viewer/reader.js";
import { foldAll } from "./viewer/thread.js";
import { CHANNELS, createTokens, legend } from "./viewer/tokens.js";

const HELP = [
  ["j k", "next, previous turn"],
  ["J K n p", "next, previous rollout"],
  ["[ ]", "previous, next group"],
  ["h l", "left, right pane; l starts a comparison"],
  ["f", "hide or show the side panes"],
  ["/", "search; Enter, Shift+Enter: next, previous match"],
  ["\\", "filter"],
  ["g G", "first, last turn"],
  ["e x", "expand, collapse all"],
  ["o", "override the score"],
  ["t T", "next, previous token color"],
  ["← →", "previous, next token; Esc deselects"],
  ["Space", "in the list: select to compare or export"],
  ["c", "compare"],
  ["s", "the same scenario at other steps"],
  ["y", "copy the link"],
  ["?", "this help"],
  ["Esc", "back"],
];
const FILTERS =
  "Filters: reward advantage ruler turns tools tokens step, any metric, < <= > >= = != ~, and or not, " +
  "truncated failed judged overridden injection zero_variance.";
const LOSSES = ["", "cispo", "ppo", "dapo", "dr_grpo", "gspo"];
const UI = {
  id: 0,
  turn: null,
  colour: "",
  loss: "",
  lens: false,
  where: "",
  sort: "",
  preset: "",
  wide: false,
  ids: [],
};
let count = 0;

const button = (label, title, onclick) => h("button.button", { title, onclick }, label);

/** Store the state of the panel in the model, so that it survives a page reload. @param {any} app */
function keeper({ model, ui }) {
  let timer = 0;
  return (/** @type {any} */ change) => {
    Object.assign(ui, change);
    clearTimeout(timer);
    timer = setTimeout(() => {
      model.set("ui", { ...ui });
      model.save_changes();
    }, 250);
  };
}

/** Create the controls for token colors: the channel, the loss, and the legend. @param {any} app */
function createColours(app) {
  const { ui } = app,
    key = h("div.key");
  const option =
    (chosen) =>
    ([value, label]) =>
      h("option", { value, selected: value === chosen }, label);
  const channels = h(
    "select.select",
    { label: "Color tokens by", onchange: () => paint(channels.value) },
    CHANNELS.map(([value, label]) => option(ui.colour)([value, value ? label : "tokens: plain"])),
  );
  const losses = h(
    "select.select",
    { label: "Loss", hidden: true, onchange: () => paint(ui.colour) },
    LOSSES.map((value) => option(ui.loss)([value, value || "as trained"])),
  );

  function paint(channel) {
    channels.value = channel;
    losses.hidden = channel !== "push";
    app.keep({ colour: channel, loss: losses.value });
    fill(key, channel && legend(channel));
    app.tokens.recolour();
    app.announce(channel ? `tokens by ${CHANNELS.find(([name]) => name === channel)?.[1]}` : "plain text");
  }
  const at = () => CHANNELS.findIndex(([name]) => name === ui.colour);
  return {
    channels,
    losses,
    key,
    paint,
    cycle: (by) => paint(CHANNELS[(at() + by + CHANNELS.length) % CHANNELS.length][0]),
  };
}

/** Open and close the comparison of rollouts. @param {any} app */
function createComparing(app) {
  const { index, list, picked, reader, sides, steps, ui } = app;
  const face = button("Compare", "Compare the selected rollouts, or this one and the next (c)", begin);

  app.pick = (id) => {
    picked.has(id) ? picked.delete(id) : picked.add(id);
    fill(face, picked.size > 1 ? `Compare ${picked.size}` : "Compare");
    app.announce(`${picked.size} selected`);
    list.draw();
  };

  app.compare = async (ids, bySteps = false) => {
    const wanted = [...new Set(ids)].slice(0, 4);
    if (wanted.length < 2) return;
    app.keep({ ids: wanted });
    if (!bySteps) steps.hide();
    app.inspector.close();
    try {
      if (!(await sides.show(wanted))) return;
      app.root.classList.add("art-is-comparing");
      reader.leave(sides.node);
      if (app.matches) app.finding.mark();
      fill(
        reader.crumbs,
        h("strong", `${wanted.length} rollouts`),
        button("Back", "Show one rollout", () => app.alone(ui.id)),
        button("Steps", "Compare the scenario at other steps", () => steps.show(index.columns.group[wanted[0]])),
      );
      app.announce(`comparing ${wanted.length} rollouts`);
    } catch (error) {
      app.say(error.message);
      app.alone(ui.id);
    }
  };

  app.alone = (id) => {
    list.go(id);
    reader.focus();
  };

  function begin() {
    const ids = picked.size > 1 ? [...picked] : [ui.id, [...picked][0] ?? neighbour([ui.id])];
    app.compare(ids.filter((id) => id !== undefined));
  }

  /** Return the next rollout of the same group that did not fail and is not in the comparison. @param {number[]} taken */
  function neighbour(taken) {
    const last = taken[taken.length - 1],
      group = index.groupOf(last);
    for (let n = 1; group && n < group.size; n++) {
      const next = group.first + ((last - group.first + n) % group.size);
      if (!taken.includes(next) && !index.columns.status[next]) return next;
    }
  }

  /** Go to the pane on the right. From a single rollout or the last pane, add another rollout. */
  function right() {
    if (ui.ids.length < 2) return begin();
    if (sides.step(1) || ui.ids.length >= 4) return;
    const next = neighbour(ui.ids);
    if (next !== undefined) app.compare([...ui.ids, next]);
  }
  return { face, begin, right };
}

/** Load the index and its updates. @param {any} app @param {() => void} shown called after every part */
function reading(app, shown) {
  const { index, list, ui, wire } = app;
  let busy = false,
    again = false,
    lost = 0;
  async function all() {
    do {
      const { version } = index,
        { reply, buffers } = await wire.request("index", { from_row: index.count });
      index.add(reply, buffers);
      if (version !== index.version) list.forget();
      if (index.lost.length > lost) app.say(`Could not read: ${index.lost.join("; ")}`);
      lost = index.lost.length;
      shown();
      if (!reply.rows && !reply.done) await new Promise((resolve) => setTimeout(resolve, 100));
    } while (!index.done || index.count < index.total);
    if (ui.where || ui.sort || ui.preset) await app.finding.choose({});
  }
  return async () => {
    again = true;
    if (busy) return;
    busy = true;
    try {
      while (again) {
        again = false;
        index.done = false;
        await all();
      }
    } catch (error) {
      app.say(error.message);
    } finally {
      busy = false;
    }
  };
}

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({
    name: `art-viewer-${++count}`,
    root,
    wire,
    model,
    index: createIndex(),
    ui: { ...UI, ...model.get("ui") },
    announce: announcer(root),
    mask: null,
    order: null,
    shown: 0,
    picked: new Set(),
    matches: null,
  });
  const { index, ui } = app,
    note = h("div.saved", { role: "status", hidden: true }),
    title = h("span.title");
  app.keep = keeper(app);
  app.say = (/** @type {string} */ text) => {
    note.hidden = false;
    fill(
      note,
      h("span.mono", marked(text)),
      signed("✕", "Close", () => (note.hidden = true)),
    );
  };
  const list = (app.list = createList(app)),
    facts = (app.facts = createFacts(app)),
    sides = (app.sides = createCompare(app));
  const steps = (app.steps = createSteps(app)),
    reader = (app.reader = createReader(app)),
    tokens = (app.tokens = createTokens(app));
  const finding = (app.finding = createFinding(app)),
    inspector = (app.inspector = createInspector(app));
  const colours = createColours(app),
    comparing = createComparing(app);
  app.select = reader.select;
  app.reload = (/** @type {number} */ id) => (list.forget(), reader.read(id));

  // elements ---------------------------------------------------------------------------------

  const help = h(
    "div.help",
    { role: "dialog", label: "Keys", hidden: true, tabIndex: 0 },
    h("div.label", "Keys"),
    h(
      "dl",
      HELP.map(([names, what]) => [
        h(
          "dt",
          names.split(" ").map((name) => h("kbd.kbd", name)),
        ),
        h("dd", what),
      ]),
    ),
    h("div.muted", FILTERS),
  );
  const grow = () => h("span.grow");
  const upper = h(
    "div.bar",
    { role: "toolbar", label: "Rollouts" },
    title,
    finding.parts,
    button("?", "Keys", showHelp),
  );
  const lower = h(
    "div.bar.bar2",
    { role: "toolbar", label: "This rollout" },
    reader.crumbs,
    grow(),
    colours.channels,
    colours.losses,
    comparing.face,
    button("Export", "Save the selected rollouts (or this one) as HTML", exportPicked),
    button("Freeze", "Replace this panel with static HTML, which is saved in the notebook", () =>
      wire.request("freeze").catch(() => {}),
    ),
  );
  const main = h(
    "div.main",
    lower,
    note,
    colours.key,
    h("div.reading", reader.node, h("div.side", facts.node)),
    inspector.node,
  );
  root.classList.add("art-viewer");
  root.append(
    upper,
    finding.wrong,
    h("div.columns", h("nav.browser", { label: "Browser" }, list.node), main),
    help,
    tokens.tip,
  );
  tokens.listen(root);

  // actions ---------------------------------------------------------------------------------

  async function exportPicked() {
    const ids = app.picked.size ? [...app.picked].sort((a, b) => a - b) : ui.ids.length ? ui.ids : [ui.id];
    try {
      app.say(`Saved: ${(await wire.request("export", { ids })).reply.path}`);
    } catch (error) {
      app.say(error.message);
    }
  }
  function showHelp() {
    help.hidden = !help.hidden;
    (help.hidden ? reader : help).focus();
  }
  function wide(on = !ui.wide) {
    app.keep({ wide: on });
    root.classList.toggle("art-is-wide", on);
    list.draw();
  }
  function back() {
    if (!help.hidden) showHelp();
    else if (inspector.token) tokens.choose(null);
    else if (ui.ids.length > 1) app.alone(ui.id);
    else if (ui.wide) wide();
    else return false;
  }
  const stopKeys = keys(root, {
    j: () => reader.by(1),
    k: () => reader.by(-1),
    g: () => reader.to(0),
    G: () => reader.to(Infinity),
    J: () => list.step(1),
    K: () => list.step(-1),
    n: () => list.step(1),
    p: () => list.step(-1),
    "[": () => list.stepGroup(-1),
    "]": () => list.stepGroup(1),
    h: () => void sides.step(-1),
    l: comparing.right,
    f: () => wide(),
    "/": finding.toSearch,
    "\\": finding.toFilter,
    e: () => foldAll(reader.body, true),
    x: () => foldAll(reader.body, false),
    o: () => facts.override(),
    "?": showHelp,
    t: () => colours.cycle(1),
    T: () => colours.cycle(-1),
    c: comparing.begin,
    y: reader.copyLink,
    s: () => steps.show(index.columns.group[ui.id]),
    Escape: back,
  });

  // updates from Python ---------------------------------------------------------------------------------

  const more = reading(app, () => {
    fill(title, marked(index.title));
    root.classList.toggle("art-is-single", index.count === 1);
    finding.count();
    list.arrange();
    if (reader.started || !index.count) return;
    reader.started = true;
    if (ui.ids.length > 1) app.compare(ui.ids);
    else show(Math.min(ui.id, index.count - 1), ui.turn);
  });
  const show = (id, turn) => (list.go(id), reader.select(id, turn));
  wire.onChange("jump", () => {
    const { id, turn = null } = model.get("jump") ?? {};
    if (id < index.count) show(id, turn);
  });
  wire.onTick(more);
  wire.onGap(more);
  wide(ui.wide);
  if (ui.colour) colours.paint(ui.colour);
  list.arrange();
  more();
  return () => {
    stopKeys();
    list.close();
    tokens.close();
    CSS.highlights?.delete("art-found");
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
