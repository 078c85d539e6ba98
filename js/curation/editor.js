// The correction of a reply: a form for its text and its calls, and the difference from the original.
import { fill, h, marked } from "../panel.js";

/** Show a difference as kept, removed and added words. @param {string[][]} parts */
export const differenceNode = (parts) =>
  h(
    "div.text.cu-difference",
    parts.map(([kind, text]) =>
      kind === "=" ? marked(text) : h(kind === "-" ? "del.cu-removed" : "ins.cu-added", marked(text)),
    ),
  );

/**
 * Create the form for a correction.
 * @param {{content: string, tool_calls: {name: string, arguments: string}[], is_corrected: boolean}} stored
 * @param {{content: string, tool_calls: {name: string, arguments: string}[]}|undefined} draft a text that is not saved
 * @param {{save: (content: string|null, calls: any[]) => Promise<any>, close: () => void}} actions
 */
export function createEditor(stored, draft, { save, close }) {
  const reply = { ...stored, ...draft };
  const rows = (text) => Math.min(24, Math.max(3, text.split("\n").length + 1));
  const content = h("textarea.input.cu-text", {
    label: "Corrected text",
    value: reply.content,
    rows: rows(reply.content),
    spellcheck: true,
  });
  const calls = reply.tool_calls.map((call, n) => ({
    name: h("input.input.mono", { label: `Tool of call ${n + 1}`, value: call.name }),
    arguments: h("textarea.input.cu-text", {
      label: `Arguments of call ${n + 1}`,
      value: call.arguments,
      rows: rows(call.arguments),
      spellcheck: false,
    }),
  }));
  const problem = h("div.cu-problem", { role: "alert", hidden: true });
  const send = async (text, edited) => {
    problem.hidden = true;
    try {
      await save(text, edited);
    } catch (error) {
      problem.hidden = false;
      fill(problem, marked(error.message));
    }
  };
  const current = () => ({
    content: content.value,
    tool_calls: calls.map((call) => ({ name: call.name.value, arguments: call.arguments.value })),
  });
  const store = () => send(current().content, current().tool_calls);
  const node = h(
    "section.cu-editor",
    { label: "Correct the reply" },
    content,
    calls.map((call) => h("div.cu-call", call.name, call.arguments)),
    problem,
    h(
      "div.cu-actions",
      h("button.button", { title: "Save the correction (Ctrl+Enter)", onclick: store }, "Save"),
      h("button.button", { title: "Discard this text (Escape)", onclick: close }, "Cancel"),
      reply.is_corrected
        ? h(
            "button.button",
            { title: "The original counts again", onclick: () => send(null, []) },
            "Withdraw correction",
          )
        : null,
    ),
  );
  node.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) store();
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const first = JSON.stringify(current());
  /** Return the text and the calls in the form, or null if they are those that are stored. */
  const value = () => (!draft && JSON.stringify(current()) === first ? null : current());
  return { node, value, focus: () => content.focus() };
}
