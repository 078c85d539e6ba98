// The marks of conversations and replies.
import { h } from "../panel.js";

/** Name, label, and key for a conversation; the key in upper case marks the current reply. */
export const VERDICTS = [
  ["good", "Good", "g"],
  ["bad", "Bad", "b"],
  ["fix", "Needs fix", "f"],
];
/** A sign and a title for each mark. @type {Record<string, string[]>} */
export const SIGNS = {
  good: ["✓", "good"],
  bad: ["✗", "bad"],
  fix: ["!", "needs a fix"],
  disputed: ["≠", "disputed"],
  replies: ["·", "replies are marked"],
  "": ["", ""],
};

/**
 * Create the buttons of a mark. A second click withdraws it. `update(own)` shows the mark of the author.
 * @param {string} label @param {(key: string) => string} keyOf @param {(verdict: string|null, name: string) => any} choose
 */
export function verdictButtons(label, keyOf, choose) {
  let current = "";
  const buttons = VERDICTS.map(([name, text, key]) =>
    h(
      "button.button",
      {
        class: `art-button art-cu-mark-${name}`,
        "aria-pressed": false,
        title: `${text} (${keyOf(key)})`,
        onclick: () => choose(current === name ? null : name, name),
      },
      text,
    ),
  );
  return {
    node: h("span.cu-marks", { role: "group", label }, buttons),
    update(own) {
      current = own;
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(VERDICTS[i][0] === own)));
    },
  };
}

/** Return an author's own statement. @param {string[][]} statements pairs of author and verdict @param {string} author */
export const ownOf = (statements, author) => statements.find(([name]) => name === author)?.[1] ?? "";

/** Return the statements of the others as text. @param {string[][]} statements @param {string} author */
export const othersOf = (statements, author) =>
  statements
    .filter(([name]) => name !== author)
    .map(([name, verdict]) => `${name}: ${SIGNS[verdict]?.[1] ?? verdict}`)
    .join(", ");
