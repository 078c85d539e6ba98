// The upper bar: filter, sort order, presets, and full-text search.
import { fill, h, marked } from "../panel.js";
import { array } from "./index.js";
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
  ["varied", "Varied"],
];

/** @param {any} app */
export function createFinding(app) {
  const { index, list, ui, wire } = app;
  const counts = h("span.muted", { role: "status" }),
    found = h("span.muted.found", { role: "status" }),
    wrong = h("div.wrong", { role: "alert", hidden: true });
  const where = h("input.input.mono.where-input", {
    type: "text",
    placeholder: "reward < 0.2 and tools > 3",
    label: "Filter",
    value: ui.where,
    spellcheck: false,
  });
  const search = h("input.input.search", {
    type: "search",
    placeholder: "Search all texts",
    label: "Search all texts",
    spellcheck: false,
  });
  const sort = h(
    "select.select",
    { label: "Sort", onchange: () => choose({ sort: sort.value, preset: "" }) },
    SORTS.map(([value, label]) => h("option", { value, selected: value === ui.sort }, label)),
  );
  const presets = PRESETS.map(([value, label]) =>
    h("button.button", { value, onclick: () => choose({ preset: value, sort: "" }) }, label),
  );

  /** Show the number of rollouts and how many pass the filter. */
  function count() {
    const all = index.count,
      some = app.order ? app.order.length : app.mask ? app.shown : all;
    fill(
      counts,
      some === all ? `${all} rollout${all === 1 ? "" : "s"}` : `${some} of ${all} rollouts`,
      index.groups.length > 1 ? ` · ${index.groups.length} groups` : "",
      index.done ? "" : " · loading",
    );
  }

  // filter, sort, presets ---------------------------------------------------------------------------------

  let choosing = 0;
  /** Select rollouts and their order. Settings that are not in `change` stay the same. @param {Record<string, string>} change */
  async function choose(change) {
    app.keep(change);
    const mine = ++choosing,
      { where: rule, sort: by, preset } = ui;
    sort.value = by;
    press();
    try {
      const { buffers } = rule || by || preset ? await wire.request("select", { where: rule, sort: by, preset }) : {};
      if (mine === choosing) take(buffers && array(buffers[0], "u4"), by || preset);
    } catch (error) {
      if (mine !== choosing) return;
      wrong.hidden = false;
      where.setAttribute("aria-invalid", "true");
      fill(wrong, marked(error.message));
    }
  }
  const press = () => presets.forEach((one) => one.setAttribute("aria-pressed", String(one.value === ui.preset)));

  /** Show these rollouts, either in this order or in their groups. */
  function take(ids, ordered) {
    app.order = ordered ? Array.from(ids) : null;
    app.mask = ids && !ordered ? new Uint8Array(index.count) : null;
    app.shown = ids ? ids.length : index.count;
    if (app.mask) for (const id of ids) app.mask[id] = 1;
    wrong.hidden = true;
    where.removeAttribute("aria-invalid");
    count();
    list.arrange();
    app.announce(counts.textContent);
    if (ids?.length && !ids.includes(ui.id)) list.go(ids[0]);
  }

  // search ---------------------------------------------------------------------------------

  let searches = 0;
  async function lookFor(query) {
    const mine = ++searches;
    app.matches = null;
    fill(found, query && "…");
    if (!query) return mark();
    try {
      const { reply, buffers } = await wire.request("search", { query, number: Date.now() });
      if (mine !== searches || reply.cancelled) return;
      const ids = Array.from(array(buffers[0], "u4"));
      app.matches = { query: query.toLowerCase(), ids, total: reply.total, at: -1 };
      if (ids.length) return nextMatch(1);
      fill(found, "no match");
      app.announce("no match");
      mark();
    } catch (error) {
      fill(found, marked(error.message));
    }
  }

  function nextMatch(by) {
    const { ids, at, total } = app.matches;
    if (!ids.length) return;
    app.matches.at = (at + by + ids.length) % ids.length;
    fill(found, `${app.matches.at + 1} of ${total}`);
    list.go(ids[app.matches.at]);
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
  function typed(field, use, enter, down = () => false) {
    let timer = 0;
    const later = (after = 0) => {
      clearTimeout(timer);
      timer = setTimeout(() => use(field.value.trim()), after);
    };
    field.oninput = () => later(250);
    field.onkeydown = (event) => {
      if (event.key === "Enter") enter(event) || later();
      else if (event.key === "Escape") {
        field.value = "";
        later();
        app.reader.focus();
      } else if (event.key !== "ArrowDown" || down() === false) return;
      event.preventDefault();
    };
  }
  const filter = (rule) => choose({ where: rule });
  typed(
    where,
    filter,
    () => false,
    () => list.node.focus(),
  );
  typed(search, lookFor, (event) => {
    const again = app.matches?.query === search.value.trim().toLowerCase();
    if (again) nextMatch(event.shiftKey ? -1 : 1);
    return again;
  });
  press();

  const into = (field) => () => (field.focus(), field.select());
  return {
    parts: [
      counts,
      h("span.grow"),
      where,
      h("span.segments", { role: "group", label: "Presets" }, presets),
      sort,
      h("span.searching", search, found),
    ],
    wrong,
    choose,
    count,
    mark,
    toFilter: into(where),
    toSearch: into(search),
  };
}
