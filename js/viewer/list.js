// The list of steps, groups and rollouts. It is a virtual list: only the visible rows, all of one height, are in the page.
import { clamp, fill, h, marked, muted, num, perFrame, plural, visible, warning } from "../panel.js";

const ROW = 26,
  OVERSCAN = 6,
  PAGE_ROWS = 60,
  MAX_PREVIEWS = 3000,
  STEP = 0,
  GROUP = 1,
  ROLLOUT = 2;

/**
 * Return the indices [from, to) of the rows that must be in the page.
 * @param {number} top scroll position in pixels @param {number} height of the list in pixels @param {number} count of all rows
 */
export const visibleRows = (top, height, count) => [
  Math.max(0, Math.floor(top / ROW) - OVERSCAN),
  Math.min(count, Math.ceil((top + height) / ROW) + OVERSCAN),
];

/** @param {any} app */
export function createList(app) {
  const { index, ui, wire } = app;
  const inner = h("div.rows", { role: "presentation" });
  const node = h("div.list", { tabIndex: 0, role: "tree", label: "Rollouts" }, inner);
  /** @type {Map<number, any>} */ const previews = new Map();
  /** Key: number of a group, or key of a step. @type {Map<number|string, boolean>} */ const opened = new Map();
  let kinds = [],
    refs = [],
    steps = [],
    active = 0,
    requestedIds = "",
    flat = false;

  const stepKey = ({ split, step }) => `${split} ${step}`;
  const keyOf = (kind, ref) => (kind === STEP ? steps[ref].key : ref);

  /** Return whether a step or group is open: the user's choice, or else a default that depends on the number of rollouts. */
  const isOpen = (kind, ref) => {
    const choice = opened.get(keyOf(kind, ref));
    if (choice !== undefined) return choice;
    return kind === STEP
      ? ref === 0 || index.count <= 600
      : index.groups.length <= 4 || (app.mask !== null && app.shown <= 200);
  };
  const setOpen = (kind, ref, open) => opened.set(keyOf(kind, ref), open);

  /** Compute the rows: all rollouts by step and group, or the selected rollouts in their order. */
  function arrange() {
    const previous = kinds.length ? [kinds[active], refs[active]] : null;
    flat = app.order !== null;
    node.setAttribute("role", flat ? "listbox" : "tree");
    kinds = [];
    refs = [];
    steps = [];
    if (flat) for (const id of app.order) addRow(ROLLOUT, id);
    else addGroups();
    const newIndex = previous ? kinds.findIndex((kind, i) => kind === previous[0] && refs[i] === previous[1]) : -1;
    active = newIndex >= 0 ? newIndex : Math.max(0, rowOf(ui.id));
    inner.style.height = `${kinds.length * ROW}px`;
    requestedIds = "";
    draw();
  }
  const addRow = (kind, ref) => (kinds.push(kind), refs.push(ref));

  function addGroups() {
    const headed = index.stepped;
    let step = null,
      open = true;
    index.groups.forEach((group, g) => {
      const ids = membersOf(group);
      if (!ids.length && (group.size || app.mask)) return;
      const key = stepKey(group);
      if (headed && key !== step?.key) {
        step = { ...group, key, shown: 0, groups: 0, sum: 0, n: 0 };
        steps.push(step);
        addRow(STEP, steps.length - 1);
        open = isOpen(STEP, steps.length - 1);
      }
      if (step) {
        step.groups += 1;
        step.shown += ids.length;
        if (Number.isFinite(group.mean)) {
          step.sum += group.mean * group.size;
          step.n += group.size;
        }
      }
      if (!open) return;
      addRow(GROUP, g);
      if (isOpen(GROUP, g)) for (const id of ids) addRow(ROLLOUT, id);
    });
  }

  /** Return the rollouts of a group that pass the filter. */
  function membersOf(group) {
    const ids = [];
    for (let id = group.first; id < Math.min(group.first + group.size, index.count); id++)
      if (!app.mask || app.mask[id]) ids.push(id);
    return ids;
  }

  const rowOf = (id) => kinds.findIndex((kind, i) => kind === ROLLOUT && refs[i] === id);

  // drawing ---------------------------------------------------------------------------------

  const draw = () => {
    const [from, to] = visibleRows(node.scrollTop, node.clientHeight, kinds.length);
    const rows = [];
    for (let i = from; i < to; i++) rows.push(row(i));
    fill(inner, rows);
    node.setAttribute("aria-activedescendant", kinds.length ? `${app.name}-row-${active}` : "");
    if (!kinds.length) fill(inner, h("div.none", index.done ? "No rollout matches the filter." : "Loading …"));
    loadPreviews(from, to);
  };

  function row(i) {
    const kind = kinds[i],
      ref = refs[i],
      selected = kind === ROLLOUT && (ref === ui.id || ui.ids.includes(ref));
    const parts = [stepRow, groupRow, rolloutRow][kind](ref);
    const props = {
      id: `${app.name}-row-${i}`,
      role: flat ? "option" : "treeitem",
      "aria-selected": selected,
      "data-i": i,
      class:
        `art-row art-row-${["step", "group", "rollout"][kind]}${selected ? " art-is-selected" : ""}` +
        (i === active ? " art-is-active" : "") +
        (kind === ROLLOUT && app.picked.has(ref) ? " art-is-picked" : "") +
        (flat ? " art-is-flat" : ""),
      style: { top: `${i * ROW}px` },
    };
    if (flat) Object.assign(props, { "aria-posinset": i + 1, "aria-setsize": kinds.length });
    else props["aria-level"] = kind + Number(index.stepped);
    if (kind !== ROLLOUT) props["aria-expanded"] = isOpen(kind, ref);
    return h("div", props, parts);
  }

  /** Create an element with an explanation, which is also its name for screen readers. */
  const explained = (selector, title, ...content) => h(selector, { title, role: "img", label: title }, content);
  const caret = (kind, ref) => h("span.caret", { "aria-hidden": "true" }, isOpen(kind, ref) ? "▾" : "▸");

  function stepRow(ref) {
    const { step, split, trained, shown, groups, sum, n } = steps[ref];
    return [
      caret(STEP, ref),
      h("span.grow", `Step ${step}`, !trained && muted(` ${split}`)),
      muted(trained && !app.mask ? plural(groups, "group") : plural(shown, "rollout")),
      !app.mask && h("span.num", num(sum / n)), // the mean of all rollouts, not of those that match a filter
    ];
  }

  function groupRow(g) {
    const group = index.groups[g],
      isConstant = group.size > 1 && index.has(group.first, "zero_variance");
    return [
      caret(GROUP, g),
      h("span.grow.name", { title: visible(group.name) }, marked(group.name)),
      isConstant && warning("equal rewards", "Nothing is learned from it"),
      app.mask
        ? muted(`${membersOf(group).length} of ${group.size}`)
        : [
            !isConstant && rewardBars(group),
            h(
              "span.num.mean",
              { title: "Mean ± standard deviation" },
              num(group.mean),
              muted(` ±${num(group.std, 2)}`),
            ),
          ],
    ];
  }

  const sign = (reward) => (reward < 0 ? ".is-negative" : "");

  /** Draw a reward as a bar that begins at a mark for reward 0. */
  const rewardBar = (reward) =>
    explained(
      "span.level",
      `reward ${num(reward)}, scale from ${num(index.low)} to ${num(index.high)}`,
      h(`i${sign(reward)}`, { style: index.bar(reward, "left", "width") }),
      h("b", { style: index.bar(0, "left", "width") }),
    );

  /** Draw the rewards of a group as bars. A failed rollout, which has no reward, is an empty box. */
  function rewardBars(group) {
    const { reward, status } = index.columns,
      stride = Math.ceil(group.size / 16),
      ids = [];
    for (let id = group.first; id < group.first + group.size; id += stride) ids.push(id);
    return explained(
      "span.bars",
      `rewards ${ids.map((id) => (status[id] ? "failed" : num(reward[id]))).join(", ")}`,
      ids.map((id) =>
        h(`i.stick${status[id] ? ".is-failed" : id === ui.id ? ".is-this" : sign(reward[id])}`, {
          style: index.bar(reward[id], "bottom", "height"),
        }),
      ),
    );
  }

  function rolloutRow(id) {
    const { reward, idx_in_group: number, turns, tools, tokens, status, ruler } = index.columns;
    const preview = previews.get(id),
      group = index.groupOf(id),
      failed = status[id];
    const marks = [
      ["truncated", "It reached the token limit"],
      ["overridden", "A person set this score", "human"],
      ["injection", "It addresses the judge"],
    ].filter(([flag]) => index.has(id, flag));
    return [
      h("span.nth.muted", { title: "Select" }, app.picked.has(id) ? "✓" : number[id]),
      failed ? h("span.level.is-failed") : rewardBar(reward[id]),
      h("span.num.reward", failed ? "failed" : num(reward[id])),
      flat && muted(group.trained ? `step ${group.step}, group ${group.place}` : `${group.split} step ${group.step}`),
      h("span.preview", preview ? marked(preview.preview) : "…"),
      marks.map(([flag, hint, label = flag]) => warning(label, hint)),
      explained(
        "span.muted.size",
        `${plural(turns[id], "turn")}, ${plural(tools[id], "tool call")}, ${plural(tokens[id], "token")}` +
          (Number.isNaN(ruler[id]) ? "" : `, judged ${num(ruler[id])}`),
        plural(turns[id], "turn"),
      ),
    ];
  }

  /** Request the previews of the visible rows and of one page before and after them. */
  const loadPreviews = (() => {
    let timer = 0;
    return (from, to) => {
      const ids = [];
      for (let i = Math.max(0, from - PAGE_ROWS); i < Math.min(kinds.length, to + PAGE_ROWS) && ids.length < 200; i++) {
        if (kinds[i] === ROLLOUT && !previews.has(refs[i])) ids.push(refs[i]);
      }
      const key = ids.join();
      if (!ids.length || key === requestedIds) return;
      requestedIds = key;
      clearTimeout(timer);
      timer = setTimeout(
        async () => {
          try {
            const { reply } = await wire.request("page", { ids });
            if (previews.size > MAX_PREVIEWS) previews.clear();
            for (const rollout of reply.rows) previews.set(rollout.id, rollout);
            draw();
          } catch {
            if (requestedIds === key) requestedIds = ""; // the next drawing requests them again
          }
        },
        previews.size ? 40 : 0,
      );
    };
  })();

  // navigation ---------------------------------------------------------------------------------

  function scrollTo(i) {
    const top = i * ROW;
    if (top < node.scrollTop) node.scrollTop = top;
    else if (top + ROW > node.scrollTop + node.clientHeight) node.scrollTop = top + ROW - node.clientHeight;
  }

  function activate(i) {
    active = clamp(i, kinds.length);
    scrollTo(active);
    if (kinds[active] === ROLLOUT) {
      keepOpen(refs[active]);
      app.select(refs[active]);
    }
    draw();
  }

  function toggle(i, open = !isOpen(kinds[i], refs[i])) {
    if (kinds[i] === undefined || kinds[i] === ROLLOUT) return false;
    setOpen(kinds[i], refs[i], open);
    arrange();
    return true;
  }

  /** Left arrow: close, or go to the parent. Right arrow: open, or go to the first child. */
  function sideways(right) {
    if (flat) return false;
    if (right && kinds[active] !== ROLLOUT)
      return isOpen(kinds[active], refs[active]) ? activate(active + 1) : toggle(active, true);
    if (!right && kinds[active] !== ROLLOUT && isOpen(kinds[active], refs[active])) return toggle(active, false);
    for (let i = active - 1; !right && i >= 0; i--) if (kinds[i] < kinds[active]) return activate(i);
  }

  /** Go to the next or previous rollout that passes the filter, also in closed groups. */
  function step(offset) {
    const ids = flat ? app.order : null,
      current = ui.id;
    if (ids) {
      const position = ids.indexOf(current);
      return go(ids[position < 0 ? 0 : clamp(position + offset, ids.length)]);
    }
    for (let id = current + offset; id >= 0 && id < index.count; id += offset)
      if (!app.mask || app.mask[id]) return go(id);
  }

  /** Go to the first rollout of the next or previous group. */
  function stepGroup(offset) {
    for (let g = (index.columns.group?.[ui.id] ?? 0) + offset; g >= 0 && g < index.groups.length; g += offset) {
      const ids = membersOf(index.groups[g]);
      if (ids.length) return go(ids[0]);
    }
  }

  /** Keep the group and step of a rollout open when more rollouts are loaded. */
  function keepOpen(id) {
    if (flat) return;
    const g = index.columns.group[id];
    opened.set(g, true);
    opened.set(stepKey(index.groups[g]), true);
  }

  /** Select a rollout and scroll to it. */
  function go(id) {
    if (id === undefined || id >= index.count) return;
    const isHidden = rowOf(id) < 0;
    keepOpen(id);
    if (isHidden && !flat) arrange();
    const i = rowOf(id);
    if (i >= 0) {
      active = i;
      scrollTo(i);
    }
    app.select(id);
    draw();
  }

  const keyTable = {
    ArrowDown: () => activate(active + 1),
    ArrowUp: () => activate(active - 1),
    PageDown: () => activate(active + 15),
    PageUp: () => activate(active - 15),
    Home: () => activate(0),
    End: () => activate(kinds.length - 1),
    ArrowRight: () => sideways(true),
    ArrowLeft: () => sideways(false),
    Enter: () => toggle(active) || app.reader.focus(),
    " ": () => (kinds[active] === ROLLOUT ? app.pick(refs[active]) : toggle(active)),
  };
  node.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keyTable[event.key]) return;
    event.preventDefault();
    keyTable[event.key]();
  };
  // A press selects, as in curation/list.js: until the release, the row may have been drawn again.
  node.onmousedown = node.onclick = (event) => {
    const rowNode = event.target.closest("[data-i]");
    if (!rowNode || (event.type === "click" ? event.detail : event.button)) return;
    const i = Number(rowNode.dataset.i);
    if (kinds[i] === ROLLOUT && (event.ctrlKey || event.metaKey || event.target.closest(".art-nth"))) app.pick(refs[i]);
    else if (kinds[i] === ROLLOUT) activate(i);
    else {
      active = i;
      toggle(i);
    }
  };
  const drawSoon = perFrame(draw);
  node.onscroll = drawSoon;
  const observer = new ResizeObserver(drawSoon);
  observer.observe(node);

  return {
    node,
    arrange,
    draw,
    step,
    stepGroup,
    go,
    forget() {
      previews.clear();
      arrange();
    },
    close: () => observer.disconnect(),
  };
}
