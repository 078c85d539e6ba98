// The rollout viewer: rollout list, conversation, comparison, tokens, rewards, boards.
import { announcer, coalesce, fill, freezeButton, h, iconButton, initialize, keys, marked, mount } from "./panel.js";
import { createCompare, createSteps } from "./viewer/compare.js";
import { createFacts } from "./viewer/facts.js";
import { createFinding, FILTERS } from "./viewer/finding.js";
import { createIndex } from "./viewer/index.js";
import { createList } from "./viewer/list.js";
import { createObjective } from "./viewer/objective.js";
import { createReader } from "./viewer/reader.js";
import { foldAll } from "./viewer/thread.js";
import { CHANNELS, legend } from "./viewer/token-colors.js";
import { createTokens } from "./viewer/tokens.js";

const HELP = [
  ["j k", "next, previous turn"],
  ["J K n p", "next, previous rollout"],
  ["[ ]", "previous, next group"],
  ["h l", "left, right pane; l starts a comparison"],
  ["f", "hide or show side panes"],
  ["/", "search; Enter, Shift+Enter: next, previous match"],
  ["\\", "filter"],
  ["g G", "first, last turn"],
  ["e x", "expand, collapse all"],
  ["o", "override the score"],
  ["t T", "next, previous token color"],
  ["← →", "previous, next token; Esc deselects"],
  ["Space", "in the list: select to compare or export"],
  ["c", "compare"],
  ["s", "this scenario at other steps"],
  ["y", "copy the link"],
  ["?", "this help"],
  ["Esc", "back"],
];
const LOSSES = ["", "cispo", "ppo", "dapo", "dr_grpo", "gspo"];
const INITIAL_UI = {
  id: 0,
  turn: null,
  color: "",
  loss: "",
  objective: false,
  where: "",
  sort: "",
  preset: "",
  wide: false,
  ids: [],
};
let panelCount = 0;

/** Read the saved state of the panel. A color or loss of another version becomes the default. @param {any} model */
function readUi(model) {
  const ui = { ...INITIAL_UI, ...model.get("ui") };
  if (!CHANNELS.some(([name]) => name === ui.color)) ui.color = "";
  if (!LOSSES.includes(ui.loss)) ui.loss = "";
  return ui;
}

const button = (label, title, onclick) => h("button.button", { title, onclick }, label);

