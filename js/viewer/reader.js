// One rollout: its position in the run, and its conversation turn by turn.
import { clamp, fill, h, marked, muted, visible } from "../panel.js";
import { joined, thread } from "./thread.js";

/** @param {any} app */
export function createReader(app) {
  const { index, ui, wire } = app;
  const crumbs = h("div.crumbs"),
    body = h("div.conversation");
  const node = h("div.reader", { tabIndex: 0, role: "region", label: "Conversation" }, app.steps.node, body);
  let reading = 0,
    timer = 0,
    turns = /** @type {HTMLElement[]} */ ([]),
    current = -1;

  /** Select a rollout. During quick moves over many rollouts, only the last one is loaded. @param {number} id */
  function select(id, turn = null) {
    const moved = id !== ui.id || !body.firstChild || ui.ids.length;
    app.keep({ id, turn, ids: [] });
    app.sides.forget();
    app.steps.hide();
    if (!moved && turn === null) return;
    clearTimeout(timer);
    timer = setTimeout(() => read(id, turn), body.firstChild ? 30 : 0);
  }

  async function read(id, turn = null) {
    const mine = ++reading;
    try {
      const { reply } = await wire.request("traj", { id });
      if (mine === reading) show(reply, turn);
    } catch (error) {
      if (mine !== reading) return;
      app.root.classList.remove("art-is-comparing");
      fill(body, h("p.note", marked(error.message)));
    }
  }

  /** Show another element instead of the conversation. @param {Node} other */
  function leave(other) {
    clearTimeout(timer);
    reading += 1;
    if (body.firstChild !== other) fill(body, other); // keep the focus if the element is already shown
  }

  function show(reply, turn) {
    const { id, messages, parts, error } = reply,
      all = [...messages];
    let part = 0;
    const draw = () => {
      app.tokens.reset();
      fill(
        body,
        error && failure(error),
        thread(joined(all), { paint: app.tokens.painter(id) }),
        part + 1 < parts && h("button.button", { onclick: more }, "Load more"),
      );
      turns = [...body.querySelectorAll(".art-msg")];
    };
    const more = async () => {
      part += 1;
      all.push(...(await wire.request("traj", { id, part })).reply.messages);
      draw();
    };
    app.inspector.close();
    app.root.classList.remove("art-is-comparing");
    crumb(reply);
    draw();
    node.scrollTop = 0;
    app.facts.show(reply);
    const wanted = turn !== null && turns.find((one) => one.dataset.turn === String(turn));
    const said = turns.findIndex((one) => one === wanted || (!wanted && one.dataset.turn !== undefined));
    toTurn(Math.max(0, said), Boolean(wanted));
    if (app.matches) app.finding.mark();
  }

  const failure = ({ type, message, traceback }) =>
    h(
      "section.failure",
      h("strong", marked(type)),
      " ",
      marked(message),
      traceback && h("details.fold", h("summary", "traceback"), h("div.text.mono", marked(traceback))),
    );

  function crumb({ id, step, split, index: nth, link, place }) {
    const group = index.groupOf(id);
    fill(
      crumbs,
      index.stepped && h("span", `step ${step}`, split === "train" ? "" : ` ${split}`, muted(" › ")),
      h("span.name", { title: visible(group?.name) }, marked(group?.name || `group ${place}`)),
      muted(" › "),
      h("strong", `rollout ${nth}`),
      muted(` of ${group?.size ?? 1}`),
      h("button.button.plain", { title: `Copy the link (y): ${visible(link)}`, onclick: copyLink }, "link"),
    );
    crumbs.dataset.link = link;
  }

  async function copyLink() {
    const text = crumbs.dataset.link + (ui.turn == null ? "" : `/${ui.turn}`);
    try {
      await navigator.clipboard.writeText(text);
      app.say(`Copied: ${text}`);
    } catch {
      app.say(text);
    }
  }

  /** Make a turn the current one. @param {number} n @param {boolean} [scrolled] */
  function toTurn(n, scrolled = true) {
    const all = ui.ids.length > 1 ? [...(app.sides.activePane?.querySelectorAll(".art-msg") ?? [])] : turns;
    if (!all.length) return;
    for (const one of body.querySelectorAll(".art-is-current")) one.classList.remove("art-is-current");
    current = clamp(n, all.length);
    const at = /** @type {HTMLElement} */ (all[current]);
    at.classList.add("art-is-current");
    const turn = at.dataset.turn === undefined ? null : Number(at.dataset.turn);
    if (turn !== ui.turn) app.keep({ turn });
    if (!scrolled) return;
    at.scrollIntoView({ block: at.offsetHeight > node.clientHeight ? "start" : "nearest" });
    const role = at.querySelector(".art-role")?.textContent;
    app.announce(`${role}${turn === null ? "" : ` turn ${turn}`}, ${current + 1} of ${all.length}`);
  }
  body.onclick = (event) => {
    const at = turns.indexOf(event.target.closest(".art-msg"));
    if (at >= 0) toTurn(at, false);
  };

  return {
    node,
    body,
    crumbs,
    select,
    read,
    leave,
    copyLink,
    focus: () => (node.focus(), true),
    to: (n) => toTurn(n),
    by: (n) => toTurn(current + n),
    showMessage(i) {
      const at = turns.findIndex((one) => one.dataset.message === String(i));
      if (at >= 0) toTurn(at);
    },
  };
}
