// One conversation: its messages, its marks and tags, and the corrections of its replies.
import { clamp, fill, h, iconButton, marked, muted } from "../panel.js";
import { highlight, joinPieces, reveal, thread } from "../viewer/thread.js";
import { createEditor, differenceNode } from "./editor.js";
import { othersOf, ownOf, verdictButtons } from "./verdicts.js";

/** @param {any} app */
export function createReader(app) {
  const { ui, wire } = app;
  let facts = /** @type {any} */ (null),
    turns = /** @type {HTMLElement[]} */ ([]),
    current = -1,
    requests = 0,
    timer = 0,
    opened = ui.id,
    written = Promise.resolve(),
    editor = /** @type {any} */ (null);
  /** Corrections that are not saved, by conversation and reply. @type {Map<string, {content: string, tool_calls: any[]}>} */
  const drafts = new Map();
  /** Keys for the messages of a conversation that is not shown yet. @type {(() => void)[]} */
  let waiting = [];
  const isShown = () => facts?.id === ui.id;
  const whenShown = (act) => (arg) => {
    if (isShown()) act(arg);
    else if (ui.id !== null) waiting.push(() => act(arg));
  };
  /** The controls below each reply, by the number of its message. @type {Map<number, any>} */
  const controls = new Map();

  // head ---------------------------------------------------------------------------------

  const place = h("strong"),
    others = h("span.muted"),
    tags = h("span.cu-tags", { role: "group", label: "Tags" }),
    tagList = h("datalist", { id: `${app.name}-tags` }),
    tagInput = h("input.input.cu-tag-input", {
      label: "Add a tag",
      placeholder: "add a tag (t)",
      maxLength: 60,
      list: `${app.name}-tags`,
    }),
    notes = h("div.cu-notes"),
    marks = verdictButtons(
      "Mark of the conversation",
      (key) => key,
      (verdict, name) => toggle(name),
    );
  tagInput.onkeydown = (event) => {
    if (event.key === "Enter" && tagInput.value.trim()) {
      setTag(ui.id, tagInput.value.trim(), true);
      tagInput.value = "";
    } else if (event.key === "Escape") node.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const head = h(
    "div.cu-head",
    h(
      "div.cu-bar",
      { role: "toolbar", label: "This conversation" },
      place,
      marks.node,
      others,
      tags,
      tagInput,
      tagList,
    ),
    notes,
  );
  const body = h("div.cu-conversation"),
    node = h("div.cu-reader", { tabIndex: 0, role: "region", label: "Conversation" }, body);

  function drawHead() {
    const { id, verdict, marks: statements, duplicates, personal, validation } = facts;
    fill(place, app.list.position());
    marks.update(ownOf(statements, app.state.author));
    fill(
      others,
      verdict === "disputed" ? h("span.badge.is-bad", "disputed") : null,
      marked(othersOf(statements, app.state.author)),
    );
    fill(
      tags,
      facts.tags.map(([tag, authors]) =>
        h(
          "span.badge.cu-tag",
          { title: `by ${authors.join(", ")}` },
          marked(tag),
          authors.includes(app.state.author)
            ? iconButton("✕", `Remove the tag ${tag}`, () => setTag(id, tag, false))
            : null,
        ),
      ),
    );
    fill(
      tagList,
      app.state.tags.map(([tag]) => h("option", { value: tag })),
    );
    fill(
      notes,
      duplicates.length
        ? h(
            "span",
            "Nearly the same: ",
            duplicates.slice(0, 8).map((id) => button(`${id}`, `Open conversation ${id}`, () => app.list.go(id))),
            duplicates.length > 8 ? ` and ${duplicates.length - 8} more` : null,
          )
        : null,
      personal.length
        ? h(
            "span",
            "Personal data? ",
            personal
              .slice(0, 8)
              .map(([kind, text]) => button(`${kind}: ${text}`, "Show it in the conversation", () => find(text))),
            personal.length > 8 ? ` and ${personal.length - 8} more` : null,
          )
        : null,
      validation ? muted("on the validation side") : null,
      facts.unmarked ? null : muted(`SFT trains ${facts.trained.length} of ${Object.keys(facts.turns).length} replies`),
    );
  }
  const button = (label, title, onclick) => h("button.button.cu-small", { title, onclick }, marked(label));

  function find(text) {
    reveal(body, text.toLowerCase());
    const [range] = highlight(body, text, "art-curated");
    const element = range?.startContainer.parentElement;
    element?.scrollIntoView({ block: "center" });
    if (!range)
      app.notify("The text is in a part of the conversation that is not loaded, or it contains invisible characters.");
  }

  // replies ---------------------------------------------------------------------------------

  /** Add the controls below a reply. @param {HTMLElement} article @param {number} i number of the message */
  function addControls(article, i) {
    const { id } = facts;
    for (const badge of article.querySelectorAll(".art-who .art-badge"))
      if (badge.textContent === "given") badge.remove();
    const turnMarks = verdictButtons(
        `Mark of reply ${i}`,
        (key) => `Shift+${key}`,
        (verdict) => mark(id, verdict, i),
      ),
      verdict = h("span.badge"),
      rest = muted(""),
      edits = h("div"),
      form = h("div"),
      draft = muted("not saved");
    const editButton = h("button.button", { title: "Correct this reply (e)", onclick: () => edit(i) }, "Correct");
    article.append(h("div.cu-turn", turnMarks.node, editButton, draft, verdict, rest), edits, form);
    const update = () => {
      const known = facts.turns[i];
      draft.hidden = !drafts.has(`${id} ${i}`);
      if (!known) return;
      turnMarks.update(ownOf(known.marks, app.state.author));
      verdict.hidden = !known.verdict;
      verdict.className = `art-badge ${{ good: "art-is-good", bad: "art-is-bad", fix: "art-is-warn", disputed: "art-is-bad" }[known.verdict] ?? ""}`;
      fill(verdict, known.verdict === "fix" ? "needs fix" : known.verdict);
      fill(rest, marked(othersOf(known.marks, app.state.author)));
      fill(
        edits,
        known.edits.map(([author, parts]) =>
          h(
            "section.cu-correction",
            { label: `Correction by ${author}` },
            h("div.label", "Correction by ", marked(author)),
            differenceNode(parts),
          ),
        ),
      );
    };
    controls.set(i, { update, form, editButton });
    update();
  }

  async function edit(i) {
    const place = controls.get(i);
    if (!place) return;
    closeEditor();
    try {
      const { id } = facts,
        key = `${id} ${i}`,
        { reply } = await wire.request("edited", { id, turn: i });
      if (facts.id !== id || !isShown() || !place.form.isConnected) return;
      closeEditor();
      editor = createEditor(reply, drafts.get(key), {
        close: () => (closeEditor(false), node.focus()),
        async save(content, calls) {
          update((await request("edit", { id, turn: i, content, tool_calls: calls.length ? calls : null })).reply);
          drafts.delete(key);
          if (editor?.key === key) closeEditor(false);
          place.editButton.focus();
          app.announce(content === null ? "correction withdrawn" : "correction saved");
        },
      });
      Object.assign(editor, { key, turn: i, update: place.update });
      place.form.append(editor.node);
      editor.focus();
      editor.node.scrollIntoView({ block: "nearest" });
    } catch (error) {
      app.notify(error.message);
    }
  }
  /** Close the form. A text that is not saved is kept, and the next form of the reply shows it. @param {boolean} [keep] */
  function closeEditor(keep = true) {
    if (!editor) return;
    const { key, node, value, update } = editor,
      draft = keep ? value() : null;
    editor = null;
    node.remove();
    if (draft) drafts.set(key, draft);
    else drafts.delete(key);
    update();
  }

  // writing ---------------------------------------------------------------------------------

  /** Show new facts, if their conversation is still open. @param {any} reply */
  function update(reply) {
    app.written(reply.id);
    if (reply.id !== facts?.id) return;
    facts = reply;
    drawHead();
    for (const { update } of controls.values()) update();
  }
  /** Send a command that writes. Updates that arrive meanwhile are compared with its reply. */
  async function request(command, args) {
    app.writes += 1;
    try {
      const answer = await wire.request(command, args);
      app.version = Math.max(app.version, answer.reply.version);
      return answer;
    } finally {
      app.writes -= 1;
      const tick = app.lastTick;
      app.lastTick = null;
      if (tick) app.follow(tick);
    }
  }
  async function write(id, command, args, text) {
    try {
      update((await request(command, { id, ...args })).reply);
      app.announce(text);
    } catch (error) {
      app.notify(error.message);
    }
  }
  const mark = (id, verdict, turn = null) =>
    write(id, "mark", { verdict, turn }, verdict ? `marked ${verdict}` : "mark withdrawn");
  const setTag = (id, tag, on) => write(id, "tag", { tag, on }, on ? `tag ${tag}` : `tag ${tag} removed`);
  /** Mark a conversation, or withdraw the mark if it is the author's own. The next toggle waits for the reply. */
  function toggle(verdict, turn = null) {
    const { id } = ui;
    if (id === null) return;
    written = written.then(async () => {
      try {
        // The selected conversation may not be shown yet, or no longer.
        const known = facts?.id === id ? facts : (await wire.request("conversation", { id })).reply.facts,
          statements = turn === null ? known.marks : known.turns[turn].marks;
        await mark(id, ownOf(statements, app.state.author) === verdict ? null : verdict, turn);
      } catch (error) {
        app.notify(error.message);
      }
    });
  }

  // reading ---------------------------------------------------------------------------------

  /** Open a conversation. During quick moves, only the last one is loaded. @param {number} id */
  function open(id) {
    if (id !== opened && waiting.length) {
      app.notify(`Conversation ${opened} was not shown yet. The keys for its messages had no effect.`);
      waiting = [];
    }
    opened = id;
    clearTimeout(timer);
    timer = setTimeout(() => read(id), facts ? 30 : 0);
  }

  async function read(id) {
    const request = ++requests;
    try {
      const { reply } = await wire.request("conversation", { id });
      if (request === requests) show(reply);
    } catch (error) {
      if (request !== requests) return;
      waiting = [];
      if (error.name !== "AbortError") app.notify(error.message);
    }
  }

  function show(reply) {
    const { id, messages, parts } = reply,
      all = [...messages];
    let part = 0;
    const isSame = facts?.id === id;
    if (!isSame) closeEditor();
    facts = reply.facts;
    app.version = Math.max(app.version, facts.version);
    const draw = () => {
      const turn = editor?.turn;
      closeEditor();
      controls.clear();
      CSS.highlights?.delete("art-curated");
      const joined = joinPieces(all),
        articles = thread(joined, {}),
        isReply = new Set(joined.filter(({ role }) => role === "assistant").map(({ i }) => String(i)));
      for (const article of articles)
        if (isReply.has(article.dataset.message)) addControls(article, Number(article.dataset.message));
      fill(body, articles, part + 1 < parts && h("button.button", { onclick: loadMore }, "Load more"));
      turns = [...body.querySelectorAll(".art-msg")];
      if (turn !== undefined) edit(turn); // more of the conversation was loaded
    };
    const loadMore = async () => {
      try {
        all.push(...(await wire.request("conversation", { id, part: part + 1 })).reply.messages);
        part += 1;
        draw();
      } catch (error) {
        app.notify(error.message);
      }
    };
    drawHead();
    draw();
    if (isSame) toTurn(current, false);
    else {
      const first = turns.findIndex((turn) => controls.has(Number(turn.dataset.message)));
      node.scrollTop = 0;
      toTurn(Math.max(0, first), false);
    }
    if (isShown()) for (const act of waiting.splice(0)) act();
  }

  /** Make a message the current one. @param {number} n @param {boolean} [scroll] */
  function toTurn(n, scroll = true) {
    if (!turns.length) return;
    for (const turn of turns) turn.classList.remove("art-is-current");
    current = clamp(n, turns.length);
    const turn = turns[current];
    turn.classList.add("art-is-current");
    if (!scroll) return;
    turn.scrollIntoView({ block: turn.offsetHeight > node.clientHeight ? "start" : "nearest" });
    app.announce(`${turn.querySelector(".art-role")?.textContent}, ${current + 1} of ${turns.length}`);
  }
  body.onclick = (event) => {
    const at = turns.indexOf(event.target.closest(".art-msg"));
    if (at >= 0) toTurn(at, false);
  };
  /** Return the number of the current reply. If the current message is none, tell the user. */
  function currentReply() {
    const i = Number(turns[current]?.dataset.message);
    if (controls.has(i)) return i;
    app.notify("This message is not a reply. Move to a reply with j or k.");
    return null;
  }
  const ofReply = (act) =>
    whenShown((arg) => {
      const i = currentReply();
      if (i !== null) act(i, arg);
    });

  return {
    node,
    head,
    open,
    read,
    mark: (verdict) => toggle(verdict),
    markTurn: ofReply((i, verdict) => toggle(verdict, i)),
    edit: ofReply((i) => edit(i)),
    focus: () => node.focus(),
    focusTag: () => tagInput.focus(),
    goBy: whenShown((by) => toTurn(current + by)),
    redraw: () => facts && drawHead(),
    isEditing: () => editor !== null,
    closeEditor: () => editor && (closeEditor(false), true),
  };
}
