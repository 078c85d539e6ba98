// Compare two to four rollouts side by side. Common messages are shown once, and the first difference is marked.
import { all, fill, h, iconButton, marked, muted, num } from "../panel.js";
import { joinPieces, thread } from "./thread.js";

/** @param {any} app */
export function createCompare(app) {
  const node = h("div.compare");
  let active = 0,
    requests = 0,
    ids = [];

  /** @param {number[]} rollouts two to four rollouts @returns {Promise<boolean>} whether no newer request was made */
  async function show(rollouts) {
    const request = ++requests;
    ids = rollouts;
    active = Math.min(active, ids.length - 1);
    try {
      const { reply } = await app.wire.request("compare", { ids });
      if (request === requests) draw(reply);
    } catch (error) {
      if (request === requests) throw error;
    }
    return request === requests;
  }

  function draw({ prefix, shared = [], items, identical, shortened }) {
    app.tokens.reset();
    const focused = node.contains(document.activeElement);
    const summary = identical
      ? "The rollouts are identical."
      : prefix
        ? `The first ${prefix === 1 ? "message is" : `${prefix} messages are`} the same.`
        : "They differ from the first message.";
    const sharedMessages = joinPieces(shared);
    fill(
      node,
      h(
        "div.prefix",
        sharedMessages.length
          ? h("details.fold", h("summary", summary, muted(" Shown once.")), thread(sharedMessages, {}))
          : muted(summary),
        shortened && h("span.badge", "long texts are shortened"),
      ),
      h("div.panes", { style: { "--art-panes": String(items.length) } }, items.map(pane)),
    );
    mark();
    if (focused) step(0);
  }

  function pane(item, n) {
    const { id, step, split, index: number, reward, advantage, messages, shared_chars: sharedChars } = item;
    return h(
      "section.pane",
      {
        "data-pane": n,
        tabIndex: -1,
        label: `Rollout ${number}`,
        onclick: () => {
          active = n;
          mark();
        },
      },
      h(
        "header.pane-head",
        h("strong", `#${number}`),
        app.index.stepped && muted(`step ${step}`),
        split !== "train" && muted(marked(split)),
        h("span.grow"),
        h("span", `reward ${num(reward)}`),
        advantage != null &&
          h(`span.${advantage > 0 ? "up" : advantage < 0 ? "down" : "muted"}`, `advantage ${num(advantage, 2)}`),
        iconButton("⤢", `Show only rollout ${number}`, () => app.showOne(id)),
        ids.length > 2 && iconButton("✕", `Remove rollout ${number}`, () => app.compare(ids.filter((_, i) => i !== n))),
      ),
      thread(joinPieces(messages), { paint: app.tokens.painter(id), sharedChars }),
    );
  }

  /** Show which pane is active. */
  function mark() {
    all(node, "pane").forEach((paneNode, n) => paneNode.classList.toggle("art-is-active", n === active));
  }

  /** Go to another pane. @param {number} offset @returns {boolean} whether there is one */
  function step(offset) {
    if (active + offset < 0 || active + offset >= ids.length) return false;
    active += offset;
    mark();
    const pane = all(node, "pane")[active];
    pane?.focus();
    pane?.scrollIntoView({ block: "nearest", inline: "nearest" });
    return true;
  }

  return {
    node,
    show,
    step,
    get activePane() {
      return all(node, "pane")[active];
    },
    forget: () => {
      ids = [];
      requests += 1;
      active = 0;
    },
  };
}

/** Create the bar for comparing a scenario at different steps. @param {any} app */
export function createSteps(app) {
  const node = h("div.steps", { hidden: true });

  /** @param {number} group number */
  async function show(group) {
    node.hidden = false;
    fill(node, muted("Searching …"));
    try {
      const { reply } = await app.wire.request("step_diff", { group });
      draw(reply, group);
    } catch (error) {
      fill(node, h("span.note", marked(error.message)), closeButton());
    }
  }

  function draw({ places, by: matchedBy }, group) {
    if (places.length < 2) return fill(node, h("span.note", "This scenario has only one step."), closeButton());
    const current = Math.max(
        0,
        places.findIndex((place) => place.group === group),
      ),
      other = current > 0 ? 0 : places.length - 1;
    const [a, b] = [
      picker("Step a", places, Math.min(current, other)),
      picker("Step b", places, Math.max(current, other)),
    ];
    const compareSteps = () => app.compare([a.id(), b.id()], true);
    a.node.onchange = b.node.onchange = compareSteps;
    fill(
      node,
      h("span.label", "Same scenario", matchedBy === "first messages" && muted(" (same first messages)")),
      a.node,
      muted("against"),
      b.node,
      closeButton(),
    );
    compareSteps();
  }

  const closeButton = () => iconButton("✕", "Close the step comparison", () => app.showOne(app.ui.id));

  /** Create the selection of a step and one of its rollouts. */
  function picker(label, places, selected) {
    const rolloutSelect = h("select.select", { label: `${label}: rollout` });
    const stepSelect = h(
      "select.select",
      { label: label },
      places.map((place, i) =>
        h("option", { value: String(i), selected: i === selected }, `step ${place.step} · mean ${num(place.mean, 2)}`),
      ),
    );
    const listRollouts = () => {
      const place = places[Number(stepSelect.value)];
      fill(
        rolloutSelect,
        h("option", { value: String(place.best) }, "best"),
        h("option", { value: String(place.worst) }, "worst"),
        place.ids.map((id, n) => h("option", { value: String(id) }, `#${n}`)),
      );
    };
    stepSelect.onchange = listRollouts;
    listRollouts();
    return { node: h("span.picker", stepSelect, rolloutSelect), id: () => Number(rolloutSelect.value) };
  }

  return {
    node,
    show,
    hide: () => {
      node.hidden = true;
    },
  };
}
