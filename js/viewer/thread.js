// A conversation: folded system messages, thinking and tool calls. A tool's result is shown with its call; errors are open.
import { all, fill, h, marked, muted, visible, warning } from "../panel.js";

const MAX_LINES = { system: 14, developer: 14, user: 24, assistant: 120, tool: 12 }; // lines shown before "show all"
const LINE_WIDTH = 110,
  ERROR_TEXT = /^\s*(\{?"?error|traceback|[\w.]*(error|exception)\b)/i;
/** The whole text of elements that hide a part of it, for the search. @type {WeakMap<Element, string>} */
const FULL_TEXT = new WeakMap();

/** Join messages that were sent in pieces. @param {any[]} messages */
export function joinPieces(messages) {
  const out = [];
  for (const message of messages) {
    const last = out.at(-1);
    if (message.piece > 0 && last && last.i === message.i && last.history === message.history) {
      last.content += message.content ?? "";
      if (message.thinking) last.thinking = (last.thinking ?? "") + message.thinking;
    } else out.push({ ...message });
  }
  return out;
}

/** Return the approximate number of lines of a text. @param {string} text */
export const countLines = (text) =>
  text.split("\n").reduce((n, line) => n + 1 + Math.floor(line.length / LINE_WIDTH), 0);

/** Return the first lines of a text. @param {string} text @param {number} maxLines */
export function firstLines(text, maxLines) {
  let start = 0,
    lineCount = 0;
  while (lineCount < maxLines && start < text.length) {
    const end = text.indexOf("\n", start),
      stop = end < 0 ? text.length : end + 1,
      wraps = 1 + Math.floor((stop - start) / LINE_WIDTH);
    if (lineCount + wraps > maxLines) return text.slice(0, start + (maxLines - lineCount) * LINE_WIDTH);
    lineCount += wraps;
    start = stop;
  }
  return text.slice(0, start);
}

/** Show a text, or the first lines of a long text. @param {string} text @param {number} maxLines */
export function foldedText(text, maxLines) {
  const node = h("div.text"),
    total = countLines(text);
  if (total <= maxLines * 1.25) return appendText(node, text);
  const draw = (showAll) =>
    fill(
      node,
      marked(showAll ? text : firstLines(text, maxLines)),
      h(
        "button.more",
        { "data-more": showAll ? "less" : "all", onclick: () => draw(!showAll) },
        showAll ? "Show less" : `Show all ${total} lines`,
      ),
    );
  draw(false);
  FULL_TEXT.set(node, text);
  return node;
}
const appendText = (node, text) => (node.append(marked(text)), node);

/** Create a fold whose content is created when it is first opened. */
function fold(summary, body, { open = false, kind = "", text = "" } = {}) {
  const inside = h("div.inside");
  const node = h("details", { class: `art-fold ${kind}`, open }, h("summary", summary), inside);
  const build = () => {
    if (node.open && !inside.firstChild) fill(inside, body());
  };
  node.addEventListener("toggle", build);
  build();
  FULL_TEXT.set(node, text);
  return node;
}

export const shorten = (text, n = 90) => {
  const line = visible(text).replace(/\s+/g, " ").trim();
  return line.length > n ? `${line.slice(0, n)}…` : line;
};

/** Format the arguments of a call if they are JSON. @param {string} text */
export function formatJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Show a tool call and its result, if there is one. */
function toolCall({ name, arguments: args }, result) {
  const text = result?.content ?? "",
    failed = result && ERROR_TEXT.test(text);
  const summary = [
    h("span.fn", marked(name)),
    h("span.args", shorten(args ?? "", 70)),
    failed && h("span.badge.is-bad", "error"),
    !result && h("span.badge", "no result"),
  ];
  return fold(
    summary,
    () => [
      h("div.label", "arguments"),
      h("div.text", marked(formatJson(args ?? ""))),
      result ? [h("div.label", "result"), foldedText(text, MAX_LINES.tool)] : null,
    ],
    { open: Boolean(failed), kind: failed ? "art-call art-is-failed" : "art-call", text: `${name} ${args} ${text}` },
  );
}

/** Show a text that begins like others: the end of the common part, a mark at the first difference, and the rest. */
function textFromDifference(text, sharedChars) {
  const shared = text.slice(0, sharedChars),
    context = shared.slice(-160);
  return h(
    "div.text",
    h("span.shared", shared.length > 160 ? "… " : "", marked(context)),
    h("span.parting", { role: "img", label: "first difference", title: "first difference" }),
    marked(text.slice(sharedChars)),
  );
}

/**
 * Show one message. `paint(body, message)` can replace the body of a sampled message with colored tokens.
 * @param {any} message @param {Map<string, any>} results of tool calls by id @param {any} options
 */
function messageNode(message, results, { paint, sharedChars = null }) {
  const { role, content = "", thinking, tool_calls: calls = [], turn } = message,
    body = h("div.body");
  const plain = () => [
    thinking
      ? fold(["thinking", muted(shorten(thinking, 60))], () => foldedText(thinking, 60), {
          kind: "art-thinking",
          text: thinking,
        })
      : null,
    sharedChars !== null
      ? textFromDifference(content, sharedChars)
      : content && foldedText(content, MAX_LINES[role] ?? 24),
    !content && !calls.length && !thinking && muted("(empty)"),
  ];
  const foldable = role === "system" || role === "developer" || role === "tool";
  if (foldable && sharedChars === null) {
    const failed = role === "tool" && ERROR_TEXT.test(content);
    fill(
      body,
      fold([shorten(content, 80) || "(empty)"], () => foldedText(content, MAX_LINES[role]), {
        open: failed,
        kind: failed ? "art-is-failed" : "",
        text: content,
      }),
    );
  } else fill(body, plain());
  const node = h(
    "article",
    {
      class: `art-msg art-from-${/^\w+$/.test(role) ? role : "other"}`,
      "data-message": message.i,
      "data-turn": turn ?? null,
    },
    h(
      "header.who",
      h("span.role", visible(role)),
      message.name && muted(marked(message.name)),
      turn != null && muted(`turn ${turn}`),
      message.finish_reason === "length" && warning("truncated", "The reply reached the token limit"),
      role === "assistant" &&
        turn == null &&
        h("span.badge", { title: "Not sampled from this model, never trained" }, "given"),
    ),
    body,
    // Outside of the body: colored tokens replace the body, but not the results of its calls.
    calls.map((call) => toolCall(call, results.get(call.id))),
  );
  if (turn != null && paint) paint(body, message, () => fill(body, plain()));
  return node;
}

/**
 * Return a conversation as elements, one per turn.
 * @param {any[]} messages messages that were joined @param {{paint?: Function, sharedChars?: number|null}} [options]
 */
export function thread(messages, options = {}) {
  const results = new Map(
    messages
      .filter((message) => message.role === "tool" && message.tool_call_id)
      .map((message) => [message.tool_call_id, message]),
  );
  const nested = new Set(
    messages
      .flatMap((message) => message.tool_calls ?? [])
      .map((call) => call.id)
      .filter((id) => results.has(id)),
  );
  const out = [];
  let history = 0;
  messages.forEach((message, n) => {
    if (message.role === "tool" && nested.has(message.tool_call_id)) return;
    if (message.history !== history && message.history !== undefined) {
      history = message.history;
      out.push(h("div.history", { role: "separator" }, `history ${history}`));
    }
    out.push(
      messageNode(message, results, { ...options, sharedChars: n === 0 ? (options.sharedChars ?? null) : null }),
    );
  });
  return out;
}

/** Open or close a fold. The browser sends its own `toggle` event later, so the content is created here. */
function setOpen(node, open) {
  node.open = open;
  node.dispatchEvent(new Event("toggle"));
}

/** Open or close every fold below a node. @param {Element} root @param {boolean} open */
export function foldAll(root, open) {
  for (const node of root.querySelectorAll("details")) setOpen(node, open);
  for (const more of root.querySelectorAll(`[data-more=${open ? "all" : "less"}]`)) more.click();
}

/** Open the elements that hide a text. @param {Element} root @param {string} query in lower case */
export function reveal(root, query) {
  const isHiding = (node) => (FULL_TEXT.get(node) ?? "").toLowerCase().includes(query);
  for (const node of root.querySelectorAll("details")) if (!node.open && isHiding(node)) setOpen(node, true);
  for (const node of all(root, "text")) if (isHiding(node)) node.querySelector("[data-more=all]")?.click();
}

/**
 * Highlight all occurrences of a text without changing the elements. Return their ranges.
 * @param {Element} root @param {string} query @param {string} name of the highlight
 */
export function highlight(root, query, name) {
  const ranges = [],
    needle = query.toLowerCase(),
    walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (needle && walker.nextNode() && ranges.length < 500) {
    const text = (walker.currentNode.textContent ?? "").toLowerCase();
    for (let at = text.indexOf(needle); at >= 0 && ranges.length < 500; at = text.indexOf(needle, at + needle.length)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, at);
      range.setEnd(walker.currentNode, Math.min(at + needle.length, walker.currentNode.textContent.length));
      ranges.push(range);
    }
  }
  if (CSS.highlights) ranges.length ? CSS.highlights.set(name, new Highlight(...ranges)) : CSS.highlights.delete(name);
  return ranges;
}