/** Store the state of the panel in the model, so that it survives a page reload. @param {any} app */
function createUiStore({ model, ui }) {
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
function createColors(app) {
  const { ui } = app,
    legendBox = h("div.key");
  const option =
    (chosen) =>
    ([value, label]) =>
      h("option", { value, selected: value === chosen }, label);
  const channels = h(
    "select.select",
    { label: "Color tokens by", onchange: () => paint(channels.value) },
    CHANNELS.map(([value, label]) => option(ui.color)([value, value ? label : "tokens: plain"])),
  );
  const losses = h(
    "select.select",
    { label: "Loss", hidden: true, onchange: () => paint(ui.color) },
    LOSSES.map((value) => option(ui.loss)([value, value || "as trained"])),
  );

  function paint(channel) {
    channels.value = channel;
    losses.hidden = channel !== "gradient";
    app.saveUi({ color: channel, loss: losses.value });
    fill(legendBox, channel && legend(channel));
    app.tokens.recolor();
    app.announce(channel ? `tokens by ${CHANNELS.find(([name]) => name === channel)?.[1]}` : "plain text");
  }
  const currentIndex = () => CHANNELS.findIndex(([name]) => name === ui.color);
  return {
    channels,
    losses,
    key: legendBox,
    paint,
    cycle: (by) => paint(CHANNELS[(currentIndex() + by + CHANNELS.length) % CHANNELS.length][0]),
  };
}

/** Open and close the comparison of rollouts. @param {any} app */
function createComparison(app) {
  const { index, list, picked, reader, sides, steps, ui } = app;
  const compareButton = button("Compare", "Compare the selected rollouts, or this and the next (c)", startComparison);

  app.pick = (id) => {
    picked.has(id) ? picked.delete(id) : picked.add(id);
    fill(compareButton, picked.size > 1 ? `Compare ${picked.size}` : "Compare");
    app.announce(`${picked.size} selected`);
    list.draw();
  };

  app.compare = async (ids, bySteps = false) => {
    const wanted = [...new Set(ids)].slice(0, 4);
    if (wanted.length < 2) return;
    app.saveUi({ ids: wanted });
    if (!bySteps) steps.hide();
    app.objective.close();
    try {
      if (!(await sides.show(wanted))) return;
      app.root.classList.add("art-is-comparing");
      reader.replace(sides.node);
      if (app.matches) app.finding.mark();
      fill(
        reader.crumbs,
        h("strong", `${wanted.length} rollouts`),
        button("Back", "Show one rollout", () => app.showOne(ui.id)),
        button("Steps", "Compare the scenario at other steps", () => steps.show(index.columns.group[wanted[0]])),
      );
      app.announce(`comparing ${wanted.length} rollouts`);
    } catch (error) {
      app.notify(error.message);
      app.showOne(ui.id);
    }
  };

  app.showOne = (id) => {
    list.go(id);
    reader.focus();
  };

  function startComparison() {
    const ids = picked.size > 1 ? [...picked] : [ui.id, [...picked][0] ?? nextInGroup([ui.id])];
    app.compare(ids.filter((id) => id !== undefined));
  }

  /** Return the next rollout of the same group that did not fail and is not in the comparison. @param {number[]} exclude */
  function nextInGroup(exclude) {
    const last = exclude.at(-1),
      group = index.groupOf(last);
    for (let offset = 1; group && offset < group.size; offset++) {
      const next = group.first + ((last - group.first + offset) % group.size);
      if (!exclude.includes(next) && !index.columns.status[next]) return next;
    }
  }

  /** Go to the pane on the right. From a single rollout or the last pane, add another rollout. */
  function goRight() {
    if (ui.ids.length < 2) return startComparison();
    if (sides.step(1) || ui.ids.length >= 4) return;
    const next = nextInGroup(ui.ids);
    if (next !== undefined) app.compare([...ui.ids, next]);
  }
  return { face: compareButton, begin: startComparison, right: goRight };
}

/** Load the index and its updates. @param {any} app @param {() => void} shown called after every part */
function createLoader(app, shown) {
  const { index, list, ui, wire } = app;
  let lostCount = 0;
  return coalesce(async () => {
    index.done = false;
    do {
      const { version } = index,
        { reply, buffers } = await wire.request("index", { from_row: index.count });
      index.add(reply, buffers);
      if (version !== index.version) list.forget();
      if (index.lost.length > lostCount) app.notify(`Could not read: ${index.lost.join("; ")}`);
      lostCount = index.lost.length;
      shown();
      if (!reply.rows && !reply.done) await new Promise((resolve) => setTimeout(resolve, 100));
    } while (!index.done || index.count < index.total);
    if (ui.where || ui.sort || ui.preset) await app.finding.choose({});
  }, app.notify);
}

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({
    name: `art-viewer-${++panelCount}`,
    root,
    wire,
    model,
    index: createIndex(),
    ui: readUi(model),
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
  app.saveUi = createUiStore(app);
  app.notify = (/** @type {string} */ text) => {
    note.hidden = false;
    fill(
      note,
      h("span.mono", marked(text)),
      iconButton("✕", "Close", () => (note.hidden = true)),
    );
  };
  const list = (app.list = createList(app)),
    facts = (app.facts = createFacts(app)),
    sides = (app.sides = createCompare(app));
  const steps = (app.steps = createSteps(app)),
    reader = (app.reader = createReader(app)),
    tokens = (app.tokens = createTokens(app));
  const finding = (app.finding = createFinding(app)),
    objective = (app.objective = createObjective(app));
  const colors = createColors(app),
    comparison = createComparison(app);
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
  const spacer = () => h("span.grow");
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
    spacer(),
    colors.channels,
    colors.losses,
    comparison.face,
    button("Export", "Save the selected rollouts (or this one) as HTML", exportPicked),
    freezeButton(wire),
  );
  const main = h(
    "div.main",
    lower,
    note,
    colors.key,
    h("div.reading", reader.node, h("div.side", facts.node)),
    objective.node,
  );
  root.classList.add("art-viewer");
  root.append(
    upper,
    finding.errorNode,
    h("div.columns", h("nav.browser", { label: "Browser" }, list.node), main),
    help,
    tokens.tip,
  );
  tokens.listen(root);

  // actions ---------------------------------------------------------------------------------

  async function exportPicked() {
    const ids = app.picked.size ? [...app.picked].sort((a, b) => a - b) : ui.ids.length ? ui.ids : [ui.id];
    try {
      app.notify(`Saved: ${(await wire.request("export", { ids })).reply.path}`);
    } catch (error) {
      app.notify(error.message);
    }
  }
  function showHelp() {
    help.hidden = !help.hidden;
    (help.hidden ? reader : help).focus();
  }
  function setWide(isWide = !ui.wide) {
    app.saveUi({ wide: isWide });
    root.classList.toggle("art-is-wide", isWide);
    list.draw();
  }
  function goBack() {
    if (!help.hidden) showHelp();
    else if (objective.token) tokens.choose(null);
    else if (ui.ids.length > 1) app.showOne(ui.id);
    else if (ui.wide) setWide();
    else return false;
  }
  const stopKeys = keys(root, {
    j: () => reader.goBy(1),
    k: () => reader.goBy(-1),
    g: () => reader.goTo(0),
    G: () => reader.goTo(Infinity),
    J: () => list.step(1),
    K: () => list.step(-1),
    n: () => list.step(1),
    p: () => list.step(-1),
    "[": () => list.stepGroup(-1),
    "]": () => list.stepGroup(1),
    h: () => void sides.step(-1),
    l: comparison.right,
    f: () => setWide(),
    "/": finding.focusSearch,
    "\\": finding.focusFilter,
    e: () => foldAll(reader.body, true),
    x: () => foldAll(reader.body, false),
    o: () => facts.override(),
    "?": showHelp,
    t: () => colors.cycle(1),
    T: () => colors.cycle(-1),
    c: comparison.begin,
    y: reader.copyLink,
    s: () => steps.show(index.columns.group[ui.id]),
    Escape: goBack,
  });

  // updates from Python ---------------------------------------------------------------------------------

  const loadMore = createLoader(app, () => {
    fill(title, marked(index.title));
    root.classList.toggle("art-is-single", index.count === 1);
    finding.count();
    list.arrange();
    if (reader.started || !index.count) return;
    reader.started = true;
    if (ui.ids.length > 1) app.compare(ui.ids);
    else showRollout(Math.min(ui.id, index.count - 1), ui.turn);
  });
  const showRollout = (id, turn) => (list.go(id), reader.select(id, turn));
  wire.onChange("jump", () => {
    const { id, turn = null } = model.get("jump") ?? {};
    if (id < index.count) showRollout(id, turn);
  });
  wire.onTick(loadMore);
  wire.onGap(loadMore);
  setWide(ui.wide);
  if (ui.color) colors.paint(ui.color);
  list.arrange();
  loadMore();
  return () => {
    stopKeys();
    list.close();
    tokens.close();
    CSS.highlights?.delete("art-found");
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
