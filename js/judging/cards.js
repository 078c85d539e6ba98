// The ranked rollouts of a group: score, reason, and the part of the conversation that differs from the other rollouts.
import { fill, h, iconButton, marked, muted, num } from "../panel.js";
import { foldAll, joinPieces, thread } from "../viewer/thread.js";

const SCROLL_MARGIN_PX = 14; // distance from the edge in pixels at which dragging scrolls

/** Format a number with its sign. @param {number|null} value */
export const formatSigned = (value) => (value == null ? "–" : `${value > 0 ? "+" : ""}${num(value, 3)}`);

/** Show a conversation in parts, with a button that loads the next part. @param {any} app @param {number} key */
export function conversation(app, key) {
  const body = h("div.j-said"),
    messages = /** @type {any[]} */ ([]);
  let sharedChars = null;

  async function load(part) {
    try {
      const { reply } = await app.wire.request("texts", { key, part });
      messages.push(...reply.messages);
      sharedChars = part === 0 && reply.shared_chars ? reply.shared_chars : sharedChars;
      const joinedMessages = joinPieces(messages);
      fill(
        body,
        joinedMessages.length
          ? thread(joinedMessages, { sharedChars })
          : muted(key < 0 ? "No messages." : "This rollout ends with the common messages."),
        reply.part + 1 < reply.parts ? h("button.more", { onclick: () => load(part + 1) }, "Load more") : null,
      );
      app.onTextLoaded();
    } catch (error) {
      fill(body, muted(error.message));
    }
  }

  load(0);
  return body;
}

/** Draw the score as a bar, with marks for the judge's score and for each of its rounds. @param {any} row @param {string} scorer */
function scoreBar(row, scorer) {
  const percent = (score) => `${(100 * score).toFixed(1)}%`;
  return h(
    "span.j-bar",
    {
      role: "img",
      label:
        row.score == null
          ? "no score"
          : `score ${num(row.score)}${row.by_hand && row.judge != null ? `, ${scorer} ${num(row.judge)}` : ""}`,
    },
    row.score == null
      ? null
      : h("i.j-fill", {
          class: `art-j-fill${row.by_hand ? " art-is-mine" : ""}`,
          style: { width: percent(row.score) },
        }),
    (row.rounds ?? []).map((score, n) =>
      score == null ? null : h("i.j-dot", { style: { left: percent(score) }, title: `round ${n + 1}: ${num(score)}` }),
    ),
    row.by_hand && row.judge != null
      ? h("i.j-tick", { style: { left: percent(row.judge) }, title: `${scorer}: ${num(row.judge)}` })
      : null,
  );
}

const isChanged = (row) => row.before !== row.after;

/** Draw the advantages before and after the changes as bars from the middle. @param {any} row @param {number} largest */
function advantageBars(row, largest) {
  const side = (value, kind) =>
    value == null
      ? null
      : h("i", {
          class: `art-j-push ${kind} ${value < 0 ? "art-is-down" : "art-is-up"}`,
          style: { width: `${(50 * Math.abs(value)) / largest}%`, [value < 0 ? "right" : "left"]: "50%" },
        });
  return h(
    "span.j-pushes",
    { role: "presentation" },
    isChanged(row) ? side(row.before, "art-is-before") : null,
    side(row.after, "art-is-after"),
  );
}

