// The judging panel: a ranked group, the judge's reasons, human scores, and their effect on the advantages.
import { announcer, fill, h, initialize, keys, marked, mount, muted, num } from "./panel.js";
import { createCards, plus, reading } from "./judging/cards.js";
import { createSide } from "./judging/side.js";
import { foldAll, highlight, reveal } from "./viewer/thread.js";

const HELP = [
  ["j k ↓ ↑", "next, previous rollout"],
  ["J K n p", "next, previous rollout"],
  ["g G", "best, worst"],
  ["Alt+↑ Alt+↓", "move the rollout up, down in the ranking"],
  ["o", "set a score"],
  ["r", "enter a reason"],
  ["u", "remove your score"],
  ["e x", "expand, collapse the conversation"],
  ["c l", "compare with the next rollout"],
  ["h l", "left, right rollout"],
  ["s", "show, hide the common messages"],
  ["f", "hide, show the side pane"],
  ["/", "search; Enter goes to the next match"],
  ["b", "start blind judging, reveal"],
  ["[ ]", "previous, next group"],
  ["?", "this help"],
  ["Esc", "back"],
];

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  const ui = { key: null, wide: false, ...model.get("ui") };
  const app = /** @type {any} */ ({
    root,
    wire,
    model,
    state: { rows: [], opinions: [], blind: false, version: 0 },
    announce: announcer(root),
  });
  let beside = /** @type {number[]} */ ([]),
    active = 0,
    saving = 0;
  app.keep = (change) => {
    if (Object.keys(change).every((name) => ui[name] === change[name])) return;
    Object.assign(ui, change);
    clearTimeout(saving);
    saving = setTimeout(() => {
      model.set("ui", { ...ui });
      model.save_changes();
    }, 250);
  };

  // elements ------------------------------------------------------------------------------------------------------------------

  const button = (label, title, onclick, more = {}) => h("button.button", { title, onclick, ...more }, label);
  const title = h("span.j-heading"),
    counts = h("span.muted", { role: "status" });
  const search = h("input.input.j-search", {
    type: "search",
    placeholder: "Search all texts",
    label: "Search all texts",
    spellcheck: false,
    oninput: () => look(),
    onkeydown: searching,
  });
  const hits = h("span.muted", { role: "status" });
  const before = button("‹", "Previous group ([)", () => turn(-1), { label: "Previous group" }),
    next = button("›", "Next group (])", () => turn(1), { label: "Next group" });
  const blind = button("Judge blind", "Hide ids, rewards and judges until you have ranked (b)", () => toggleBlind());
  const pairs = button("Export pairs", "Save the preference pairs of the journal to a file", () => exportPairs());
  const bar = h(
    "div.j-top",
    { role: "toolbar", label: "This group" },
    before,
    next,
    title,
    counts,
    h("span.grow"),
    search,
    hits,
    blind,
    pairs,
    button("Freeze", "Replace this panel with static HTML, which is saved in the notebook", () =>
      wire.request("freeze").catch(() => {}),
    ),
    button("?", "Keys", () => showHelp(), { label: "Keys" }),
  );
  const notes = h("div.j-notes", { role: "status" }),
    said = h("div.j-note", { role: "alert", hidden: true });
  const cards = createCards(app),
    side = createSide(app),
    shared = h("details.j-shared", { hidden: true }),
    panes = h("div.j-panes", { hidden: true });
  const main = h("div.j-main", { tabIndex: -1 }, shared, cards.list, panes);
  const words = h("span", { role: "status" }),
    drop = button("Discard changes", "Return to the judge's scores and to the changes that were applied before", () =>
      change("reset"),
    );
  const apply = button("Apply", "", () => applied(), { class: "art-button art-j-primary" });
  const foot = h("div.j-foot", words, h("span.grow"), drop, apply);
  const help = h("div.j-help", { role: "dialog", label: "Keys", hidden: true, tabIndex: 0 }),
    name = "art-j-found";
  root.classList.add("art-judging");
  root.append(bar, said, notes, h("div.j-columns", main, side.node), foot, help);

  // state ------------------------------------------------------------------------------------------------------------------

  function take(state) {
    if (!state || state.version < app.state.version) return;
    const wish = app.state.version ? null : ui.key,
      other =
        state.at !== app.state.at || state.blind !== app.state.blind || state.rows.length !== app.state.rows.length;
    app.state = state;
    if (other) {
      cards.forget();
      side.forget();
      clear();
      sharedParts();
    }
    draw();
    if (other) side.loadSession();
    if (wish != null && state.rows.some((row) => row.key === wish)) cards.mark(wish);
  }

  /** Send a change to the kernel. Return its reply, or null if the kernel rejected the change. @param {string} command @param {any} [args] */
  async function change(command, args = {}) {
    const inside = root.contains(document.activeElement);
    try {
      const { reply } = await wire.request(command, args);
      said.hidden = true;
      take(reply);
      return reply;
    } catch (error) {
      if (error.name !== "AbortError") complain(error.message);
      app.redraw();
      return null;
    } finally {
      if (inside && !root.contains(document.activeElement)) back(); // the focused element was removed
    }
  }
  app.change = change;
  app.redraw = () => draw();

  async function load() {
    try {
      take((await wire.request("state")).reply);
    } catch (error) {
      complain(error.message);
    }
  }

  function complain(text) {
    said.hidden = false;
    said.className = "art-j-note art-is-bad";
    fill(said, marked(text));
  }

  function inform(...parts) {
    said.hidden = false;
    said.className = "art-j-note art-is-good";
    fill(said, parts);
  }

  // drawing ----------------------------------------------------------------------------------------------------------------

  function draw() {
    const { state } = app;
    fill(title, marked(state.title ?? ""));
    fill(
      counts,
      [
        state.step ? `step ${state.step}` : "",
        `${state.rows.length} rollout${state.rows.length === 1 ? "" : "s"}`,
        state.failed ? `${state.failed} failed` : "",
        state.groups > 1 ? `group ${state.at + 1} of ${state.groups}` : "",
      ]
        .filter(Boolean)
        .join(" · "),
    );
    before.hidden = next.hidden = !(state.groups > 1);
    blind.textContent = state.blind ? "Reveal" : "Judge blind";
    blind.hidden = Boolean(state.person && !state.blind);
    pairs.hidden = Boolean(state.blind || state.person);
    blind.classList.toggle("art-j-primary", Boolean(state.blind));
    root.classList.toggle("art-is-blind", Boolean(state.blind));
    drawNotes(state);
    cards.draw(state);
    side.draw(state);
    drawFoot(state);
    if (beside.length) drawBeside();
    look();
  }

  function drawNotes(state) {
    const note = (kind, ...parts) => h("div", { class: `art-j-note ${kind}` }, parts),
      one = state.opinions[state.using];
    const missing = state.blind || state.person ? 0 : state.unscored,
      speaking = state.rows.filter((row) => row.flags.length).map((row) => row.label);
    fill(
      notes,
      state.trained
        ? note(
            "art-is-trained",
            marked(state.trained),
            " Its rewards stay the same. Your changes are only written to the journal.",
          )
        : null,
      state.opinions
        .filter((each) => each.failure)
        .map((each) => note("art-is-bad", h("b", marked(each.judge)), " failed: ", marked(each.failure))),
      missing
        ? note(
            "art-is-bad",
            `${missing} of ${state.rows.length} rollouts have no score. Set their scores, or they are removed from the group when you apply.`,
          )
        : null,
      !state.blind && !state.person && state.rows.length > 1 && state.variance === false
        ? note("art-is-warn", "All scores are equal. The advantages are 0, so training learns nothing from this group.")
        : null,
      one?.bias?.warning
        ? note(
            "art-is-warn",
            marked(`${one.judge}: ${one.bias.warning}.`),
            " Use several repeats in shuffled order, or another judge.",
          )
        : null,
      speaking.length
        ? note(
            "art-is-warn",
            `Text addressed to the judge: ${speaking.join(", ")}. Check these rollouts before you trust their scores.`,
          )
        : null,
      state.blind
        ? note(
            "",
            "Blind judging: IDs, rewards and judges are hidden. Rank the rollouts from best to worst, then press Reveal.",
          )
        : null,
    );
  }

  function drawFoot(state) {
    const { drafts = 0, waiting } = state,
      trained = Boolean(state.trained);
    drop.hidden = !drafts;
    drop.textContent = state.blind ? "Shuffle again" : "Discard changes";
    apply.hidden = Boolean(state.blind) || !state.rows.length || (trained && !drafts);
    apply.disabled = !waiting;
    apply.textContent = state.person ? "Submit" : trained ? "Write to the journal" : "Apply to the rewards";
    apply.title = trained
      ? "The group was already trained, so only the journal changes"
      : `Write the scores to the journal (${state.journal}) and to the rewards of the group`;
    fill(
      words,
      state.blind
        ? `${state.placed ?? 0} of ${state.rows.length} ranked by you`
        : state.person
          ? state.delivered
            ? "Submitted."
            : ""
          : drafts
            ? [
                h("b", `${drafts} change${drafts === 1 ? "" : "s"}`),
                " not applied",
                state.changed ? muted(` · different from the judge: ${state.changed}`) : null,
              ]
            : waiting
              ? "The scores have not been applied to the rewards."
              : trained
                ? muted("Changes are written to the journal.")
                : state.rows.length
                  ? muted("The scores have been applied to the rewards.")
                  : muted("Questions for you will appear here."),
    );
  }

  // common messages ---------------------------------------------------------------------------------------------------------

  async function sharedParts() {
    shared.hidden = true;
    shared.open = false;
    if (!app.state.rows.length) return;
    try {
      const { reply } = await wire.request("texts", { key: -1 });
      const n = reply.messages.length;
      shared.hidden = !n;
      const body = h("div.j-said");
      fill(
        shared,
        h(
          "summary",
          `The first ${n === 1 ? "message is" : `${n}${reply.parts > 1 ? " and more" : ""} messages are`} the same.`,
          muted(" Shown once."),
        ),
        body,
      );
      shared.ontoggle = () => {
        if (shared.open && !body.firstChild) body.append(reading(app, -1));
      };
    } catch (error) {
      if (error.name !== "AbortError") complain(error.message);
    }
  }

  // two side by side -------------------------------------------------------------------------------------------------------

  function drawBeside() {
    const rows = beside.map((key) => app.state.rows.find((row) => row.key === key));
    if (rows.some((row) => !row)) return leave();
    rows.forEach((row, n) => {
      const pane = panes.children[n],
        other = rows[1 - n];
      fill(
        pane.firstChild,
        h("b", `${row.rank}. ${row.label}`),
        row.score == null ? null : h("span", { title: "score" }, num(row.score)),
        row.after == null || app.state.person ? null : h("span.muted", { title: "advantage" }, `A ${plus(row.after)}`),
        h("span.grow"),
        row.rank < other.rank
          ? muted("ranked above")
          : button("Rank this one higher", `Rank ${row.label} above ${other.label}`, () =>
              change("move", { key: row.key, to: other.rank - 1 }),
            ),
      );
      pane.classList.toggle("art-is-active", n === active);
      pane.querySelector(".art-j-because").replaceChildren(marked(row.explanation ?? ""));
    });
  }

  /** Show two rollouts side by side. @param {number[]} wanted keys */
  function besides(wanted) {
    beside = wanted;
    active = 0;
    root.classList.add("art-is-beside");
    panes.hidden = false;
    fill(
      panes,
      beside.map((key) =>
        h(
          "section.j-pane",
          { tabIndex: 0, label: `Rollout ${app.state.rows.find((row) => row.key === key)?.label ?? ""}` },
          h("header.j-pane-head"),
          h("p.j-because"),
          reading(app, key),
        ),
      ),
    );
    [...panes.children].forEach((pane, n) =>
      pane.addEventListener("focusin", () => {
        active = n;
        cards.mark(beside[n]);
        panes.querySelectorAll(".art-j-pane").forEach((one, i) => one.classList.toggle("art-is-active", i === n));
      }),
    );
    drawBeside();
    panes.children[0].focus({ preventScroll: true });
  }
  app.besides = besides;

  function compareHere() {
    if (beside.length) return leave();
    const { rows } = app.state,
      at = cards.place();
    if (rows.length < 2) return;
    besides([at, at + 1 < rows.length ? at + 1 : at - 1].sort((x, y) => x - y).map((n) => rows[n].key));
  }

  function clear() {
    beside = [];
    panes.hidden = true;
    panes.replaceChildren();
    root.classList.remove("art-is-beside");
  }
  const leave = () => {
    clear();
    cards.focus();
  };

  function pane(by) {
    if (!beside.length) return by > 0 ? compareHere() : false;
    panes.children[Math.max(0, Math.min(1, active + by))].focus();
  }

  // actions ---------------------------------------------------------------------------------------------------

  async function toggleBlind() {
    if (await change(app.state.blind ? "reveal" : "hide")) {
      app.announce(app.state.blind ? "judging blind" : "revealed");
      cards.focus();
    }
  }

  async function applied() {
    const reply = await change("apply");
    if (!reply) return;
    inform(marked(reply.said ?? ""));
    side.loadSession();
    cards.focus();
  }

  async function exportPairs() {
    try {
      const { reply } = await wire.request("export");
      inform(
        `${reply.pairs} preference pair${reply.pairs === 1 ? "" : "s"} in `,
        h("span.mono", marked(reply.path)),
        ", in the directory of the notebook.",
      );
    } catch (error) {
      complain(error.message);
    }
  }

  const turn = (by) => {
    const { at = 0, groups = 1 } = app.state;
    if (at + by >= 0 && at + by < groups) change("turn_to", { at: at + by });
  };

  let ranges = /** @type {Range[]} */ ([]),
    hit = -1;
  /** Highlight the search text in all conversations. */
  function look() {
    const query = search.value.trim();
    ranges = highlight(main, query, name);
    hits.textContent = query ? `${ranges.length}` : "";
    hits.title = query ? "matches" : "";
  }
  app.found = () => {
    if (search.value.trim()) look();
  };

  function searching(event) {
    if (event.key === "Escape") {
      search.value = "";
      look();
      cards.focus();
    }
    if (event.key === "Enter") {
      reveal(main, search.value.trim().toLowerCase());
      look();
      if (!ranges.length) return;
      hit = (hit + (event.shiftKey ? ranges.length - 1 : 1)) % ranges.length;
      const node = /** @type {any} */ (ranges[hit].startContainer).parentElement,
        article = node.closest(".art-j-card");
      article?.classList.add("art-is-open");
      node.scrollIntoView({ block: "center" });
      if (article) cards.mark(Number(article.dataset.key));
    }
  }

  function showHelp() {
    help.hidden = !help.hidden;
    if (help.hidden) return back();
    fill(
      help,
      h("b", "Keys"),
      h(
        "dl",
        HELP.map(([sign, text]) => [
          h(
            "dt",
            sign.split(" ").map((one) => h("kbd.kbd", one)),
          ),
          h("dd", text),
        ]),
      ),
      muted("Scores are between 0 and 1. A rollout that you drag gets the score halfway between its neighbors."),
    );
    help.focus();
  }

  /** Focus the current pane or card, where the keys work. */
  function back() {
    if (beside.length) panes.children[active].focus({ preventScroll: true });
    else cards.focus();
  }
  app.back = back;

  function escape() {
    if (!help.hidden) showHelp();
    else if (beside.length) leave();
    else cards.focus();
  }

  const wide = () => {
    app.keep({ wide: !ui.wide });
    root.classList.toggle("art-is-wide", ui.wide);
  };
  const unfold = (open) => (beside.length ? foldAll(panes, open) : cards.unfold(open));
  const go = (by) => () => (beside.length ? false : cards.go(cards.place() + by));
  const [down, up] = [go(1), go(-1)];
  const stop = keys(root, {
    j: down,
    n: down,
    J: down,
    ArrowDown: down,
    k: up,
    p: up,
    K: up,
    ArrowUp: up,
    g: () => cards.go(0),
    G: () => cards.go(app.state.rows.length - 1),
    "Alt+ArrowUp": () => cards.shift(-1),
    "Alt+ArrowDown": () => cards.shift(1),
    o: () => (leaveFor(), cards.field("number")),
    r: () => (leaveFor(), cards.field("why")),
    u: () => {
      if (cards.row?.by_hand) change("override", { key: cards.key, score: null });
    },
    e: () => unfold(true),
    x: () => unfold(false),
    c: () => compareHere(),
    h: () => pane(-1),
    l: () => pane(1),
    s: () => {
      shared.open = !shared.open;
    },
    f: wide,
    "/": () => search.focus(),
    b: () => toggleBlind(),
    "[": () => turn(-1),
    "]": () => turn(1),
    "?": () => showHelp(),
    Escape: escape,
  });
  const leaveFor = () => {
    if (beside.length) leave();
  };

  wire.onTick((tick) => {
    if (tick.version > app.state.version) load();
  });
  wire.onGap(() => load());
  root.classList.toggle("art-is-wide", Boolean(ui.wide));
  load();
  return () => {
    stop();
    clearTimeout(saving);
    CSS.highlights?.delete(name);
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
