// The live training cell: state of a run, curves, finished groups, and control buttons.
import { announcer, clamp, fill, h, initialize, keepForm, keys, marked, mount, muted, num } from "./panel.js";
import { createCharts } from "./live/charts.js";

const PHASES = { rollouts: "Rollouts", judging: "Judging", training: "Training", syncing: "Syncing" };
const STATES = {
  ready: "ready",
  running: "running",
  pausing: "pausing after this step",
  paused: "paused",
  stopping: "stopping",
  done: "done",
  stopped: "stopped",
  failed: "failed",
  dead: "kernel ended",
  lost: "kernel not responding",
};
const KINDS = {
  running: "good",
  done: "good",
  failed: "bad",
  dead: "bad",
  lost: "bad",
  paused: "warn",
  pausing: "warn",
  stopping: "warn",
};
const BUTTONS = {
  start: ["Start", "Start, or continue from the last checkpoint (p)"],
  pause: ["Pause", "Pause after this step (p)"],
  resume: ["Resume", "Resume (p)"],
  stop_after_step: ["Stop after step", "Finish this step, then stop (s)"],
  stop: ["Stop now", "Discard this step and stop (S)"],
};
const OFFERED = {
  ready: ["start"],
  running: ["pause", "stop_after_step", "stop"],
  pausing: ["resume", "stop_after_step", "stop"],
  paused: ["resume", "stop"],
  stopping: ["stop"],
  done: [],
  stopped: ["start"],
  failed: ["start"],
  dead: [],
  lost: [],
};
const HELP = [
  ["p", "pause, resume, start"],
  ["s", "stop after this step"],
  ["S", "stop now, discard this step"],
  ["j k", "next, previous group"],
  ["Enter", "open the group below"],
  ["x", "close the open group"],
  ["G", "follow the newest group"],
  ["g", "first group"],
  ["F", "freeze: replace with static HTML"],
  ["?", "this help"],
];
const KEPT = 400;

/** Format seconds. @param {number} s */
const span = (s) =>
  s < 100
    ? `${s < 10 ? num(s, 2) : Math.round(s)} s`
    : s < 6000
      ? `${Math.round(s / 60)} min`
      : `${num(s / 3600, 2)} h`;
