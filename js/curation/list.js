// The list of conversations: a virtual list whose rows are requested in pages, by number.
import { clamp, fill, h, marked, muted, perFrame, plural } from "../panel.js";
import { typedArray } from "../viewer/index.js";
import { visibleRows } from "../viewer/list.js";
import { SIGNS } from "./verdicts.js";

const ROW = 26, // the height that visibleRows assumes
  PAGE_ROWS = 60,
  MAX_FACTS = 3000;

/** @param {any} app */
export function createList(app) {
  const inner = h("div.cu-rows", { role: "presentation" }),
    node = h("div.cu-list", { tabIndex: 0, role: "listbox", label: "Conversations" }, inner);
  /** @type {Map<number, any>} */ const facts = new Map();
  let ids = new Uint32Array(0),
    active = 0,
    requested = "",
    requests = 0;

  function draw() {
    const [from, to] = visibleRows(node.scrollTop, node.clientHeight, ids.length);
    const rows = [];
    for (let i = from; i < to; i++) rows.push(row(i));
    fill(inner, rows.length ? rows : h("div.cu-none.muted", app.done ? "No conversation matches." : "Loading …"));
    inner.style.height = `${ids.length * ROW}px`;
    if (ids.length) node.setAttribute("aria-activedescendant", `${app.name}-${active}`);
    else node.removeAttribute("aria-activedescendant");
    load(from, to);
  }

  function row(i) {
    const id = ids[i],
      known = facts.get(id),
      isSelected = id === app.ui.id;
    return h(
      "div",
      {
        id: `${app.name}-${i}`,
        role: "option",
        "aria-selected": isSelected,
        "aria-posinset": i + 1,
        "aria-setsize": ids.length,
        "data-i": i,
        class: `art-cu-row${isSelected ? " art-is-selected" : ""}${i === active ? " art-is-active" : ""}`,
        style: { top: `${i * ROW}px` },
      },
      known ? cells(id, known) : h("span.muted", "…"),
    );
  }

  function cells(id, known) {
    const [sign, title] = SIGNS[known.mark] ?? SIGNS[""];
    return [
      h("span", { class: `art-cu-sign art-cu-${known.mark || "unmarked"}`, "aria-hidden": "true" }, sign),
      h("span.quiet", known.mark ? `${title}: ` : ""),
      h(
        "span.grow.cu-preview",
        known.opening ? [marked(known.opening), muted(" → ")] : null,
        muted(marked(known.preview || "(empty)")),
      ),
      known.tags.map((tag) => h("span.badge", marked(tag))),
      known.edited ? h("span.badge.is-good", { title: plural(known.edited, "corrected reply") }, "corrected") : null,
      known.repeats != null
        ? h("span.badge.is-warn", { title: `Nearly the same as conversation ${known.repeats}` }, "repeated")
        : null,
      known.personal ? h("span.badge.is-bad", { title: plural(known.personal, "finding") }, "personal") : null,
      known.validation ? h("span.badge", { title: "On the validation side of the split" }, "validation") : null,
    ];
  }

  /** Request what is known about the visible rows, and about one page before and after them. */
  async function load(from, to) {
    const wanted = [];
    for (let i = Math.max(0, from - PAGE_ROWS); i < Math.min(ids.length, to + PAGE_ROWS) && wanted.length < 200; i++)
      if (!facts.has(ids[i])) wanted.push(ids[i]);
    const key = wanted.join();
    if (!key || key === requested) return;
    requested = key;
    const request = requests;
    try {
      const { reply } = await app.wire.request("rows", { ids: wanted });
      if (request !== requests) return; // the facts were forgotten meanwhile
      if (facts.size > MAX_FACTS) facts.clear();
      for (const known of reply.rows) facts.set(known.id, known);
      draw();
    } catch (error) {
      if (requested === key) requested = "";
      if (error.name !== "AbortError") app.notify(error.message);
    }
  }

  function activate(i) {
    if (!ids.length) return;
    active = clamp(i, ids.length);
    const top = active * ROW;
    if (top < node.scrollTop) node.scrollTop = top;
    else if (top + ROW > node.scrollTop + node.clientHeight) node.scrollTop = top + ROW - node.clientHeight;
    app.select(ids[active]);
    draw();
  }

  const table = {
    ArrowDown: () => activate(active + 1),
    ArrowUp: () => activate(active - 1),
    PageDown: () => activate(active + 15),
    PageUp: () => activate(active - 15),
    Home: () => activate(0),
    End: () => activate(ids.length - 1),
    Enter: () => app.reader.focus(),
  };
  node.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !table[event.key]) return;
    event.preventDefault();
    table[event.key]();
  };
  // A press selects, as in a native list: until the release, the row may have been drawn again, which cancels the click.
  // A click without a press (detail 0) comes from a screen reader.
  node.onmousedown = node.onclick = (event) => {
    const rowNode = event.target.closest("[data-i]");
    if (rowNode && (event.type === "click" ? !event.detail : !event.button)) activate(Number(rowNode.dataset.i));
  };
  const drawSoon = perFrame(draw);
  node.onscroll = drawSoon;
  const observer = new ResizeObserver(drawSoon);
  observer.observe(node);

  return {
    node,
    draw,
    /** Show these rows. The selected conversation stays selected if it is among them. @param {DataView} buffer */
    show(buffer) {
      ids = typedArray(buffer, "u4");
      active = Math.max(0, ids.indexOf(app.ui.id));
      requested = "";
      draw();
    },
    /** Request the facts again, of one row or of all. @param {number} [id] */
    forget(id) {
      if (id === undefined) facts.clear();
      else facts.delete(id);
      requested = "";
      requests += 1;
      draw();
    },
    /** Go to the next or previous row. If the selected one is not in the list, go to the first. @param {number} by */
    step: (by) => activate(ids[active] === app.ui.id ? active + by : active),
    go(id) {
      const i = ids.indexOf(id);
      if (i >= 0) activate(i);
      else app.select(id); // it does not pass the filter
    },
    first: () => ids[active],
    position: () => (ids[active] === app.ui.id ? `${active + 1} of ${ids.length}` : `row ${app.ui.id}`),
    close: () => observer.disconnect(),
  };
}
