// The failures of a run: kinds and counts, their steps, and examples that open in the rollout viewer.
import { createEmbeddedViewer } from "./embedded-viewer.js";
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
  moveFocus,
  muted,
  num,
  plural,
} from "./panel.js";

/** Format a share as a percentage. @param {number} part @param {number} whole */
const percent = (part, whole) => (whole ? `${num((100 * part) / whole, 2)} %` : "–");

/**
 * Draw the share of rollouts by step as bars. @param {{steps: number[]}} counts @param {number[]} ofSteps
 * @param {string[]} labels of the steps
 */
function stepBars({ steps }, ofSteps, labels) {
  const shares = steps.map((count, i) => count / Math.max(1, ofSteps[i])),
    highest = Math.max(...shares, 1e-9);
  const text = steps
    .map((count, i) => [count, `step ${labels[i]}: ${count} of ${ofSteps[i]}`])
    .filter(([count]) => count)
    .map(([, line]) => line);
  return h(
    "span.f-steps",
    { role: "img", label: text.join("; ") || "at no step", title: text.slice(0, 12).join("\n") },
    shares.map((share) =>
      h("i", {
        class: share ? "art-f-column" : "art-f-none",
        style: { height: `${Math.max(8, (100 * share) / highest)}%` },
      }),
    ),
  );
}

/** Create the example: a bar with the failure and its position, and the rollout viewer below it. @param {any} app */
function createExample(app) {
  const { wire } = app,
    heading = h("span.grow"),
    viewer = createEmbeddedViewer(app);
  const back = h("button.button", { title: "Previous example (p)", onclick: () => step(-1) }, "Previous"),
    next = h("button.button", { title: "Next example (n)", onclick: () => step(1) }, "Next");
  const bar = h(
    "div.f-example-bar",
    { role: "toolbar", label: "Example" },
    heading,
    back,
    next,
    h("button.button", { title: "Close the example (Escape)", onclick: close }, "Close"),
  );
  const node = h("section.f-example", { label: "Example", hidden: true }, bar, viewer.node);
  let open = /** @type {any} */ (null);

  async function show(failure, position = 0) {
    const rows = (await wire.request("failure_rows", { failure: failure.number, first: position })).reply;
    if (!rows.rows.length) return;
    open = { failure, position, total: rows.total };
    const id = rows.rows[0];
    node.hidden = false;
    fill(heading, h("strong", `Example ${position + 1} of ${rows.total}`), " ", h("span.mono", marked(failure.title)));
    back.disabled = position === 0;
    next.disabled = position + 1 >= rows.total;
    await viewer.show(id);
    app.announce(`example ${position + 1} of ${rows.total}`);
    node.scrollIntoView({ block: "nearest" });
  }
  const notified = (promise) => promise.catch((error) => app.notify(error.message));
  function step(by) {
    if (!open) return;
    const position = clamp(open.position + by, open.total);
    if (position !== open.position) notified(show(open.failure, position));
  }
  function close() {
    if (!open) return false;
    const { number } = open.failure;
    open = null;
    viewer.close();
    node.hidden = true;
    app.root.querySelector(`[data-failure="${number}"]`)?.focus();
  }
  return { node, step, close, show: (failure) => notified(show(failure)), end: viewer.close };
}

/** @param {HTMLElement} root @param {ReturnType<typeof link>} wire @param {any} model */
function build(root, wire, model) {
  const app = /** @type {any} */ ({ root, wire, model, announce: announcer(root) });
  const title = h("strong"),
    status = h("span.muted.grow"),
    note = h("div.f-note", { role: "status", hidden: true }),
    list = h("div.f-kinds");
  app.notify = (/** @type {string} */ text) => {
    note.hidden = !text;
    fill(note, marked(text));
  };
  const example = createExample(app);
  root.classList.add("art-failures");
  root.append(
    h("div.f-bar", { role: "toolbar", label: "Failures" }, title, status, freezeButton(wire)),
    note,
    list,
    example.node,
  );

  /** @param {any} failure @param {number[]} ofSteps @param {string[]} labels */
  const row = (failure, ofSteps, labels) =>
    h(
      "li",
      h(
        "button.f-row",
        { "data-failure": failure.number, title: "Open an example (Enter)", onclick: () => example.show(failure) },
        h("span.f-title.text", marked(failure.title), failure.advice ? h("span.f-advice", failure.advice) : null),
        h("span.num", plural(failure.rollouts, "rollout")),
        h("span.num.muted", percent(failure.rollouts, failure.of)),
        stepBars(failure, ofSteps, labels),
      ),
    );

  /** @param {any} kind @param {any} reply */
  const section = (kind, { steps: labels, evaluation_steps: evaluationSteps }) =>
    h(
      "section.f-kind",
      { label: kind.title },
      h(
        "div.f-head",
        h(
          "span.f-title",
          h("h3.f-name", kind.title),
          muted(kind.meaning + (kind.outside && ` Also ${kind.outside}.`)),
          kind.advice ? h("span.f-advice", kind.advice) : null,
        ),
        h(
          "span.num",
          h("strong", kind.kind === "no_signal" ? plural(kind.groups, "group") : plural(kind.rollouts, "rollout")),
        ),
        h(
          "span.num.muted",
          kind.kind === "no_signal" ? percent(kind.groups, kind.of_groups) : percent(kind.rollouts, kind.of),
        ),
        kind.rollouts ? stepBars(kind, kind.of_steps, labels) : h("span.f-steps"),
      ),
      kind.failures.length
        ? h(
            "ul.f-list",
            kind.failures.map((failure) => row(failure, failure.evaluated ? evaluationSteps : kind.of_steps, labels)),
          )
        : null,
      kind.more ? h("div.f-more.muted", `${plural(kind.more, "rarer failure")} not listed`) : null,
    );

  /** @param {any} reply */
  function draw(reply) {
    const focused = /** @type {any} */ (root.getRootNode()).activeElement?.dataset?.failure;
    fill(title, marked(reply.title));
    const unknown = reply.unknown
      ? ` · ${plural(reply.unknown, "rollout")} without token data: not known whether they can be trained`
      : "";
    fill(status, `${reply.total}${reply.done ? "" : ", reading more…"}${unknown}`);
    if (reply.lost.length) app.notify(`Could not read: ${reply.lost.join("; ")}`);
    fill(
      list,
      reply.kinds.map((kind) => section(kind, reply)),
    );
    if (focused !== undefined) list.querySelector(`[data-failure="${focused}"]`)?.focus();
  }

  const load = coalesce(
    async () => {
      let reply;
      do draw((reply = (await wire.request("failures")).reply));
      while (!reply.done);
    },
    (message, error) => {
      if (error.name !== "AbortError") app.notify(message);
    },
  );

  const move = (/** @type {number} */ by) => moveFocus(root, "[data-failure]", by);
  const stopKeys = keys(root, {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    n: () => example.step(1),
    p: () => example.step(-1),
    Escape: example.close,
  });
  wire.onTick(load);
  wire.onGap(load);
  load();
  return () => {
    stopKeys();
    example.end();
  };
}

export default { initialize, render: (/** @type {any} */ host) => mount(host, build) };
