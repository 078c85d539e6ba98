// One or two chats with checkpoints of a model: tokens with their probabilities, and a fork at any message.
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
  muted,
  num,
  plural,
  visible,
} from "./panel.js";

/** @typedef {[string, number | null, [string, number][]]} Token text, logprob and alternatives */

/** Format a log probability as a percentage. @param {number | null} logprob */
export const percent = (logprob) => (logprob == null ? "–" : `${num(100 * Math.exp(logprob), 3)} %`);

/** Return the class of a token's color: from 0 (certain) to 4 (improbable). @param {number | null} logprob */
export const shade = (logprob) =>
  logprob == null ? 0 : [0.9, 0.6, 0.3, 0.1].filter((limit) => Math.exp(logprob) < limit).length;

/** Create the tokens of a reply. The arrow keys move between them. @param {Token[]} tokens @param {any} app */
function createTokens(tokens, app) {
  const detail = h("div.p-detail", { hidden: true, role: "status" });
  let current = -1;
  const spans = tokens.map(([text, logprob], i) =>
    h("span.p-token", { class: `art-p-token art-p-shade-${shade(logprob)}`, onclick: () => choose(i) }, marked(text)),
  );
  const node = h(
    "div.p-text.text",
    {
      tabIndex: 0,
      role: "group",
      label: `Reply of ${plural(tokens.length, "token")}. The left and right keys show the probability of each token.`,
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by) return;
        event.preventDefault();
        choose(clamp(current + by, tokens.length));
      },
    },
    spans,
  );
  function choose(i) {
    spans[current]?.classList.remove("art-is-chosen");
    current = i;
    spans[i].classList.add("art-is-chosen");
    const [text, logprob, others] = tokens[i];
    detail.hidden = false;
    fill(
      detail,
      h("strong", `Token ${i + 1} of ${tokens.length}: `),
      h("span.mono", marked(JSON.stringify(text))),
      ` ${percent(logprob)}`,
      h(
        "ul.p-others",
        others.map(([other, value]) =>
          h(
            "li",
            h("span.p-bar", { style: { "--art-share": String(Math.exp(value)) } }),
            h("span.mono", marked(JSON.stringify(other))),
            h("span.num", percent(value)),
          ),
        ),
      ),
    );
    app.announce(`${visible(text)}: ${percent(logprob)}`);
  }
  return [node, detail];
}

