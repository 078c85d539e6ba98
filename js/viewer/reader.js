// One rollout: its position in the run, and its conversation turn by turn.
import { all, clamp, fill, h, marked, muted, visible } from "../panel.js";
import { joinPieces, thread } from "./thread.js";

/** @param {any} app */
export function createReader(app) {
  const { index, ui, wire } = app;
  const crumbs = h("div.crumbs"),
    body = h("div.conversation");
  const node = h("div.reader", { tabIndex: 0, role: "region", label: "Conversation" }, app.steps.node, body);
  let requests = 0,
    timer = 0,
    turns = /** @type {HTMLElement[]} */ ([]),
    current = -1;

  /** Select a rollout. During quick moves over many rollouts, only the last one is loaded. @param {number} id */
  function select(id, turn = null) {
    const changed = id !== ui.id || !body.firstChild || ui.ids.length;
    app.saveUi({ id, turn, ids: [] });
    app.sides.forget();
    app.steps.hide();
    if (!changed && turn === null) return;
    clearTimeout(timer);
    timer = setTimeout(() => read(id, turn), body.firstChild ? 30 : 0);
  }

  async function read(id, turn = null) {
    const request = ++requests;
    try {
      const { reply } = await wire.request("traj", { id });
      if (request === requests) show(reply, turn);
    } catch (error) {
      if (request !== requests) return;
      app.root.classList.remove("art-is-comparing");
      fill(body, h("p.note", marked(error.message)));
    }
  }

  /** Show another element instead of the conversation. @param {Node} element */
  function replace(element) {
    clearTimeout(timer);
    requests += 1;
    if (body.firstChild !== element) fill(body, element); // keep the focus if the element is already shown
  }

  function show(reply, turn) {
    const { id, messages, parts, error } = reply,
      allMessages = [...messages];
    let part = 0;
    const draw = () => {
      app.tokens.reset();
      fill(
        body,
        error && drawFailure(error),
        thread(joinPieces(allMessages), { paint: app.tokens.painter(id) }),
        part + 1 < parts && h("button.button", { onclick: loadMore }, "Load more"),
      );
      turns = all(body, "msg");
    };
    const loadMore = async () => {
      try {
        const { reply } = await wire.request("traj", { id, part: part + 1 });
        part += 1;
        allMessages.push(...reply.messages);
        draw();
      } catch (error) {
        app.notify(error.message);
      }
    };
    app.objective.close();
    app.root.classList.remove("art-is-comparing");
    drawCrumbs(reply);
    draw();
    node.scrollTop = 0;
    app.facts.show(reply);
    const target = turn !== null && turns.find((node) => node.dataset.turn === String(turn));
    const first = turns.findIndex((node) => node === target || (!target && node.dataset.turn !== undefined));
    toTurn(Math.max(0, first), Boolean(target));
    if (app.matches) app.finding.mark();
  }

  const drawFailure = ({ type, message, traceback }) =>
    h(
      "section.failure",
      h("strong", marked(type)),
      " ",
      marked(message),
      traceback && h("details.fold", h("summary", "traceback"), h("div.text.mono", marked(traceback))),
    );

  function drawCrumbs({ id, step, split, index: number, link }) {
    const group = index.groupOf(id);
    fill(
      crumbs,
      (index.stepped || step > 0) && h("span", `step ${step}`, !group.trained && ` ${split}`, muted(" › ")),
      h("span.name", { title: visible(group.name) }, marked(group.name)),
      muted(" › "),
      h("strong", { title: "Counted from 0" }, `rollout ${number}`),
      muted(` of ${group.size}`),
      h("button.button", { title: `(y) ${visible(link)}`, onclick: copyLink }, "Copy link"),
    );
    crumbs.dataset.link = link;
  }

  async function copyLink() {
    const text = crumbs.dataset.link + (ui.turn == null ? "" : `/${ui.turn}`);
    try {
      await navigator.clipboard.writeText(text);
      app.notify(`Copied: ${text}`);
    } catch {
      app.notify(text);
    }
  }

  /** Make a turn the current one. @param {number} n @param {boolean} [scroll] */
  function toTurn(n, scroll = true) {
    const nodes = ui.ids.length > 1 ? (app.sides.activePane ? all(app.sides.activePane, "msg") : []) : turns;
    if (!nodes.length) return;
    for (const node of all(body, "is-current")) node.classList.remove("art-is-current");
    current = clamp(n, nodes.length);
    const turnNode = /** @type {HTMLElement} */ (nodes[current]);
    turnNode.classList.add("art-is-current");
    const turn = turnNode.dataset.turn === undefined ? null : Number(turnNode.dataset.turn);
    if (turn !== ui.turn) app.saveUi({ turn });
    if (!scroll) return;
    turnNode.scrollIntoView({ block: turnNode.offsetHeight > node.clientHeight ? "start" : "nearest" });
    const role = turnNode.querySelector(".art-role")?.textContent;
    app.announce(`${role}${turn === null ? "" : ` turn ${turn}`}, ${current + 1} of ${nodes.length}`);
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
    replace,
    copyLink,
    focus: () => (node.focus(), true),
    goTo: (n) => toTurn(n),
    goBy: (offset) => toTurn(current + offset),
    showMessage(i) {
      const at = turns.findIndex((node) => node.dataset.message === String(i));
      if (at >= 0) toTurn(at);
    },
  };
}
