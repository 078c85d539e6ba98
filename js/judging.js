// The judging panel: a ranked group, the judge's reasons, human scores, and their effect on the advantages.
import { announcer, fill, freezeButton, h, initialize, keys, marked, mount, muted, num, plural } from "./panel.js";
import { conversation, createCards, formatSigned } from "./judging/cards.js";
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
  let sideBySide = /** @type {number[]} */ ([]),
    active = 0,
    saveTimer = 0;
  app.saveUi = (change) => {
    if (Object.keys(change).every((name) => ui[name] === change[name])) return;
    Object.assign(ui, change);
    clearTimeout(saveTimer);
    saveTimer = setTimeout(() => {
      model.set("ui", { ...ui });
      model.save_changes();
    }, 250);
  };

  // elements ------------------------------------------------------------------------------------------------------------------

  const button = (label, title, onclick, more = {}) => h("button.button", { title, onclick, ...more }, label);
  const title = h("span.j-heading"),
    counts = h("span.muted", { role: "status" });
  const searchInput = h("input.input.j-search", {
    type: "search",
    placeholder: "Search all texts",
    label: "Search all texts",
    spellcheck: false,
    oninput: () => highlightMatches(),
    onkeydown: onSearchKey,
  });
  const matchCount = h("span.muted", { role: "status" });
  const previousButton = button("‹", "Previous group ([)", () => switchGroup(-1), { label: "Previous group" }),
    nextButton = button("›", "Next group (])", () => switchGroup(1), { label: "Next group" });
  const blindButton = button("Judge blind", "Hide ids, rewards and judges until you have ranked (b)", () =>
    toggleBlind(),
  );
  const exportButton = button("Export pairs", "Save the preference pairs of the journal to a file", () =>
    exportPairs(),
  );
  const bar = h(
    "div.j-top",
    { role: "toolbar", label: "This group" },
    previousButton,
    nextButton,
    title,
    counts,
    h("span.grow"),
    searchInput,
    matchCount,
    blindButton,
    exportButton,
    freezeButton(wire),
    button("?", "Keys", () => showHelp(), { label: "Keys" }),
  );
  const notes = h("div.j-notes", { role: "status" }),
    message = h("div.j-note", { role: "alert", hidden: true });
  const cards = createCards(app),
    side = createSide(app),
    shared = h("details.j-shared", { hidden: true }),
    panes = h("div.j-panes", { hidden: true });
  const main = h("div.j-main", { tabIndex: -1 }, shared, cards.list, panes);
  const status = h("span", { role: "status" }),
    discardButton = button("Discard changes", "Discard the changes that were not applied", () => sendChange("reset"));
  const applyButton = button("Apply", "", () => applyScores(), { class: "art-button art-j-primary" });
  const footer = h("div.j-foot", status, h("span.grow"), discardButton, applyButton);
  const help = h("div.j-help", { role: "dialog", label: "Keys", hidden: true, tabIndex: 0 }),
    highlightName = "art-j-found";
  root.classList.add("art-judging");
  root.append(bar, message, notes, h("div.j-columns", main, side.node), footer, help);

  // state ------------------------------------------------------------------------------------------------------------------

  function applyState(state) {
    if (!state || state.version < app.state.version) return;
    const savedKey = app.state.version ? null : ui.key,
      isNewGroup =
        state.at !== app.state.at || state.blind !== app.state.blind || state.rows.length !== app.state.rows.length;
    app.state = state;
    if (isNewGroup) {
      cards.forget();
      side.forget();
      closePanes();
      loadShared();
    }
    draw();
    if (isNewGroup) side.loadSession();
    if (savedKey != null && state.rows.some((row) => row.key === savedKey)) cards.mark(savedKey);
  }

  /** Send a change to the kernel. Return its reply, or null if the kernel rejected the change. @param {string} command @param {any} [args] */
  async function sendChange(command, args = {}) {
    const hadFocus = root.contains(document.activeElement);
    try {
      const { reply } = await wire.request(command, args);
      message.hidden = true;
      applyState(reply);
      return reply;
    } catch (error) {
      if (error.name !== "AbortError") showError(error.message);
      app.redraw();
      return null;
    } finally {
      if (hadFocus && !root.contains(document.activeElement)) focusCurrent(); // the focused element was removed
    }
  }
  app.change = sendChange;
  app.redraw = () => draw();

  async function load() {
    try {
      applyState((await wire.request("state")).reply);
    } catch (error) {
      showError(error.message);
    }
  }

  function showError(text) {
    message.hidden = false;
    message.className = "art-j-note art-is-bad";
    fill(message, marked(text));
  }

  function showMessage(...parts) {
    message.hidden = false;
    message.className = "art-j-note art-is-good";
    fill(message, parts);
  }

  // drawing ----------------------------------------------------------------------------------------------------------------

  function draw() {
    const { state } = app;
    fill(title, marked(state.title ?? ""));
    fill(
      counts,
      [
        state.step ? `step ${state.step}` : "",
        plural(state.rows.length, "rollout"),
        state.failed ? `${state.failed} failed` : "",
        state.groups > 1 ? `group ${state.at + 1} of ${state.groups}` : "",
      ]
        .filter(Boolean)
        .join(" · "),
    );
    previousButton.hidden = nextButton.hidden = !(state.groups > 1);
    blindButton.textContent = state.blind ? "Reveal" : "Judge blind";
    blindButton.hidden = Boolean(state.person && !state.blind);
    exportButton.hidden = Boolean(state.blind || state.person);
    blindButton.classList.toggle("art-j-primary", Boolean(state.blind));
    root.classList.toggle("art-is-blind", Boolean(state.blind));
    drawNotes(state);
    cards.draw(state);
    side.draw(state);
    drawFoot(state);
    if (sideBySide.length) drawBeside();
    highlightMatches();
  }

  function drawNotes(state) {
    const note = (kind, ...parts) => h("div", { class: `art-j-note ${kind}` }, parts),
      ranking = state.opinions[state.using];
    const unscored = state.blind || state.person ? 0 : state.unscored,
      flagged = state.rows.filter((row) => row.flags.length).map((row) => row.label);
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
        .filter((entry) => entry.failure)
        .map((entry) => note("art-is-bad", h("b", marked(entry.judge)), " failed: ", marked(entry.failure))),
      unscored
        ? note(
            "art-is-bad",
            `${unscored} of ${state.rows.length} rollouts have no score. Set their scores, or they are removed from the group when you apply.`,
          )
        : null,
      !state.blind && !state.person && state.rows.length > 1 && state.variance === false
        ? note("art-is-warn", "All scores are equal. The advantages are 0, so training learns nothing from this group.")
        : null,
      ranking?.bias?.warning
        ? note(
            "art-is-warn",
            marked(`${ranking.judge}: ${ranking.bias.warning}.`),
            " Use several repeats in shuffled order, or another judge.",
          )
        : null,
      flagged.length
        ? note(
            "art-is-warn",
            `Text addressed to the judge: ${flagged.join(", ")}. Check these rollouts before you trust their scores.`,
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
    const { drafts = 0, waiting, scorer } = state,
      isTrained = Boolean(state.trained);
    discardButton.hidden = !drafts;
    discardButton.textContent = state.blind ? "Shuffle again" : "Discard changes";
    applyButton.hidden = Boolean(state.blind) || !state.rows.length || (isTrained && !drafts);
    applyButton.disabled = !waiting;
    applyButton.textContent = state.person ? "Submit" : isTrained ? "Write to the journal" : "Apply to the rewards";
    applyButton.title = isTrained
      ? `The group was already trained, so only the journal (${state.journal}) changes`
      : `Write the scores to the journal (${state.journal}) and to the rewards of the group`;
    fill(
      status,
      state.blind
        ? `${state.placed ?? 0} of ${state.rows.length} ranked by you`
        : state.person
          ? state.delivered
            ? "Submitted."
            : ""
          : drafts
            ? [
                h("b", plural(drafts, "change")),
                " not applied",
                state.changed
                  ? muted(` · compared with ${scorer === "judge" ? "the judge" : scorer}: ${state.changed}`)
                  : null,
              ]
            : waiting
              ? "The scores have not been applied to the rewards."
              : isTrained
                ? muted("Changes are written to the journal.")
                : state.rows.length
                  ? muted(
                      scorer === "judge" || state.rows.some((row) => row.by_hand)
                        ? "The scores have been applied to the rewards."
                        : "The rewards are those that the rollouts set.",
                    )
                  : muted("Questions for you will appear here."),
    );
  }

  // common messages ---------------------------------------------------------------------------------------------------------

  async function loadShared() {
    shared.hidden = true;
    shared.open = false;
    if (!app.state.rows.length) return;
    try {
      const { reply } = await wire.request("texts", { key: -1 });
      const count = reply.messages.length;
      shared.hidden = !count;
      const body = h("div.j-said");
      fill(
        shared,
        h(
          "summary",
          `The first ${count === 1 ? "message is" : `${count}${reply.parts > 1 ? " and more" : ""} messages are`} the same.`,
          muted(" Shown once."),
        ),
        body,
      );
      shared.ontoggle = () => {
        if (shared.open && !body.firstChild) body.append(conversation(app, -1));
      };
    } catch (error) {
      if (error.name !== "AbortError") showError(error.message);
    }
  }

  // two side by side -------------------------------------------------------------------------------------------------------

  function drawBeside() {
    const rows = sideBySide.map((key) => app.state.rows.find((row) => row.key === key));
    if (rows.some((row) => !row)) return leaveComparison();
    rows.forEach((row, n) => {
      const pane = panes.children[n],
        other = rows[1 - n];
      fill(
        pane.firstChild,
        h("b", `${row.rank}. ${row.label}`),
        row.score == null ? null : h("span", { title: "score" }, num(row.score)),
        row.after == null || app.state.person ? null : muted(`advantage ${formatSigned(row.after)}`),
        h("span.grow"),
        row.rank < other.rank
          ? muted("ranked above")
          : button("Rank this one higher", `Rank ${row.label} above ${other.label}`, () =>
              sendChange("move", { key: row.key, to: other.rank - 1 }),
            ),
      );
      pane.classList.toggle("art-is-active", n === active);
      pane.querySelector(".art-j-because").replaceChildren(marked(row.explanation ?? ""));
    });
  }

  /** Show two rollouts side by side. @param {number[]} keys */
  function compareTwo(keys) {
    sideBySide = keys;
    active = 0;
    root.classList.add("art-is-beside");
    panes.hidden = false;
    fill(
      panes,
      sideBySide.map((key) =>
        h(
          "section.j-pane",
          { tabIndex: 0, label: `Rollout ${app.state.rows.find((row) => row.key === key)?.label ?? ""}` },
          h("header.j-pane-head"),
          h("p.j-because"),
          conversation(app, key),
        ),
      ),
    );
    [...panes.children].forEach((pane, n) =>
      pane.addEventListener("focusin", () => {
        active = n;
        cards.mark(sideBySide[n]);
        panes
          .querySelectorAll(".art-j-pane")
          .forEach((element, i) => element.classList.toggle("art-is-active", i === n));
      }),
    );
    drawBeside();
    panes.children[0].focus({ preventScroll: true });
  }
  app.compareTwo = compareTwo;

  function compareWithNext() {
    if (sideBySide.length) return leaveComparison();
    const { rows } = app.state,
      index = cards.currentIndex();
    if (rows.length < 2) return;
    compareTwo([index, index + 1 < rows.length ? index + 1 : index - 1].sort((x, y) => x - y).map((n) => rows[n].key));
  }

  function closePanes() {
    sideBySide = [];
    panes.hidden = true;
    panes.replaceChildren();
    root.classList.remove("art-is-beside");
  }
  const leaveComparison = () => {
    closePanes();
    cards.focus();
  };

  function switchPane(offset) {
    if (!sideBySide.length) return offset > 0 ? compareWithNext() : false;
    panes.children[Math.max(0, Math.min(1, active + offset))].focus();
  }

  // actions ---------------------------------------------------------------------------------------------------

  async function toggleBlind() {
    if (await sendChange(app.state.blind ? "reveal" : "hide")) {
      app.announce(app.state.blind ? "judging blind" : "revealed");
      cards.focus();
    }
  }

  async function applyScores() {
    const reply = await sendChange("apply");
    if (!reply) return;
    showMessage(marked(reply.said ?? ""));
    side.loadSession();
    cards.focus();
  }

  async function exportPairs() {
    try {
      const { reply } = await wire.request("export");
      showMessage(
        plural(reply.pairs, "preference pair"),
        " in ",
        h("span.mono", marked(reply.path)),
        ", in the directory of the notebook.",
      );
    } catch (error) {
      showError(error.message);
    }
  }

  const switchGroup = (offset) => {
    const { at: index = 0, groups = 1 } = app.state;
    if (index + offset >= 0 && index + offset < groups) sendChange("turn_to", { at: index + offset });
  };

  let ranges = /** @type {Range[]} */ ([]),
    currentMatch = -1;
  /** Highlight the search text in all conversations. */
  function highlightMatches() {
    const query = searchInput.value.trim();
    ranges = highlight(main, query, highlightName);
    matchCount.textContent = query ? `${ranges.length}` : "";
    matchCount.title = query ? "matches" : "";
  }
  app.onTextLoaded = () => {
    if (searchInput.value.trim()) highlightMatches();
  };

  function onSearchKey(event) {
    if (event.key === "Escape") {
      searchInput.value = "";
      highlightMatches();
      cards.focus();
    }
    if (event.key === "Enter") {
      reveal(main, searchInput.value.trim().toLowerCase());
      highlightMatches();
      if (!ranges.length) return;
      currentMatch = (currentMatch + (event.shiftKey ? ranges.length - 1 : 1)) % ranges.length;
      const node = /** @type {any} */ (ranges[currentMatch].startContainer).parentElement,
        article = node.closest(".art-j-card");
      article?.classList.add("art-is-open");
      node.scrollIntoView({ block: "center" });
      if (article) cards.mark(Number(article.dataset.key));
    }
  }

  function showHelp() {
    help.hidden = !help.hidden;
    if (help.hidden) return focusCurrent();
    fill(
      help,
      h("b", "Keys"),
      h(
        "dl",
        HELP.map(([sign, text]) => [
          h(
            "dt",
            sign.split(" ").map((element) => h("kbd.kbd", element)),
          ),
          h("dd", text),
        ]),
      ),
      muted("Scores are between 0 and 1. A rollout that you drag gets the score halfway between its neighbors."),
    );
    help.focus();
  }

  /** Focus the current pane or card, where the keys work. */
  function focusCurrent() {
    if (sideBySide.length) panes.children[active].focus({ preventScroll: true });
    else cards.focus();
  }
  app.focusCurrent = focusCurrent;

  function onEscape() {
    if (!help.hidden) showHelp();
    else if (sideBySide.length) leaveComparison();
    else cards.focus();
  }

  const toggleWide = () => {
    app.saveUi({ wide: !ui.wide });
    root.classList.toggle("art-is-wide", ui.wide);
  };
  const unfoldText = (open) => (sideBySide.length ? foldAll(panes, open) : cards.unfold(open));
  const goBy = (offset) => () => (sideBySide.length ? false : cards.go(cards.currentIndex() + offset));
  const [down, up] = [goBy(1), goBy(-1)];
  const stopKeys = keys(root, {
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
    "Alt+ArrowUp": () => cards.moveBy(-1),
    "Alt+ArrowDown": () => cards.moveBy(1),
    o: () => (closeComparison(), cards.field("number")),
    r: () => (closeComparison(), cards.field("why")),
    u: () => {
      if (cards.row?.by_hand) sendChange("override", { key: cards.key, score: null });
    },
    e: () => unfoldText(true),
    x: () => unfoldText(false),
    c: () => compareWithNext(),
    h: () => switchPane(-1),
    l: () => switchPane(1),
    s: () => {
      shared.open = !shared.open;
    },
    f: toggleWide,
    "/": () => searchInput.focus(),
    b: () => toggleBlind(),
    "[": () => switchGroup(-1),
    "]": () => switchGroup(1),
    "?": () => showHelp(),
    Escape: onEscape,
  });
  const closeComparison = () => {
    if (sideBySide.length) leaveComparison();
  };

  wire.onTick((tick) => {
    if (tick.version > app.state.version) load();
  });
  wire.onGap(() => load());
  root.classList.toggle("art-is-wide", Boolean(ui.wide));
  load();
  return () => {
    stopKeys();
    clearTimeout(saveTimer);
    CSS.highlights?.delete(highlightName);
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
