// The curation panel: conversations with marks, tags, corrections, near-duplicates and findings of personal data.
import { createList } from "./curation/list.js";
import { createReader } from "./curation/reader.js";
import {
  announcer,
  coalesce,
  fill,
  freezeButton,
  h,
  iconButton,
  initialize,
  keys,
  marked,
  mount,
  muted,
  plural,
} from "./panel.js";

const HELP = [
  ["n p", "next, previous conversation"],
  ["j k", "next, previous message"],
  ["g b f u", "mark the conversation: good, bad, needs fix, no mark"],
  ["G B F U", "mark the current reply"],
  ["e", "correct the current reply; Ctrl+Enter saves, Esc cancels"],
  ["t", "add a tag"],
  ["\\", "filter"],
  ["/", "search"],
  ["Enter", "in the list: go to the conversation"],
  ["?", "this help"],
];
const FILTERS =
  "Filters: mark=good tag~refund session~visit author~ana marked edited disputed duplicates repeated personal validation, reward turns " +
  "tools tokens step split scenario, any metric, < <= > >= = != ~, and or not.";
let panelCount = 0;

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({
    name: `art-curation-${++panelCount}`,
    root,
    wire,
    model,
    ui: { id: null, where: "", words: "", ...model.get("ui") },
    state: { author: "", tags: [], counts: {} },
    done: false,
    version: 0, // of the journal, as this view shows it
    writes: 0, // requests that are not answered yet
    lastTick: null,
    announce: announcer(root),
  });
  const { ui } = app;
  let timer = 0;
  app.saveUi = (/** @type {any} */ change) => {
    Object.assign(ui, change);
    clearTimeout(timer);
    timer = setTimeout(() => (model.set("ui", { ...ui }), model.save_changes()), 250);
  };
  const note = h("div.cu-note", { role: "status", hidden: true });
  app.notify = (/** @type {string} */ text) => {
    note.hidden = false;
    fill(
      note,
      h("span", marked(text)),
      iconButton("✕", "Close", () => (note.hidden = true)),
    );
  };
  const list = (app.list = createList(app)),
    reader = (app.reader = createReader(app));
  app.select = (/** @type {number} */ id) => {
    app.saveUi({ id });
    reader.open(id);
  };

  // elements ---------------------------------------------------------------------------------

  const title = h("strong.cu-title"),
    counts = h("span.muted.cu-counts"),
    facts = h("div.cu-facts.muted"),
    problem = h("div.cu-problem", { role: "alert", hidden: true });
  const where = h("input.input.cu-where", {
      label: "Filter",
      placeholder: "filter, for example: not marked (\\)",
      value: ui.where,
      spellcheck: false,
    }),
    words = h("input.input.cu-words", { label: "Search", placeholder: "search (/)", value: ui.words });
  const share = h("input.input.cu-share", {
      type: "number",
      label: "Share of validation",
      min: "0",
      max: "1",
      step: "0.05",
    }),
    seed = h("input.input.cu-seed", { type: "number", label: "Seed of the split", min: "0", step: "1" });
  const help = h(
    "div.cu-help",
    { role: "dialog", label: "Keys", hidden: true, tabIndex: 0 },
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
    muted(FILTERS),
  );
  root.classList.add("art-curation");
  root.append(
    h(
      "div.cu-bar",
      { role: "toolbar", label: "Conversations" },
      title,
      counts,
      h("span.grow"),
      where,
      words,
      h("button.button", { title: "Keys", onclick: showHelp }, "?"),
      freezeButton(wire),
    ),
    facts,
    problem,
    note,
    help,
    h(
      "div.cu-columns",
      h("nav.cu-browser", { label: "Browser" }, list.node),
      h("div.cu-main", reader.head, reader.node),
    ),
    h(
      "div.cu-split",
      h("span", "Split: "),
      share,
      " validation, seed ",
      seed,
      muted("as in .split(validation=…, seed=…)"),
    ),
  );

  // the state ---------------------------------------------------------------------------------

  function drawState() {
    const { state } = app,
      { good = 0, bad = 0, fix = 0, disputed = 0, edited = 0 } = state.counts;
    fill(title, marked(state.title));
    fill(
      counts,
      `${plural(state.conversations, "conversation")}${state.done ? "" : ", reading more…"} · ${good} good · ${bad} bad · ` +
        `${fix} to fix${disputed ? ` · ${disputed} disputed` : ""} · ${edited} corrected`,
    );
    fill(
      facts,
      state.missing
        ? h("span", marked(state.missing), " Equal conversations are found without it. ")
        : h("span", `${state.repeated} repeated. `),
      h("span", `${state.personal} with findings of personal data. `),
      h(
        "span",
        marked(
          state.file
            ? `${state.author} writes ${state.file}`
            : `${state.author}: marks are kept in memory. Pass journal=… to keep them.`,
        ),
      ),
    );
    if (document.activeElement !== share && root.getRootNode().activeElement !== share) share.value = state.validation;
    if (root.getRootNode().activeElement !== seed) seed.value = state.seed;
    reader.redraw();
  }

  const choose = coalesce(
    async () => {
      try {
        const { buffers } = await wire.request("select", { where: ui.where, words: ui.words });
        problem.hidden = true;
        where.removeAttribute("aria-invalid");
        list.show(buffers[0]);
        reader.redraw(); // its position in the list
        if (ui.id === null && list.first() !== undefined) app.select(list.first());
      } catch (error) {
        if (error.name === "AbortError") return;
        problem.hidden = false;
        where.setAttribute("aria-invalid", "true");
        fill(problem, marked(error.message));
      }
    },
    () => {},
  );
  const readState = async () => {
    app.state = (await wire.request("state")).reply;
    if (app.state.lost.length) app.notify(`Could not read: ${app.state.lost.join("; ")}`);
    drawState();
  };
  const failed = (message, error) => error.name !== "AbortError" && app.notify(message);
  /** Read until everything is scanned. The list is complete earlier, and shows what is known so far. */
  const load = coalesce(async () => {
    let rows = -1;
    app.done = false;
    do {
      await readState();
      if (app.state.rows !== rows) await choose();
      rows = app.state.rows;
    } while (!app.state.done);
    app.done = true;
    list.forget();
    await choose();
  }, failed);
  const refreshState = coalesce(readState, failed);
  /** A mark was written: only one row and the counts change. @param {number} id */
  app.written = (id) => {
    list.forget(id);
    refreshState();
  };

  // actions ---------------------------------------------------------------------------------

  const search = (change) => {
    app.saveUi(change);
    choose();
  };
  const onEnter = (input, act) => {
    input.onchange = act;
    input.onkeydown = (event) => {
      if (event.key === "Escape") reader.focus();
      else if (event.key === "Enter") act();
      else return;
      event.preventDefault();
      event.stopPropagation();
    };
  };
  onEnter(where, () => search({ where: where.value }));
  onEnter(words, () => search({ words: words.value }));
  const split = async () => {
    try {
      await wire.request("show_split", { validation: Number(share.value), seed: Number(seed.value) });
      list.forget();
      await readState();
      if (/validation/.test(ui.where)) await choose();
    } catch (error) {
      app.notify(error.message);
    }
  };
  onEnter(share, split);
  onEnter(seed, split);
  function showHelp() {
    help.hidden = !help.hidden;
    (help.hidden ? reader : help).focus();
  }
  const focusOn = (input) => () => (input.focus(), input.select());
  const stopKeys = keys(root, {
    n: () => list.step(1),
    p: () => list.step(-1),
    J: () => list.step(1),
    K: () => list.step(-1),
    j: () => reader.goBy(1),
    k: () => reader.goBy(-1),
    g: () => reader.mark("good"),
    b: () => reader.mark("bad"),
    f: () => reader.mark("fix"),
    u: () => reader.mark(null),
    G: () => reader.markTurn("good"),
    B: () => reader.markTurn("bad"),
    F: () => reader.markTurn("fix"),
    U: () => reader.markTurn(null),
    e: reader.edit,
    t: reader.focusTag,
    "\\": focusOn(where),
    "/": focusOn(words),
    "?": showHelp,
    Escape: () => (help.hidden ? reader.closeEditor() : (showHelp(), true)) || false,
  });
  // Another view, or Python, has written marks: request the facts again. Marks of this view are shown already.
  let reloads = model.get("tick")?.reload;
  app.follow = (/** @type {any} */ tick) => {
    if (tick.reload !== undefined && tick.reload !== reloads) {
      reloads = tick.reload;
      load();
    } else if (!(tick.version > app.version)) return;
    app.version = Math.max(app.version, tick.version ?? 0);
    list.forget();
    refreshState();
    if (ui.id !== null && !reader.isEditing()) reader.read(ui.id);
  };
  wire.onTick((tick) => {
    if (app.writes) app.lastTick = tick;
    else app.follow(tick);
  });
  wire.onGap(load);
  if (ui.id !== null) reader.open(ui.id);
  load();
  return () => {
    stopKeys();
    list.close();
    CSS.highlights?.delete("art-curated");
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