/** Format bytes. @param {number} b */
const size = (b) => (b >= 1e9 ? `${num(b / 2 ** 30)} GiB` : `${Math.round(b / 2 ** 20)} MiB`);

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  let tick = model.get("tick"),
    heardAt = Date.now(),
    columns = /** @type {string[]} */ ([]),
    charts = /** @type {any} */ (null);
  let asking = false,
    chosen = -1,
    follow = true,
    fresh = 0,
    opened = "";
  const rows = new Map(),
    groups = new Map();
  const say = announcer(root);

  // header ---------------------------------------------------------------------------------------------------------------

  const title = h("strong.live-title"),
    state = h("span.state"),
    step = h("span"),
    left = h("span.muted");
  const buttons = Object.fromEntries(
    Object.entries(BUTTONS).map(([name, [label, hint]]) => [
      name,
      h("button.button", { title: hint, onclick: () => press(name) }, label),
    ]),
  );
  const bar = h("div.live-bar", { role: "progressbar", label: "Steps", "aria-valuemin": 0 }, h("div"));
  const help = h(
    "div.live-help",
    { role: "dialog", label: "Keys", hidden: true },
    HELP.map(([key, what]) =>
      h(
        "div",
        key.split(" ").map((one) => h("span.kbd", one)),
        muted(what),
      ),
    ),
  );
  const freeze = h(
    "button.button.plain",
    { title: "Replace with static HTML (F)", onclick: () => ask("freeze") },
    "Freeze",
  );
  const more = h(
    "button.button.plain",
    { label: "Keys", title: "Keys (?)", "aria-expanded": "false", onclick: () => toggleHelp() },
    "?",
  );
  const head = h(
    "div.live-head",
    title,
    state,
    step,
    left,
    h("span.gap"),
    h("span.live-buttons", Object.values(buttons), freeze, more),
  );

  // notes, phases, facts -----------------------------------------------------------------------------------------------------------

  const stall = h("div.live-note.is-warn", { role: "status", hidden: true }),
    refused = h("div.live-note.is-bad", { role: "alert", hidden: true });
  const failure = h("div.live-note.is-bad", { role: "alert", hidden: true }),
    lessons = h("div.lessons");
  const phases = Object.fromEntries(
    Object.entries(PHASES).map(([name, label]) => {
      const now = h("span.phase-now"),
        time = h("span.num"),
        before = h("span.muted");
      return [
        name,
        {
          now,
          time,
          before,
          tile: h("div.phase", { "data-phase": name }, h("div.phase-name", h("i"), label, time), now, before),
          part: h("div", { "data-phase": name }),
        },
      ];
    }),
  );
  const shares = h(
    "div.shares",
    { role: "img" },
    Object.values(phases).map((one) => one.part),
  );
  const facts = h("div.live-facts");

  // groups -----------------------------------------------------------------------------------------------------------------

  const list = h("div.groups", { role: "listbox", label: "Finished groups", tabIndex: 0, onscroll: () => scrolled() });
  const newest = h("button.button.newest", { hidden: true, onclick: () => toNewest() });
  const count = h("span.muted"),
    earlier = h("button.button.plain", { hidden: true, onclick: () => older() }, "Earlier");
  const shut = h(
    "button.button.plain",
    { hidden: true, title: "Close the open group (x)", onclick: () => close() },
    "Close the open group",
  );
  const place = h("div");
  root.append(
    head,
    bar,
    help,
    refused,
    failure,
    stall,
    lessons,
    shares,
    h(
      "div.phases",
      Object.values(phases).map((one) => one.tile),
    ),
    facts,
    place,
    h("div.groups-head", h("strong", "Groups"), count, h("span.gap"), shut, earlier),
    h("div.groups-box", list, newest),
  );

  // requests to the kernel ------------------------------------------------------------------------------------------------------

  async function ask(command, args = {}) {
    try {
      const { reply } = await wire.request(command, args);
      refused.hidden = true;
      return reply;
    } catch (error) {
      if (/** @type {any} */ (error).name === "AbortError") return null;
      refused.hidden = false;
      fill(refused, marked(/** @type {any} */ (error).message));
      return null;
    }
  }
  async function press(action) {
    buttons[action].disabled = true;
    const reply = await ask("control", { action });
    buttons[action].disabled = false;
    if (reply) say(STATES[reply.status] ?? reply.status);
  }
  async function index() {
    if (asking) return;
    asking = true;
    const before = tick;
    const reply = await ask("index", { from_row: 0 });
    asking = false;
    if (!reply) return;
    if (!charts) {
      columns = reply.columns;
      charts = createCharts(columns);
      charts.follow(root.parentElement ?? root);
      place.append(charts.node);
    }
    rows.clear();
    for (const row of reply.rows) rows.set(row[0], row);
    take(reply.groups);
    update(tick === before ? reply.tick : tick); // a tick may have arrived before the reply
  }
  async function older() {
    const reply = await ask("earlier", { before: Math.min(...groups.keys()) });
    if (reply) {
      follow = false;
      take(reply.groups);
      drawGroups();
    }
  }
  async function open(i) {
    const group = groups.get(i);
    if (!group) return;
    choose(i);
    const reply = await ask("open_group", { group: group.id, step: group.step });
    if (!reply) return;
    opened = group.id;
    shut.hidden = false;
    mark();
    say(`group of step ${group.step} opened below`);
  }
  async function close() {
    if (opened && (await ask("close_group"))) {
      opened = "";
      shut.hidden = true;
      mark();
    }
  }

  // drawing ------------------------------------------------------------------------------------------------------------

  /** @param {any} next */
  function update(next) {
    const { status: before, step } = tick;
    tick = next;
    if (tick.step !== step && Date.now() > stale) keep();
    heardAt = Date.now();
    const missing =
      tick.points.some((row) => !rows.has(row[0]) && row[0] > rows.size && !rows.has(row[0] - 1)) || rows.size > 1500;
    for (const i of rows.keys()) if (i >= tick.rows) rows.delete(i);
    for (const row of tick.points) rows.set(row[0], row);
    const added = tick.groups.filter((group) => !groups.has(group.i)).length;
    take(tick.groups);
    draw();
    if (charts) charts.set([...rows.values()].sort((a, b) => a[0] - b[0]));
    if (!follow) fresh += added;
    drawGroups();
    if (missing) index();
    if (before !== tick.status) say(`${tick.title}: ${STATES[tick.status] ?? tick.status}`);
  }

  let stale = 0;
  /** Update the static HTML that is saved with the notebook, at most every five seconds. */
  async function keep() {
    stale = Date.now() + 5000;
    const form = (await ask("static_form"))?.html;
    if (form) keepForm(model, form);
  }

  function draw() {
    const live = !["ready", "done", "stopped", "failed", "dead"].includes(tick.status);
    const status = live && Date.now() - heardAt > 6000 ? "lost" : tick.status;
    title.textContent = tick.title;
    state.dataset.state = status;
    state.className = `art-badge art-state art-is-${KINDS[status]}`;
    state.textContent = STATES[status] ?? status;
    step.textContent = tick.at;
    const eta = tick.eta?.map(span);
    left.textContent = !eta || !live ? "" : `${eta[0] === eta[1] ? "" : `${eta[0]} – `}${eta[1]} left`;
    const offered = (OFFERED[status] ?? []).filter((name) => tick.here || name !== "start");
    for (const [name, node] of Object.entries(buttons)) node.hidden = !offered.includes(name);
    bar.firstChild.style.width = `${100 * Math.min(1, tick.step / (tick.steps || 1))}%`;
    bar.setAttribute("aria-valuenow", tick.step);
    bar.setAttribute("aria-valuemax", tick.steps);
    const words =
      status === "lost"
        ? `No update for ${span((Date.now() - heardAt) / 1000)}: the kernel was restarted, or the connection was lost. art.Run.attach("${tick.where}") shows the run again.`
        : status === "dead"
          ? `The training kernel ended at ${tick.at}. To continue from there, train again with the same name.`
          : tick.waits === "deaf"
            ? `A cell is waiting for the run, so this kernel ignores the buttons. To pause, interrupt the cell (■) or create the file ${tick.where}/STOP.`
            : tick.stall;
    stall.hidden = !words;
    if (words && stall.textContent !== words) stall.textContent = words;
    drawPhases(live);
    drawFacts();
    drawWarnings();
  }

  function drawPhases(live) {
    const current = tick.times,
      sum = Object.values(current).reduce((a, b) => a + b, 0),
      used = sum || !tick.past ? current : tick.past;
    const all = Object.values(used).reduce((a, b) => a + b, 0) || 1;
    const doing = {
      rollouts: `${tick.finished} of ${tick.expected}${tick.reward == null ? "" : `, reward ${num(tick.reward)}`}${tick.failed ? `, ${tick.failed} failed` : ""}`,
      judging: "",
      training: tick.micro[1] ? `batch ${tick.micro[0]} of ${tick.micro[1]}` : "",
      syncing: "",
    };
    for (const [name, part] of Object.entries(phases)) {
      const on = live && tick.phase === name && tick.status !== "paused";
      part.tile.classList.toggle("art-on", on);
      part.time.textContent = span(used[name]);
      part.now.textContent = on ? doing[name] || "…" : "";
      part.before.textContent = tick.past && used === current ? `${span(tick.past[name])} last step` : "";
      part.part.style.flexGrow = String(used[name] / all);
    }
    shares.setAttribute(
      "aria-label",
      `Time of the step: ${Object.entries(used)
        .map(([name, s]) => `${PHASES[name]} ${span(s)}`)
        .join(", ")}`,
    );
  }

  function drawFacts() {
    const { speeds, machine, judge } = tick,
      items = [];
    const fact = (name, value, extra) => h("span.fact", muted(name), " ", value, extra);
    if (speeds.sampled) items.push(fact("sampling", `${num(speeds.sampled)} tok/s`));
    if (speeds.trained) items.push(fact("training", `${num(speeds.trained)} tok/s`));
    if (machine.total) {
      const part = machine.used / machine.total,
        tight = part > 0.9;
      items.push(
        fact("memory", `${size(machine.used)} of ${size(machine.total)}`, [
          h(
            "span.meter",
            { role: "img", label: `${Math.round(part * 100)} % of memory used` },
            h("span", { class: tight ? "art-tight" : "", style: { width: `${100 * part}%` } }),
          ),
          machine.peak ? muted(`peak ${size(machine.peak)}`) : null,
          tight ? h("span.badge.is-bad", "almost full") : null,
        ]),
      );
    }
    if (machine.device)
      items.push(
        h(
          "span.badge",
          {
            class: `art-badge${machine.device === "CPU" ? " art-is-warn" : ""}`,
            title: machine.device === "CPU" ? "not using a GPU" : "training device",
          },
          machine.device,
        ),
      );
    if (judge) items.push(fact("judge", `${judge.groups} groups${judge.cost ? `, $${num(judge.cost)}` : ""}`));
    fill(facts, items);
  }

  let warned = "";
  function drawWarnings() {
    const now = JSON.stringify([tick.lessons, tick.notes, tick.failure]);
    if (now === warned) return;
    warned = now;
    fill(
      lessons,
      tick.lessons.map((one) =>
        h(
          "div.live-note.is-warn",
          { "data-lesson": one.key },
          h("div", h("strong", one.title), " ", one.finding),
          h("div", muted("Try: "), one.advice),
        ),
      ),
      tick.notes
        .filter((text) => !tick.failure?.message.startsWith(text.slice(0, 60)))
        .map((text) => h("div.live-note", marked(text))),
    );
    const f = tick.failure;
    failure.hidden = !f;
    if (f) {
      fill(
        failure,
        h("div", h("strong", `Failed in ${f.where}`), " ", marked(f.message)),
        h("div", muted("Try: "), f.remedy),
        h(
          "details",
          h("summary", `The last ${f.before.length} events and the traceback`),
          f.before.map((line) => h("div.mono", marked(line))),
          h("pre.mono.trace", marked(f.traceback)),
        ),
      );
    }
  }

  // list of groups ---------------------------------------------------------------------------------------------------------------

  function take(found) {
    for (const group of found) groups.set(group.i, group);
    while (groups.size > KEPT && follow) groups.delete(Math.min(...groups.keys()));
  }
  let drawn = new Map(),
    lowest = 0,
    highest = 1;
  function drawGroups() {
    const order = [...groups.keys()].sort((a, b) => a - b),
      values = order.flatMap((i) => groups.get(i).rewards);
    const low = Math.min(0, ...values),
      high = Math.max(...values, low + 1e-9),
      scaled = low !== lowest || high !== highest;
    [lowest, highest] = [low, high];
    const next = new Map();
    for (const i of order) {
      const text = JSON.stringify(groups.get(i)),
        old = drawn.get(i);
      next.set(i, old && old.text === text && !scaled ? old : { text, node: option(i) });
    }
    if (order.length !== drawn.size || order.some((i) => next.get(i) !== drawn.get(i))) {
      list.replaceChildren(...order.map((i) => next.get(i).node));
      drawn = next;
    }
    count.textContent = tick.seen ? `${tick.seen} finished` : "none finished yet";
    earlier.hidden = !order.length || order[0] <= Math.max(0, tick.seen - 512);
    newest.hidden = follow || !fresh;
    newest.textContent = `${fresh} new ↓`;
    mark();
    if (follow) list.scrollTop = list.scrollHeight;
  }
  function option(i) {
    const g = groups.get(i),
      full = highest - lowest || 1;
    return h(
      "div.group",
      { role: "option", id: `${list.id}-${i}`, "aria-selected": "false", onclick: () => open(i) },
      h("span.muted.num", g.step),
      h("span.group-name", { title: g.scenario }, marked(g.scenario || g.id)),
      h(
        "span.strip-of",
        { role: "img", label: `rewards ${g.rewards.join(", ")}` },
        g.rewards.map((r) =>
          h("i", {
            class: g.flat ? "art-flat" : "",
            style: { height: `${Math.max(8, (100 * (r - lowest)) / full)}%` },
          }),
        ),
      ),
      h("span.num", num(g.mean), muted(` ± ${num(g.std, 2)}`)),
      h(
        "span.marks",
        g.flat ? h("span.badge.is-warn", { title: "all rewards are equal: no gradient" }, "no variance") : null,
        g.failed ? h("span.badge.is-bad", `${g.failed} failed`) : null,
        g.judge ? h("span.badge", marked(g.judge)) : null,
      ),
    );
  }
  function mark() {
    for (const [i, { node }] of drawn) {
      node.setAttribute("aria-selected", String(i === chosen));
      node.classList.toggle("art-open", Boolean(opened) && groups.get(i)?.id === opened);
    }
    const node = drawn.get(chosen)?.node;
    if (node) list.setAttribute("aria-activedescendant", node.id);
    else list.removeAttribute("aria-activedescendant");
  }
  function choose(i) {
    chosen = i;
    follow = i === Math.max(...groups.keys());
    mark();
    drawn.get(i)?.node.scrollIntoView({ block: "nearest" });
  }
  function move(by) {
    const order = [...drawn.keys()];
    if (!order.length) return false;
    const from = order.indexOf(chosen);
    choose(order[from < 0 ? order.length - 1 : clamp(from + by, order.length)]);
  }
  function scrolled() {
    follow = list.scrollHeight - list.scrollTop - list.clientHeight < 12;
    if (follow) fresh = 0;
    newest.hidden = follow || !fresh;
  }
  function toNewest() {
    [follow, fresh, chosen] = [true, 0, Math.max(...groups.keys())];
    drawGroups();
  }
  function toggleHelp(show = help.hidden) {
    help.hidden = !show;
    more.setAttribute("aria-expanded", String(show));
  }

  // keys -------------------------------------------------------------------------------------------------------------------

  const now = (...names) => names.find((name) => !buttons[name].hidden);
  const act = (...names) => {
    const name = now(...names);
    return name ? press(name) : false;
  };
  list.id = `art-live-${Math.random().toString(36).slice(2, 8)}`;
  const unkey = keys(root, {
    p: () => act("resume", "pause", "start"),
    s: () => act("stop_after_step"),
    S: () => act("stop"),
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => (chosen < 0 ? false : open(chosen)),
    x: () => close(),
    F: () => ask("freeze"),
    G: () => toNewest(),
    g: () => {
      const first = Math.min(...drawn.keys());
      return Number.isFinite(first) ? choose(first) : false;
    },
    "?": () => toggleHelp(),
    Escape: () => (help.hidden ? false : toggleHelp(false)),
  });
  const ping = (message) => message?.ping && wire.request("pong").catch(() => null);
  model.on("msg:custom", ping);
  wire.onTick(update);
  wire.onGap(index);
  const clock = setInterval(draw, 1000);
  draw();
  index();
  return () => {
    clearInterval(clock);
    unkey();
    model.off("msg:custom", ping);
    charts?.end();
  };
}

export default { initialize, render: (host) => mount(host, build) };