/** @param {HTMLElement} root @param {ReturnType<typeof link>} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({ root, wire, announce: announcer(root) });
  const title = h("strong"),
    note = h("div.p-note", { role: "alert", hidden: true }),
    columns = h("div.p-columns"),
    second = h("button.button", { onclick: () => change("set_chats", { count: state.chats.length === 1 ? 2 : 1 }) });
  const notify = (/** @type {string} */ text) => {
    note.hidden = !text;
    fill(note, marked(text));
  };
  const number = (label, value, options) =>
    h("input.input.p-number", { type: "number", label, title: label, value, ...options });
  const temperature = number("Temperature", "1", { min: "0", max: "2", step: "0.1" }),
    maxTokens = number("Maximum number of tokens", "256", { min: "1", max: "4096", step: "1" });
  const role = h(
    "select.select",
    { label: "Role of the message" },
    ["user", "system", "tool"].map((name) => h("option", { value: name }, name)),
  );
  const text = h("textarea.input.p-input", {
    label: "Message",
    placeholder: "Message (Ctrl+Enter sends it)",
    rows: 3,
    onkeydown: (/** @type {KeyboardEvent} */ event) => {
      event.stopPropagation(); // the page has other uses for keys
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    },
  });
  const button = (name, hint, onclick) => h("button.button", { title: hint, onclick }, name);
  let state = /** @type {any} */ ({ chats: [], steps: [], version: -1 });
  root.classList.add("art-playground");
  root.append(
    h(
      "div.p-row",
      { role: "toolbar", label: "Playground" },
      title,
      h("span.grow"),
      h("label", muted("temperature "), temperature),
      h("label", muted("tokens "), maxTokens),
      second,
      freezeButton(wire),
    ),
    note,
    columns,
    h(
      "div.p-row",
      { role: "group", label: "New message" },
      role,
      text,
      h(
        "span.p-actions",
        button("Send", "Add the message to every chat and request replies", send),
        button("Add", "Add the message without a reply", () => add()),
        button("Reply", "Request a reply to the last message", () => reply()),
      ),
    ),
  );

  /** Send a command and show the new state. @param {string} command @param {any} args */
  async function change(command, args) {
    notify("");
    try {
      draw((await wire.request(command, args)).reply);
      return true;
    } catch (error) {
      notify(error.message);
      load();
      return false;
    }
  }
  const forAll = (command, args) =>
    Promise.all(state.chats.map((_, chat) => change(command, { chat, ...args }))).then((all) => all.every(Boolean));
  async function add() {
    if (!text.value) return false;
    const isAdded = await change("add", { role: role.value, text: text.value });
    if (isAdded) text.value = "";
    return isAdded;
  }
  /** Request a reply in every chat. An empty field means its default. */
  const reply = () =>
    forAll("reply", {
      temperature: temperature.value === "" ? 1 : temperature.valueAsNumber,
      max_tokens: maxTokens.value === "" ? 256 : maxTokens.valueAsNumber,
    });
  async function send() {
    if (await add()) await reply();
    text.focus();
  }

  /** @param {any} entry @param {number} i of the entry @param {number} chat */
  const message = (entry, i, chat) =>
    h(
      "li.p-message",
      { "data-role": entry.role },
      h(
        "div.p-head",
        h("strong", marked(entry.role)),
        entry.finish === "length" ? h("span.badge.is-warn", "token limit") : null,
        h("span.grow"),
        h(
          "button.button.plain",
          {
            label: `Fork after message ${i + 1}`,
            title: "Remove everything after this message",
            onclick: () => change("fork", { chat, length: i + 1 }),
          },
          "Fork",
        ),
      ),
      entry.tokens.length ? createTokens(entry.tokens, app) : h("div.p-text.text", marked(entry.text)),
    );

  /** @param {any} entry @param {number} chat */
  function column(entry, chat) {
    const steps = [["", "latest step"], ...state.steps.map((step) => [String(step), `step ${step}`])];
    const select = h(
      "select.select",
      {
        label: `Checkpoint of chat ${chat + 1}`,
        onchange: () => change("choose_step", { chat, step: select.value === "" ? null : Number(select.value) }),
      },
      steps.map(([value, name]) => h("option", { value, selected: value === String(entry.step ?? "") }, name)),
    );
    return h(
      "section.p-chat",
      { label: `Chat ${chat + 1}` },
      h(
        "div.p-row",
        select,
        h("span.grow"),
        entry.waiting ? muted("waiting for the reply …") : null,
        button("Clear", "Remove all messages of this chat", () => change("fork", { chat, length: 0 })),
      ),
      entry.hidden ? h("p.p-text.muted", `${plural(entry.hidden, "earlier message")} not shown`) : null,
      h(
        "ol.p-messages",
        entry.entries.map((one, i) => message(one, i + entry.hidden, chat)),
      ),
      entry.entries.length ? null : h("p.p-text.muted", "No messages yet."),
    );
  }

  function draw(reply) {
    if (reply.version <= state.version) return; // a chosen token stays chosen, and late replies are ignored
    state = reply;
    fill(title, marked(`Playground of ${reply.title}`));
    fill(second, reply.chats.length === 1 ? "Add a chat" : "Close the second chat");
    columns.style.setProperty("--art-chats", String(reply.chats.length));
    fill(columns, reply.chats.map(column));
    const last = reply.chats[0]?.entries.at(-1);
    if (last?.role === "assistant") app.announce(`Reply: ${visible(last.text).slice(0, 200)}`);
  }
  const load = coalesce(
    async () => draw((await wire.request("state")).reply),
    (error, { name }) => {
      if (name !== "AbortError") notify(error);
    },
  );
  const stopKeys = keys(root, { "/": () => text.focus() });
  wire.onTick(load);
  wire.onGap(load);
  load();
  return stopKeys;
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