/** @param {any} app state, wire and actions of the panel */
export function createCards(app) {
  const list = h("ol.j-list", { label: "Rollouts, best first" }),
    cards = /** @type {Map<number, any>} */ (new Map());
  const openReasons = new Set(); // keys of rollouts whose reason field was opened before the score was changed
  let current = -1,
    pendingMove = Promise.resolve();

  /** Create a card and load its conversation. @param {number} key */
  function createCard(key) {
    const grip = h("button.j-grip", { onpointerdown: (event) => drag(event, key), tabIndex: -1 }, "⠿"),
      rank = h("span.j-rank");
    const expandButton = h(
      "button.j-grip.j-larger",
      {
        onclick: () => {
          mark(key);
          unfold(!article.classList.contains("art-is-open"));
        },
        tabIndex: -1,
        label: "Show the whole conversation",
        title: "Show the whole conversation (e, x)",
      },
      "⤢",
    );
    const verdict = h("div.j-verdict"),
      body = h("div.j-text", { tabIndex: 0, role: "region" });
    const article = h(
      "article.j-card",
      { tabIndex: -1, "data-key": String(key), onfocusin: () => mark(key) },
      h("div.j-rail", rank, grip, expandButton),
      verdict,
      body,
    );
    const card = { key, node: h("li", article), article, grip, rank, verdict, body, row: null };
    body.append(conversation(app, key));
    return card;
  }

  /** Draw a state. Cards are reused, their verdicts are redrawn, and the cards are sorted. @param {any} state */
  function draw(state) {
    const keys = new Set(state.rows.map((row) => row.key)),
      largest = Math.max(
        1e-9,
        ...state.rows.flatMap((row) => [row.before, row.after]).map((value) => Math.abs(value ?? 0)),
      );
    for (const key of [...cards.keys()]) if (!keys.has(key)) cards.delete(key);
    const focused = /** @type {any} */ (document.activeElement),
      before = new Map([...cards].map(([key, card]) => [key, card.node.offsetTop]));
    for (const row of state.rows) {
      if (!cards.has(row.key)) cards.set(row.key, createCard(row.key));
      update(cards.get(row.key), row, state, largest, focused);
    }
    const sortedNodes = state.rows.map((row) => cards.get(row.key).node);
    if (sortedNodes.length !== list.children.length || sortedNodes.some((node, n) => list.children[n] !== node)) {
      sortCards(sortedNodes);
      animateMoves(before);
    }
    if (!cards.has(current)) current = state.rows[0]?.key ?? 0;
    mark(current);
  }

  /** Sort the cards without moving the card that has the focus. @param {HTMLElement[]} sortedNodes */
  function sortCards(sortedNodes) {
    const focusedIndex = sortedNodes.findIndex(
      (node) => node.parentNode === list && node.contains(document.activeElement),
    );
    if (focusedIndex < 0) return list.replaceChildren(...sortedNodes);
    for (const node of [...list.children]) if (!sortedNodes.includes(node)) node.remove();
    sortedNodes[focusedIndex].before(...sortedNodes.slice(0, focusedIndex));
    sortedNodes[focusedIndex].after(...sortedNodes.slice(focusedIndex + 1));
  }

  /** Animate the cards that changed their position. @param {Map<number, number>} before */
  function animateMoves(before) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const [key, card] of cards) {
      const offset = (before.get(key) ?? card.node.offsetTop) - card.node.offsetTop;
      if (offset)
        card.node.animate?.([{ transform: `translateY(${offset}px)` }, { transform: "none" }], {
          duration: 160,
          easing: "ease-out",
        });
    }
  }

  function update(card, row, state, largest, focused) {
    card.row = row;
    card.article.setAttribute(
      "aria-label",
      `Rank ${row.rank}, rollout ${row.label}${row.score == null ? "" : `, score ${num(row.score)}`}`,
    );
    card.body.setAttribute("aria-label", `Conversation of rollout ${row.label}`);
    card.grip.setAttribute("aria-label", `Move rollout ${row.label}: drag it, or press Alt and an arrow key`);
    card.grip.title = "Drag, or Alt+↑ Alt+↓";
    card.rank.textContent = String(row.rank);
    const fieldName = card.verdict.contains(focused) ? focused.dataset.field : null,
      typedText = fieldName && focused.value !== focused.dataset.was ? focused.value : null;
    fill(card.verdict, verdict(row, state, largest));
    const field = fieldName ? card.verdict.querySelector(`[data-field=${fieldName}]`) : null;
    if (field && typedText != null) field.value = typedText;
    field?.focus({ preventScroll: true });
  }

  const badge = (text, kind = "", title = "") => h("span", { class: `art-badge ${kind}`, title }, text);

  /** Create the left half of a card: the score and the reasons. */
  function verdict(row, state, largest) {
    const { key } = row,
      unscored = !state.blind && row.judge == null;
    const score = row.score == null ? "" : String(+row.score.toFixed(3));
    const number = h("input.input.j-number", {
      type: "number",
      min: "0",
      max: "1",
      step: "0.01",
      label: `Score of rollout ${row.label}`,
      placeholder: "–",
      value: score,
    });
    sendOnChange(number, "number", (value) =>
      app.change("override", { key, score: value === "" ? null : Number(value) }),
    );
    const why = h("input.input.j-why", {
      type: "text",
      maxLength: 4000,
      value: row.reason,
      label: `Reason for the score of rollout ${row.label}`,
      placeholder: "Reason (saved in the journal)",
      title: `Saved in ${state.journal}`,
    });
    sendOnChange(why, "why", (reason) => {
      openReasons.delete(key);
      app.change("reason", { key, reason });
    });
    const undo = row.by_hand
      ? iconButton("↺", `Remove your score of rollout ${row.label} (u)`, () =>
          app.change("override", { key, score: null }),
        )
      : null;
    if (undo) undo.dataset.field = "undo";
    return [
      h(
        "div.j-line",
        h("strong.j-name", row.label),
        row.by_hand && !state.blind ? badge(row.draft ? "yours, not applied" : "yours", "art-j-mine") : null,
        state.blind && row.by_hand ? badge("ranked", "art-j-mine") : null,
        unscored && !state.person ? badge("unscored", "art-is-bad", row.problem) : null,
        row.flags.length ? badge("addresses the judge", "art-is-warn", row.flags.join("\n")) : null,
        row.spread > 0.15
          ? badge(`unsteady ±${num(row.spread, 2)}`, "art-is-warn", "the judge's scores differ between rounds")
          : null,
      ),
      h("div.j-line", number, state.blind ? null : scoreBar(row, state.scorer), undo),
      state.blind || !row.by_hand || row.judge == null
        ? null
        : h("div.j-line.muted", `${state.scorer} ${num(row.judge)} · rank ${num(row.judge_rank)}`),
      state.blind || state.person
        ? null
        : h(
            "div.j-line",
            h(
              "span.j-adv",
              { title: "How much better than its group. Without → with your changes" },
              "advantage ",
              row.by_hand || isChanged(row)
                ? [muted(formatSigned(row.before)), " → ", h("b", formatSigned(row.after))]
                : h("b", formatSigned(row.after)),
            ),
            advantageBars(row, largest),
          ),
      row.explanation ? h("p.j-because.text", marked(row.explanation)) : null,
      row.problem ? h("p.j-problem", marked(row.problem)) : null,
      row.flags.map((flag) => h("p.j-flag", marked(flag))),
      row.by_hand || openReasons.has(key) ? why : null,
    ];
  }

  /** Send the value of a field on Enter or when it loses the focus; restore the old value on Escape. @param {any} input */
  function sendOnChange(input, name, send) {
    let last = input.value;
    Object.assign(input.dataset, { field: name, was: last });
    const commit = () => {
      if (input.value !== last && input.checkValidity()) send((last = input.value));
      else if (!input.checkValidity()) input.setAttribute("aria-invalid", "true");
    };
    input.addEventListener("change", commit);
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Escape") input.value = last;
      else commit();
      if (input.checkValidity()) focus();
    });
  }

  // current card ------------------------------------------------------------------------------------------------------

  function mark(key) {
    current = key;
    for (const card of cards.values()) {
      const isCurrent = card.key === key;
      card.article.classList.toggle("art-is-current", isCurrent);
      card.article.tabIndex = isCurrent ? 0 : -1;
      if (isCurrent) card.article.setAttribute("aria-current", "true");
      else card.article.removeAttribute("aria-current");
    }
    app.saveUi({ key });
  }

  const currentIndex = () => app.state.rows.findIndex((row) => row.key === current);

  function focus() {
    const card = cards.get(current);
    card?.article.focus({ preventScroll: true });
    card?.article.scrollIntoView({ block: "nearest" });
  }

  /** Go to another card. @param {number} to its index */
  function go(to) {
    const { rows } = app.state;
    if (!rows.length) return;
    mark(rows[Math.max(0, Math.min(rows.length - 1, to))].key);
    focus();
  }

  /** Move the current card by a number of places. A second key press waits until the first move is done. @param {number} offset */
  function moveBy(offset) {
    pendingMove = pendingMove.then(() => move(currentIndex() + offset));
  }

  /** @param {number} to its new index */
  async function move(to) {
    const from = currentIndex(),
      key = current;
    if (to < 0 || to >= app.state.rows.length || to === from) return;
    await app.change("move", { key, to });
    focus();
    const row = app.state.rows.find((entry) => entry.key === key);
    if (row)
      app.announce(
        `rollout ${row.label} now has rank ${row.rank}${row.score == null ? "" : `, score ${num(row.score)}`}`,
      );
  }

  // dragging -----------------------------------------------------------------------------------------------------------------

  /** @param {PointerEvent} event @param {number} key */
  function drag(event, key) {
    if (event.button !== 0) return;
    event.preventDefault();
    mark(key);
    const { grip, article } = cards.get(key),
      main = list.parentElement,
      scroller = main.scrollHeight > main.clientHeight ? main : main.parentElement;
    let to = currentIndex();
    const start = to,
      otherCards = app.state.rows.filter((row) => row.key !== key).map((row) => cards.get(row.key));
    const clearMarks = () =>
      list.querySelectorAll(".art-j-drop").forEach((node) => node.classList.remove("art-j-drop", "art-j-drop-after"));
    const onMove = (/** @type {PointerEvent} */ move) => {
      const scrollBox = scroller.getBoundingClientRect();
      if (move.clientY < scrollBox.top + SCROLL_MARGIN_PX) scroller.scrollBy(0, -SCROLL_MARGIN_PX);
      if (move.clientY > scrollBox.bottom - SCROLL_MARGIN_PX) scroller.scrollBy(0, SCROLL_MARGIN_PX);
      to = otherCards.filter((card) => {
        const { top, height } = card.node.getBoundingClientRect();
        return move.clientY > top + height / 2;
      }).length;
      clearMarks();
      if (to !== start) {
        const target = otherCards[Math.min(to, otherCards.length - 1)].node;
        target.classList.add("art-j-drop");
        target.classList.toggle("art-j-drop-after", to === otherCards.length);
      }
    };
    const endDrag = (isDropped) => {
      clearMarks();
      article.classList.remove("art-is-dragged");
      grip.removeEventListener("pointermove", onMove);
      grip.onpointerup = grip.onpointercancel = null;
      window.removeEventListener("keydown", cancel, true);
      if (isDropped) move(to);
    };
    const cancel = (/** @type {KeyboardEvent} */ keyEvent) => {
      if (keyEvent.key === "Escape") {
        keyEvent.stopPropagation();
        endDrag(false);
      }
    };
    grip.setPointerCapture(event.pointerId);
    article.classList.add("art-is-dragged");
    grip.addEventListener("pointermove", onMove);
    grip.onpointerup = () => endDrag(true);
    grip.onpointercancel = () => endDrag(false);
    window.addEventListener("keydown", cancel, true);
  }

  // conversation and fields ------------------------------------------------------------------------------------------------------------------

  /** Open or close the conversation of the current card. @param {boolean} open */
  function unfold(open) {
    const card = cards.get(current);
    if (!card) return;
    card.article.classList.toggle("art-is-open", open);
    foldAll(card.body, open);
    card.article.scrollIntoView({ block: "nearest" });
  }

  /** Go to a field of the current card. @param {string} name */
  function field(name) {
    const card = cards.get(current);
    if (name === "why" && card && !card.verdict.querySelector("[data-field=why]")) {
      openReasons.add(current);
      app.redraw();
    }
    const input = card?.verdict.querySelector(`[data-field=${name}]`);
    input?.focus();
    input?.select();
  }

  return {
    list,
    draw,
    go,
    moveBy,
    mark,
    focus,
    unfold,
    field,
    currentIndex,
    forget: () => {
      cards.clear();
      openReasons.clear();
      list.replaceChildren();
      current = -1;
    },
    get key() {
      return current;
    },
    get row() {
      return app.state.rows[currentIndex()];
    },
  };
}
