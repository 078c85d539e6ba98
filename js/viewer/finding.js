// The upper bar: filter, sort order, presets, and full-text search.
import { fill, h, marked, plural } from "../panel.js";
import { typedArray } from "./index.js";
import { highlight, reveal } from "./thread.js";

const SORTS = [
  ["", "rollout order"],
  ["-reward", "reward, high first"],
  ["reward", "reward, low first"],
  ["-ruler", "judge score, high first"],
  ["-tokens", "longest first"],
  ["tokens", "shortest first"],
  ["-tools", "most tool calls first"],
  ["-step", "newest first"],
];
const PRESETS = [
  ["", "All"],
  ["best", "Best"],
  ["worst", "Worst"],
  ["varied", "Varied", "Groups whose rewards differ most"],
];
export const FILTERS =
  "Filters: reward advantage ruler turns tools tokens step split scenario group index id, any metric, " +
  "< <= > >= = != ~, and or not, truncated failed judged overridden injection exception zero_variance.";

const SEARCH = "Search all texts";

/** @param {any} app */
export function createFinding(app) {
  const { index, list, ui, wire } = app;
  const counts = h("span.muted", { role: "status" }),
    matchCount = h("span.muted.found", { role: "status" }),
    errorNode = h("div.wrong", { role: "alert", hidden: true });
  const where = h("input.input.mono.where-input", {
    type: "text",
    placeholder: "Filter: reward < 0.2",
    label: "Filter",
    title: FILTERS,
    value: ui.where,
    spellcheck: false,
  });
  const search = h("input.input.search", {
    type: "search",
    placeholder: SEARCH,
    label: SEARCH,
    spellcheck: false,
  });
  const sort = h(
    "select.select",
    { label: "Sort", onchange: () => choose({ sort: sort.value, preset: "" }) },
    SORTS.map(([value, label]) => h("option", { value, selected: value === ui.sort }, label)),
  );
  const presets = PRESETS.map(([value, label, title]) =>
    h("button.button", { value, title, onclick: () => choose({ preset: value, sort: "" }, true) }, label),
  );

  /** Show the number of rollouts and how many pass the filter. */
  function count() {
    const total = index.count,
      groups = index.groups.filter((group) => group.trained).length,
      shownCount = app.order ? app.order.length : app.mask ? app.shown : total;
    fill(
      counts,
      shownCount === total
        ? [plural(total, "rollout"), groups > 1 && ` · ${groups} groups`]
        : `${shownCount} of ${total} rollouts`,
      index.done ? "" : " · loading",
    );
  }

  // filter, sort, presets ---------------------------------------------------------------------------------

  let selections = 0;
  /**
   * Select rollouts and their order. Settings that are not in `change` stay the same.
   * @param {Record<string, string>} change @param {boolean} [opensFirst] open the first rollout
   */
  async function choose(change, opensFirst) {
    app.saveUi(change);
    const request = ++selections,
      { where: rule, sort: order, preset } = ui;
    sort.value = order;
    markPreset();
    try {
      const { buffers } =
        rule || order || preset ? await wire.request("select", { where: rule, sort: order, preset }) : {};
      if (request === selections) applySelection(buffers && typedArray(buffers[0], "u4"), order || preset, opensFirst);
    } catch (error) {
      if (request !== selections) return;
      errorNode.hidden = false;
      where.setAttribute("aria-invalid", "true");
      fill(errorNode, marked(error.message));
    }
  }
  const markPreset = () =>
    presets.forEach((button) => button.setAttribute("aria-pressed", String(button.value === ui.preset)));

  /** Show these rollouts, either in this order or in their groups. */
  function applySelection(ids, isOrdered, opensFirst) {
    app.order = isOrdered ? [...ids] : null;
    app.mask = ids && !isOrdered ? new Uint8Array(index.count) : null;
    app.shown = ids ? ids.length : index.count;
    if (app.mask) for (const id of ids) app.mask[id] = 1;
    errorNode.hidden = true;
    where.removeAttribute("aria-invalid");
    count();
    list.arrange();
    app.announce(counts.textContent);
    if (ids?.length && (opensFirst || !ids.includes(ui.id))) list.go(ids[0]);
  }

  // search ---------------------------------------------------------------------------------

  let searches = 0;
  async function runSearch(query) {
    const request = ++searches;
    app.matches = null;
    fill(matchCount, query && "…");
    if (!query) return mark();
    try {
      const { ids, total, more, canceled } = await requestMatches(query);
      if (request !== searches || canceled) return;
      app.matches = { query: query.toLowerCase(), ids, total, more, at: -1, loading: false };
      if (ids.length) return nextMatch(1);
      fill(matchCount, "no match");
      app.announce("no match");
      mark();
    } catch (error) {
      fill(matchCount, marked(error.message));
    }
  }

  /** Request the matches after a rollout. The kernel returns at most 200 at once. @param {string} query @param {number} [afterId] */
  async function requestMatches(query, afterId = -1) {
    const { reply, buffers } = await wire.request("search", { query, after_id: afterId, number: Date.now() });
    return { ...reply, ids: [...typedArray(buffers[0], "u4")] };
  }

  /** Append the next matches. Return whether it succeeded. */
  async function loadMatches(matches) {
    matches.loading = true;
    try {
      const { ids, more, canceled } = await requestMatches(matches.query, matches.ids.at(-1));
      if (canceled) return false;
      matches.ids.push(...ids);
      matches.more = more;
      return true;
    } catch (error) {
      app.notify(error.message);
      return false;
    } finally {
      matches.loading = false;
    }
  }

  async function nextMatch(offset) {
    const { matches } = app,
      { ids } = matches;
    if (!ids.length || matches.loading) return;
    const mustLoad = offset > 0 && matches.more && matches.at === ids.length - 1;
    if (mustLoad && !(await loadMatches(matches))) return;
    if (matches !== app.matches) return; // a newer search
    matches.at = (matches.at + offset + ids.length) % ids.length;
    fill(matchCount, `${matches.at + 1} of ${matches.total}`);
    list.go(ids[matches.at]);
    mark();
  }

  /** Highlight the search matches in the displayed text. */
  function mark() {
    const { body } = app.reader,
      query = app.matches?.query ?? "";
    if (query) reveal(body, query);
    setTimeout(() => {
      const first = highlight(body, query, "art-found")[0];
      if (query) first?.startContainer.parentElement?.scrollIntoView({ block: "center" });
    });
  }

  // typing ---------------------------------------------------------------------------------

  /** Set the handlers of a text field: typing, Enter, Escape, and arrow down. @param {any} field */
  function listenToField(field, onChange, onEnter, onArrowDown = () => false) {
    let timer = 0;
    const schedule = (delay = 0) => {
      clearTimeout(timer);
      timer = setTimeout(() => onChange(field.value.trim()), delay);
    };
    field.oninput = () => schedule(250);
    field.onkeydown = (event) => {
      if (event.key === "Enter") onEnter(event) || schedule();
      else if (event.key === "Escape") {
        field.value = "";
        schedule();
        app.reader.focus();
      } else if (event.key !== "ArrowDown" || onArrowDown() === false) return;
      event.preventDefault();
    };
  }
  const filter = (rule) => choose({ where: rule });
  listenToField(
    where,
    filter,
    () => false,
    () => list.node.focus(),
  );
  listenToField(search, runSearch, (event) => {
    const isSameQuery = app.matches?.query === search.value.trim().toLowerCase();
    if (isSameQuery) nextMatch(event.shiftKey ? -1 : 1);
    return isSameQuery;
  });
  markPreset();

  const focusField = (field) => () => (field.focus(), field.select());
  return {
    parts: [
      counts,
      h("span.grow"),
      where,
      h("span.segments", { role: "group", label: "Presets" }, presets),
      sort,
      h("span.searching", search, matchCount),
    ],
    errorNode,
    choose,
    count,
    mark,
    focusFilter: focusField(where),
    focusSearch: focusField(search),
  };
}
