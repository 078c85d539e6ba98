// The live training cell: state of a run, curves, finished groups, and control buttons.
import { announcer, clamp, fill, h, initialize, keys, marked, mount, muted, num, saveStaticHtml } from "./panel.js";
import { createCharts } from "./live/charts.js";
import { formatBytes, formatDuration } from "./live/format.js";

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
const STATE_KINDS = {
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
const OFFERED_BUTTONS = {
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
  ["F", "make static: replace with static HTML"],
  ["?", "this help"],
];
/** Show the parts of a text between backticks as code. @param {string} text */
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", part) : part));
const MAX_GROUPS = 400;
const ENDED = ["ready", "done", "stopped", "failed", "dead"];
const MAKE_STATIC = "Make static",
  CONFIRM_MS = 4000;

/** @param {HTMLElement} root @param {any} wire @param {any} model */
function build(root, wire, model) {
  let runState = model.get("tick"),
    lastUpdateAt = Date.now(),
    charts = /** @type {any} */ (null);
  let loadingUntil = 0,
    missingFrom = /** @type {number|null} */ (null), // the first row that is missing in `rows`
    selected = -1,
    follow = true,
    newCount = 0,
    openGroupId = "";
  const rows = new Map(),
    groups = new Map();
  const announce = announcer(root);

  // header ---------------------------------------------------------------------------------------------------------------

  const title = h("strong.live-title"),
    state = h("span.state"),
    step = h("span"),
    remaining = h("span.muted");
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
        key.split(" ").map((entry) => h("span.kbd", entry)),
        muted(what),
      ),
    ),
  );
  const staticButton = h(
    "button.button.plain",
    { title: "Replace with static HTML (F)", onclick: () => makeStatic() },
    MAKE_STATIC,
  );
  const helpButton = h(
    "button.button.plain",
    { label: "Keys", title: "Keys (?)", "aria-expanded": "false", onclick: () => toggleHelp() },
    "?",
  );
  const head = h(
    "div.live-head",
    title,
    state,
    step,
    remaining,
    h("span.gap"),
    h("span.live-buttons", Object.values(buttons), staticButton, helpButton),
  );

  // notes, phases, facts -----------------------------------------------------------------------------------------------------------

  const warning = h("div.live-note.is-warn", { role: "status", hidden: true }),
    errorNote = h("div.live-note.is-bad", { role: "alert", hidden: true });
  const failure = h("div.live-note.is-bad", { role: "alert", hidden: true }),
    warningList = h("div.live-warnings");
  const phases = Object.fromEntries(
    Object.entries(PHASES).map(([name, label]) => {
      const progress = h("span.phase-now"),
        thisTime = h("span.num"),
        lastTime = h("span.muted");
      return [
        name,
        {
          progress,
          thisTime,
          lastTime,
          tile: h(
            "div.phase",
            { "data-phase": name },
            h("div.phase-name", h("i"), label, thisTime),
            progress,
            lastTime,
          ),
          part: h("div", { "data-phase": name }),
        },
      ];
    }),
  );
  const shares = h(
    "div.shares",
    { role: "img" },
    Object.values(phases).map((entry) => entry.part),
  );
  const facts = h("div.live-facts");

  // groups -----------------------------------------------------------------------------------------------------------------

  const list = h("div.groups", { role: "listbox", label: "Finished groups", tabIndex: 0, onscroll: () => onScroll() });
  const newestButton = h("button.button.newest", { hidden: true, onclick: () => goToNewest() });
  const count = h("span.muted"),
    earlierButton = h("button.button.plain", { hidden: true, onclick: () => loadEarlier() }, "Earlier");
  const closeButton = h(
    "button.button.plain",
    { hidden: true, title: "Close the open group (x)", onclick: () => close() },
    "Close the open group",
  );
  const chartsPlace = h("div.charts");
  root.append(
    head,
    bar,
    help,
    errorNote,
    failure,
    warning,
    warningList,
    shares,
    h(
      "div.phases",
      Object.values(phases).map((entry) => entry.tile),
    ),
    facts,
    chartsPlace,
    h("div.groups-head", h("strong", "Groups"), count, h("span.gap"), closeButton, earlierButton),
    h(
      "div.groups-box",
      h(
        "div.group-names",
        { "aria-hidden": "true" },
        ["Step", "Scenario", "Rewards", "Mean ± std"].map((name) => h("span", name)),
      ),
      list,
      newestButton,
    ),
  );

  // requests to the kernel ------------------------------------------------------------------------------------------------------

  async function request(command, args = {}) {
    try {
      const { reply } = await wire.request(command, args);
      errorNote.hidden = true;
      return reply;
    } catch (error) {
      if (/** @type {any} */ (error).name === "AbortError") return null;
      errorNote.hidden = false;
      fill(errorNote, marked(/** @type {any} */ (error).message));
      return null;
    }
  }
  async function press(action) {
    buttons[action].disabled = true;
    const reply = await request("control", { action });
    buttons[action].disabled = false;
    if (reply) announce(STATES[reply.status] ?? reply.status);
  }
  /** Load the history, or only its rows from a row on. @param {number} [fromRow] */
  async function loadIndex(fromRow = 0) {
    if (Date.now() < loadingUntil) return;
    loadingUntil = Date.now() + 10_000; // a lost request is sent again after ten seconds
    const previousState = runState;
    const reply = await request("index", { from_row: fromRow });
    if (!reply) return;
    loadingUntil = 0;
    missingFrom = null;
    if (charts?.count !== reply.columns.length) {
      charts?.end();
      charts = createCharts(reply.charts, reply.columns);
      charts.follow(root.parentElement ?? root);
      fill(chartsPlace, charts.node);
    }
    if (!fromRow) rows.clear();
    for (const row of reply.rows) rows.set(row[0], row);
    addGroups(reply.groups);
    update(runState === previousState ? reply.tick : runState); // an update may have arrived before the reply
  }
  async function loadEarlier() {
    const reply = await request("earlier", { before: Math.min(...groups.keys()) });
    if (reply) {
      follow = false;
      addGroups(reply.groups);
      drawGroups();
    }
  }
  async function open(i) {
    const group = groups.get(i);
    if (!group) return;
    select(i);
    const reply = await request("open_group", { group: group.id, step: group.step });
    if (!reply) return;
    openGroupId = group.id;
    closeButton.hidden = false;
    markSelected();
    announce(`group of step ${group.step} opened below`);
  }
  async function close() {
    if (openGroupId && (await request("close_group"))) {
      openGroupId = "";
      closeButton.hidden = true;
      markSelected();
    }
  }

  // drawing ------------------------------------------------------------------------------------------------------------

  /** @param {any} next */
  function update(next) {
    const { status: previousStatus, step } = runState;
    runState = next;
    if (runState.step !== step && Date.now() > nextSaveAt) updateStaticHtml();
    lastUpdateAt = Date.now();
    for (const i of rows.keys()) if (i >= runState.rows) rows.delete(i);
    const nextRow = Math.max(-1, ...rows.keys()) + 1;
    if (runState.points.length && runState.points[0][0] > nextRow) missingFrom ??= nextRow;
    const hasNewChart = charts && runState.points.length && runState.points[0].length !== charts.count + 1;
    if (!hasNewChart) for (const row of runState.points) rows.set(row[0], row);
    const addedCount = runState.groups.filter((group) => !groups.has(group.i)).length;
    addGroups(runState.groups);
    draw();
    if (charts) charts.set([...rows.values()].sort((a, b) => a[0] - b[0]));
    if (!follow) newCount += addedCount;
    drawGroups();
    if (!charts || rows.size > 1500 || hasNewChart) loadIndex();
    else if (missingFrom != null) loadIndex(missingFrom);
    if (previousStatus !== runState.status)
      announce(`${runState.title}: ${STATES[runState.status] ?? runState.status}`);
  }

  let nextSaveAt = 0;
  /** Update the static HTML that is saved with the notebook, at most every five seconds. */
  async function updateStaticHtml() {
    nextSaveAt = Date.now() + 5000;
    const html = (await request("static_form"))?.html;
    if (html) saveStaticHtml(model, html);
  }

  function draw() {
    const isLive = !ENDED.includes(runState.status);
    const status = isLive && Date.now() - lastUpdateAt > 6000 ? "lost" : runState.status;
    title.textContent = runState.title;
    state.dataset.state = status;
    const untrained = status === "done" && runState.untrained;
    state.className = `art-badge art-state art-is-${untrained ? "warn" : STATE_KINDS[status]}`;
    state.textContent = (STATES[status] ?? status) + (untrained ? ", nothing was trained" : "");
    step.textContent = runState.at;
    const eta = runState.eta?.map(formatDuration);
    remaining.textContent = !eta || !isLive ? "" : `${eta[0] === eta[1] ? "" : `${eta[0]} – `}${eta[1]} left`;
    const offered = (OFFERED_BUTTONS[status] ?? []).filter((name) => runState.here || name !== "start");
    for (const [name, node] of Object.entries(buttons)) node.hidden = !offered.includes(name);
    bar.firstChild.style.width = `${100 * Math.min(1, runState.step / (runState.steps || 1))}%`;
    bar.setAttribute("aria-valuenow", runState.step);
    bar.setAttribute("aria-valuemax", runState.steps);
    const text =
      status === "lost"
        ? `No update for ${formatDuration((Date.now() - lastUpdateAt) / 1000)}: the kernel was restarted, or the connection was lost. art.Run.attach("${runState.where}") shows the run again.`
        : status === "dead"
          ? `The training kernel ended at ${runState.at}. To continue from there, train again with the same name.`
          : runState.button_stage === "unavailable"
            ? `A cell is waiting for the run, so this kernel ignores the buttons. To pause, interrupt the cell (■) or create the file ${runState.where}/PAUSE. To stop, create ${runState.where}/STOP.`
            : runState.stall;
    warning.hidden = !text;
    if (text && warning.textContent !== text) warning.textContent = text;
    drawPhases(isLive);
    drawFacts();
    drawWarnings();
  }

  function drawPhases(isLive) {
    const current = runState.times,
      sum = Object.values(current).reduce((a, b) => a + b, 0),
      times = sum || !runState.past ? current : runState.past;
    const total = Object.values(times).reduce((a, b) => a + b, 0) || 1;
    const progress = {
      rollouts: `${runState.finished} of ${runState.expected}${runState.reward == null ? "" : `, reward ${num(runState.reward)}`}${runState.failed ? `, ${runState.failed} failed` : ""}`,
      judging: "",
      training: runState.micro[1] ? `batch ${runState.micro[0]} of ${runState.micro[1]}` : "",
      syncing: "",
    };
    for (const [name, phase] of Object.entries(phases)) {
      const isActive = isLive && runState.phase === name && runState.status !== "paused";
      phase.tile.classList.toggle("art-on", isActive);
      phase.thisTime.textContent = times[name] ? formatDuration(times[name]) : "–";
      phase.progress.textContent = isActive ? progress[name] || "…" : "";
      phase.lastTime.textContent =
        runState.past?.[name] && times === current ? `${formatDuration(runState.past[name])} last step` : "";
      phase.part.style.flexGrow = String(times[name] / total);
    }
    shares.setAttribute(
      "aria-label",
      `Time of the step: ${Object.entries(times)
        .map(([name, s]) => `${PHASES[name]} ${formatDuration(s)}`)
        .join(", ")}`,
    );
  }

  function drawFacts() {
    const { speeds, machine, judge } = runState,
      items = [];
    const fact = (name, value, extra) => h("span.fact", muted(name), " ", value, extra);
    if (speeds.sampled) items.push(fact("sampling", `${num(speeds.sampled)} tok/s`));
    if (speeds.trained) items.push(fact("training", `${num(speeds.trained)} tok/s`));
    if (machine.total) {
      const share = machine.used / machine.total,
        isAlmostFull = share > 0.9;
      items.push(
        fact("memory", `${formatBytes(machine.used)} of ${formatBytes(machine.total)}`, [
          h(
            "span.meter",
            { role: "img", label: `${Math.round(share * 100)} % of memory used` },
            h("span", { class: isAlmostFull ? "art-tight" : "", style: { width: `${100 * share}%` } }),
          ),
          machine.peak ? muted(`peak ${formatBytes(machine.peak)}`) : null,
          isAlmostFull ? h("span.badge.is-bad", "almost full") : null,
        ]),
      );
    }
    if (machine.device) items.push(h("span.badge", { title: "The device that trains" }, machine.device));
    if (judge) items.push(fact("judge", `${judge.groups} groups${judge.cost ? `, $${num(judge.cost)}` : ""}`));
    fill(facts, items);
  }

  // A page of the documentation: its web address, or its file if there is no website.
  function pageReference(address) {
    return /^https:/.test(address)
      ? h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, address)
      : h("code", address);
  }

  // During a run, a second click confirms, because the static form has no buttons.
  let confirmUntil = 0;
  function makeStatic() {
    if (ENDED.includes(runState.status) || Date.now() < confirmUntil) return request("freeze");
    confirmUntil = Date.now() + CONFIRM_MS;
    staticButton.textContent = "Click again to confirm: the run continues";
    announce(staticButton.textContent);
    setTimeout(() => (staticButton.textContent = MAKE_STATIC), CONFIRM_MS);
  }

  let drawnWarnings = "";
  function drawWarnings() {
    const shown = JSON.stringify([runState.warnings, runState.notes, runState.failure]);
    if (shown === drawnWarnings) return;
    drawnWarnings = shown;
    fill(
      warningList,
      runState.notes
        .filter((text) => !runState.failure?.message.startsWith(text.slice(0, 60)))
        .map((text) => h("div.live-note", marked(text))),
      runState.warnings.map(({ key, title, finding, advice }) =>
        h(
          "div.live-note.is-warn",
          { "data-warning": key },
          h("div", h("strong", title), " ", finding),
          h("div", muted("Try: "), withCode(advice)),
        ),
      ),
      runState.warnings.length
        ? h("div.live-note", muted("Explained in "), pageReference(runState.warnings_page))
        : null,
    );
    const error = runState.failure;
    failure.hidden = !error;
    if (error) {
      fill(
        failure,
        h("div", h("strong", `Failed in ${error.where}`), " ", marked(error.message)),
        h("div", muted("Try: "), withCode(error.advice)),
        h(
          "details",
          h("summary", `The last ${error.before.length} events and the traceback`),
          error.before.map((line) => h("div.mono", marked(line))),
          h("pre.mono.trace", marked(error.traceback)),
        ),
      );
    }
  }

  // list of groups ---------------------------------------------------------------------------------------------------------------

  function addGroups(newGroups) {
    for (const group of newGroups) groups.set(group.i, group);
    while (groups.size > MAX_GROUPS && follow) groups.delete(Math.min(...groups.keys()));
  }
  let drawnGroups = new Map(),
    lowest = 0,
    highest = 1;
  function drawGroups() {
    const order = [...groups.keys()].sort((a, b) => a - b),
      values = order.flatMap((i) => groups.get(i).rewards);
    const low = Math.min(0, ...values),
      high = Math.max(...values, low + 1e-9),
      isRescaled = low !== lowest || high !== highest;
    [lowest, highest] = [low, high];
    const next = new Map();
    for (const i of order) {
      const text = JSON.stringify(groups.get(i)),
        previous = drawnGroups.get(i);
      next.set(i, previous && previous.text === text && !isRescaled ? previous : { text, node: groupRow(i) });
    }
    if (order.length !== drawnGroups.size || order.some((i) => next.get(i) !== drawnGroups.get(i))) {
      list.replaceChildren(...order.map((i) => next.get(i).node));
      drawnGroups = next;
    }
    count.textContent = runState.seen ? `${runState.seen} finished` : "none finished yet";
    earlierButton.hidden = !order.length || order[0] <= Math.max(0, runState.seen - 512);
    newestButton.hidden = follow || !newCount;
    newestButton.textContent = `${newCount} new ↓`;
    markSelected();
    if (follow) list.scrollTop = list.scrollHeight;
  }
  function groupRow(i) {
    const group = groups.get(i),
      range = highest - lowest || 1;
    return h(
      "div.group",
      { role: "option", id: `${list.id}-${i}`, "aria-selected": "false", onclick: () => open(i) },
      h("span.muted.num", group.step),
      h("span.group-name", { title: group.scenario }, marked(group.scenario || group.id)),
      h(
        "span.strip-of",
        { role: "img", label: `rewards ${group.rewards.join(", ")}` },
        group.rewards.map((r) =>
          h("i", {
            class: group.flat ? "art-flat" : "",
            style: { height: `${Math.max(8, (100 * (r - lowest)) / range)}%` },
          }),
        ),
      ),
      h("span.num", num(group.mean), muted(` ± ${num(group.std, 2)}`)),
      h(
        "span.marks",
        group.flat ? h("span.badge.is-warn", { title: "Nothing is learned from this group" }, "equal rewards") : null,
        group.failed ? h("span.badge.is-bad", `${group.failed} failed`) : null,
        group.judge ? h("span.badge", marked(group.judge)) : null,
      ),
    );
  }
  function markSelected() {
    for (const [i, { node }] of drawnGroups) {
      node.setAttribute("aria-selected", String(i === selected));
      node.classList.toggle("art-open", Boolean(openGroupId) && groups.get(i)?.id === openGroupId);
    }
    const node = drawnGroups.get(selected)?.node;
    if (node) list.setAttribute("aria-activedescendant", node.id);
    else list.removeAttribute("aria-activedescendant");
  }
  function select(i) {
    selected = i;
    follow = i === Math.max(...groups.keys());
    markSelected();
    drawnGroups.get(i)?.node.scrollIntoView({ block: "nearest" });
  }
  function move(offset) {
    const order = [...drawnGroups.keys()];
    if (!order.length) return false;
    const current = order.indexOf(selected);
    select(order[current < 0 ? order.length - 1 : clamp(current + offset, order.length)]);
  }
  function onScroll() {
    follow = list.scrollHeight - list.scrollTop - list.clientHeight < 12;
    if (follow) newCount = 0;
    newestButton.hidden = follow || !newCount;
  }
  function goToNewest() {
    follow = true;
    newCount = 0;
    selected = Math.max(...groups.keys());
    drawGroups();
  }
  function toggleHelp(show = help.hidden) {
    help.hidden = !show;
    helpButton.setAttribute("aria-expanded", String(show));
  }

  // keys -------------------------------------------------------------------------------------------------------------------

  const firstVisible = (...names) => names.find((name) => !buttons[name].hidden);
  const pressFirst = (...names) => {
    const name = firstVisible(...names);
    return name ? press(name) : false;
  };
  list.id = `art-live-${Math.random().toString(36).slice(2, 8)}`;
  const stopKeys = keys(root, {
    p: () => pressFirst("resume", "pause", "start"),
    s: () => pressFirst("stop_after_step"),
    S: () => pressFirst("stop"),
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => (selected < 0 ? false : open(selected)),
    x: () => close(),
    F: () => makeStatic(),
    G: () => goToNewest(),
    g: () => {
      const first = Math.min(...drawnGroups.keys());
      return Number.isFinite(first) ? select(first) : false;
    },
    "?": () => toggleHelp(),
    Escape: () => (help.hidden ? false : toggleHelp(false)),
  });
  const onPing = (message) => message?.ping && wire.request("pong").catch(() => null);
  model.on("msg:custom", onPing);
  wire.onTick(update);
  wire.onGap(() => loadIndex());
  const timer = setInterval(() => {
    if (!charts) loadIndex();
    draw();
  }, 1000);
  draw();
  loadIndex();
  return () => {
    clearInterval(timer);
    stopKeys();
    model.off("msg:custom", onPing);
    charts?.end();
  };
}

export default { initialize, render: (host) => mount(host, build) };
