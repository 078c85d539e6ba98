// Compare two to four rollouts side by side. Common messages are shown once, and the first difference is marked.
import { fill, h, marked, muted, num, signed } from "../panel.js";
import { joined, thread } from "./thread.js";

/** @param {any} app */
export function createCompare(app) {
  const node = h("div.compare");
  let active = 0,
    asked = 0,
    ids = [];

  /** @param {number[]} wanted two to four rollouts @returns {Promise<boolean>} whether no newer request was made */
  async function show(wanted) {
    const mine = ++asked;
    ids = wanted;
    active = Math.min(active, ids.length - 1);
    try {
      const { reply } = await app.wire.request("compare", { ids });
      if (mine === asked) draw(reply);
    } catch (error) {
      if (mine === asked) throw error;
    }
    return mine === asked;
  }

  function draw({ prefix, shared = [], items, identical, shortened }) {
    app.tokens.reset();
    const focused = node.contains(document.activeElement);
    const parted = identical
      ? "The rollouts are identical."
      : prefix
        ? `The first ${prefix} message${prefix === 1 ? " is" : "s are"} the same.`
        : "They differ from the first message.";
    const common = joined(shared);
    fill(
      node,
      h(
        "div.prefix",
        common.length
          ? h("details.fold", h("summary", parted, muted(" Shown once.")), thread(common, {}))
          : muted(parted),
        shortened ? h("span.badge", "long texts are shortened") : null,
      ),
      h("div.panes", { style: { "--art-panes": String(items.length) } }, items.map(pane)),
    );
    mark();
    if (focused) step(0);
  }

  function pane(item, n) {
    const { id, step, group, index: nth, reward, advantage, messages, cut } = item;
    return h(
      "section.pane",
      {
        "data-pane": n,
        tabIndex: -1,
        label: `Rollout ${nth}`,
        onclick: () => {
          active = n;
          mark();
        },
      },
      h(
        "header.pane-head",
        h("strong", `#${nth}`),
        app.index.stepped && muted(`step ${step}`),
        h("span.grow"),
        h("span", { title: "reward" }, num(reward)),
        h(
          "span",
          {
            class: advantage > 0 ? "art-up" : advantage < 0 ? "art-down" : "art-muted",
            title: "advantage in its group",
          },
          advantage == null ? "" : `A ${num(advantage, 2)}`,
        ),
        signed("⤢", `Show only rollout ${nth}`, () => app.alone(id)),
        ids.length > 2 ? signed("✕", `Remove rollout ${nth}`, () => app.compare(ids.filter((_, i) => i !== n))) : null,
      ),
      thread(joined(messages), { paint: app.tokens.painter(id), cut: Number.isInteger(cut) ? cut : null }),
    );
  }

  /** Show which pane is active. */
  function mark() {
    node.querySelectorAll(".art-pane").forEach((one, n) => one.classList.toggle("art-is-active", n === active));
  }

  /** Go to another pane. @param {number} by @returns {boolean} whether there is one */
  function step(by) {
    if (active + by < 0 || active + by >= ids.length) return false;
    active += by;
    mark();
    const pane = node.querySelectorAll(".art-pane")[active];
    pane?.focus();
    pane?.scrollIntoView({ block: "nearest", inline: "nearest" });
    return true;
  }

  return {
    node,
    show,
    step,
    get ids() {
      return ids;
    },
    get activePane() {
      return node.querySelectorAll(".art-pane")[active];
    },
    forget: () => {
      ids = [];
      asked += 1;
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
    fill(node, muted("Searching other steps …"));
    const { reply } = await app.wire.request("step_diff", { group });
    const { places, by } = reply;
    if (places.length < 2) return fill(node, h("span.note", "This scenario has rollouts at one step only."), close());
    const here = Math.max(
        0,
        places.findIndex((place) => place.group === group),
      ),
      other = here > 0 ? 0 : places.length - 1;
    const [a, b] = [picker("Step a", places, Math.min(here, other)), picker("Step b", places, Math.max(here, other))];
    const go = () => app.compare([a.id(), b.id()], true);
    a.node.onchange = b.node.onchange = go;
    fill(
      node,
      h("span.label", "Same scenario", by === "first messages" ? muted(" (same first messages)") : null),
      a.node,
      muted("against"),
      b.node,
      close(),
    );
    go();
  }

  const close = () => signed("✕", "Close the step comparison", () => app.alone(app.ui.id));

  /** Create the selection of a step and one of its rollouts. */
  function picker(label, places, at) {
    const which = h("select.select", { label: `${label}: rollout` });
    const where = h(
      "select.select",
      { label: label },
      places.map((place, i) =>
        h("option", { value: String(i), selected: i === at }, `step ${place.step} · mean ${num(place.mean, 2)}`),
      ),
    );
    const offer = () => {
      const place = places[Number(where.value)];
      fill(
        which,
        h("option", { value: String(place.best) }, "best"),
        h("option", { value: String(place.worst) }, "worst"),
        place.ids.map((id, n) => h("option", { value: String(id) }, `#${n}`)),
      );
    };
    where.onchange = offer;
    offer();
    return { node: h("span.picker", where, which), id: () => Number(which.value) };
  }

  return {
    node,
    show,
    hide: () => {
      node.hidden = true;
    },
  };
}
