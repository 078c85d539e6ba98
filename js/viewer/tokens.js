// The tokens of a conversation, colored by a value (see token-colors.js). The color, the underline pattern and the figures
// show the same value.
import { all, append, fill, h, marked, num, visible } from "../panel.js";
import { halves, typedArray } from "./index.js";
import { colorClass } from "./token-colors.js";

const FIRST_CHUNK = 4000,
  CHUNK = 2000;

/** @param {any} app */
export function createTokens(app) {
  const { ui } = app;
  /** @type {Map<string, Promise<any>>} */ const cache = new Map();
  let turns = [];
  const tip = h("div.tip", { role: "presentation", hidden: true });

  const observer = new IntersectionObserver(
    (entries) => entries.forEach(({ isIntersecting, target }) => isIntersecting && draw(target)),
    { rootMargin: "300px" },
  );

  /** Load the values of a turn's tokens. @param {number} id @param {number} turn */
  function load(id, turn) {
    return cached(`${id}:${turn}`, async () => {
      const { reply, buffers } = await app.wire.request("tokens", { id, turn });
      const values = {};
      reply.channels.forEach((name, i) => (values[name] = halves(buffers[i + 1])));
      return { ...reply, offsets: reply.n ? typedArray(buffers[0], "u4") : [], values };
    });
  }

  /** Load the gradient of a loss for the tokens of a turn. */
  function loadGradients(id, turn) {
    return cached(`${id}:${turn}:${ui.loss}`, async () => {
      const { reply, buffers } = await app.wire.request("objective_tokens", {
        id,
        turn,
        losses: ui.loss ? [ui.loss] : null,
      });
      if (!buffers.length || !reply.n) return { why: reply.why, values: null };
      const scale = reply.scale[0] || 1;
      return {
        why: reply.why,
        assumed: reply.assumed,
        raw: typedArray(buffers[0], "f4"),
        values: typedArray(buffers[0], "f4").map((value) => -value / scale),
      };
    });
  }

  function cached(key, load) {
    if (cache.size > 200) cache.clear();
    if (!cache.has(key))
      cache.set(
        key,
        load().catch((error) => {
          cache.delete(key);
          throw error;
        }),
      );
    return cache.get(key);
  }

  /** Draw a turn that has become visible. */
  async function draw(body) {
    const turnView = turns.find((turn) => turn.body === body),
      channel = ui.color;
    if (!turnView || turnView.channel === channel + ui.loss) return;
    turnView.channel = channel + ui.loss;
    if (!channel) {
      turnView.stream = null;
      return turnView.restore();
    }
    try {
      const data = await load(turnView.id, turnView.turn);
      const gradients = channel === "gradient" ? await loadGradients(turnView.id, turnView.turn) : null;
      if (turnView.channel !== ui.color + ui.loss || !turns.includes(turnView)) return;
      turnView.data = data;
      turnView.gradients = gradients;
      show(turnView, channel, data, gradients);
    } catch (error) {
      fill(body, h("div.note", marked(error.message)));
    }
  }

  function show(turnView, channel, data, gradients) {
    const values = channel === "gradient" ? gradients.values : data.values[channel],
      range = data.range?.[channel];
    const reason = !data.n
      ? Object.values(data.why ?? {})[0]
      : values
        ? channel === "mask"
          ? data.mask_why
          : gradients?.assumed
        : gradients
          ? gradients.why
          : data.why?.[channel];
    const note = reason ? h("div.note", marked(reason)) : null;
    if (!data.n) return (turnView.restore(), void (note && turnView.body.prepend(note)));
    const style = (k) => `art-tk art-tk-${colorClass(channel, values?.[k], range)}`;
    if (turnView.stream) {
      for (const span of turnView.stream.children)
        span.className = style(span.dataset.k) + (span.classList.contains("art-is-chosen") ? " art-is-chosen" : "");
      fill(turnView.note, note);
      return;
    }
    turnView.note = h("div", note);
    turnView.stream = h("div.text.stream", {
      role: "group",
      tabIndex: 0,
      label: `${data.n} tokens of turn ${turnView.turn}, use arrow keys to select one`,
    });
    fill(turnView.body, turnView.note, turnView.stream);
    addTokens(turnView, 0, Math.min(FIRST_CHUNK, data.n), style);
  }

  /** Add tokens. Long turns are added in chunks, so that the page stays responsive. */
  function addTokens(turnView, from, to, style) {
    const { text, offsets, n } = turnView.data,
      stream = turnView.stream,
      fragment = document.createDocumentFragment();
    for (let k = from; k < to; k++) {
      const span = document.createElement("span");
      span.className = style(k);
      span.dataset.k = String(k);
      const tokenText = text.slice(offsets[k], offsets[k + 1]);
      if (tokenText === "") span.append(h("span.odd", "∅"));
      else
        tokenText
          .split("\n")
          .forEach((line, i) =>
            append(span, [i > 0 && [h("span.newline", { "aria-hidden": "true" }, "↵"), "\n"], marked(line)]),
          );
      fragment.append(span);
    }
    stream.append(fragment);
    if (to < n) setTimeout(() => turnView.stream === stream && addTokens(turnView, to, Math.min(n, to + CHUNK), style));
  }

  // one token ---------------------------------------------------------------------------------

  const tokenOf = (span) => ({
    span,
    k: Number(span.dataset.k),
    turnView: turns.find((turn) => turn.stream === span.parentNode),
  });

  /** Return the values of a token as [name, value] pairs. */
  function figures({ k, turnView }) {
    const { values } = turnView.data,
      valueOf = (name) => values[name]?.[k];
    const rows = [];
    if (values.logprob)
      rows.push(["log probability", num(valueOf("logprob"))], ["probability", num(Math.exp(valueOf("logprob")))]);
    for (const [name, label = name] of [["entropy"], ["advantage"], ["ratio", "importance ratio"]])
      if (values[name]) rows.push([label, num(valueOf(name))]);
    if (values.mask) rows.push(["trained", valueOf("mask") > 0 ? "yes" : "no"]);
    if (turnView.gradients?.raw) rows.push(["∂loss/∂logprob", num(turnView.gradients.raw[k])]);
    return rows;
  }
  const tokenText = ({ k, turnView }) =>
    turnView.data.text.slice(turnView.data.offsets[k], turnView.data.offsets[k + 1]);

  function showTip(event) {
    const span = event.target.closest?.("[data-k]");
    if (!span || !app.root.contains(span)) return void (tip.hidden = true);
    const token = tokenOf(span);
    if (!token.turnView) return;
    fill(
      tip,
      h("div.mono", JSON.stringify(visible(tokenText(token)))),
      figures(token).map(([name, value]) => h("div.pair", h("span", name), h("span", value))),
    );
    tip.hidden = false;
    const rootBox = app.root.getBoundingClientRect(),
      tokenBox = span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(tokenBox.left - rootBox.left, rootBox.width - tip.offsetWidth - 8))}px`;
    const bottom = tokenBox.bottom - rootBox.top + 6;
    tip.style.top = `${bottom + tip.offsetHeight > rootBox.height ? tokenBox.top - rootBox.top - tip.offsetHeight - 6 : bottom}px`;
  }

  function select(span) {
    for (const previous of all(app.root, "is-chosen")) previous.classList.remove("art-is-chosen");
    if (!span) return app.objective.close();
    span.classList.add("art-is-chosen");
    const token = tokenOf(span);
    app.objective.open({
      id: token.turnView.id,
      turn: token.turnView.turn,
      k: token.k,
      text: tokenText(token),
      n: token.turnView.data.n,
      figures: figures(token),
    });
    app.announce(
      `token ${token.k + 1}, ${visible(tokenText(token))}, ${figures(token)
        .map((pair) => pair.join(" "))
        .join(", ")}`,
    );
  }

  function onKey(event) {
    const stream = event.target.closest(".art-stream");
    if (!stream || event.ctrlKey || event.metaKey || event.altKey) return;
    const selected = stream.querySelector(".art-is-chosen");
    const moves = {
      ArrowRight: () => (selected ? selected.nextSibling : stream.firstChild),
      ArrowLeft: () => selected?.previousSibling,
      Enter: () => selected ?? stream.firstChild,
    }[event.key];
    if (event.key === "Escape" && selected) select(null);
    else if (moves) {
      const span = moves();
      if (span) select(span);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  return {
    tip,
    /** Return a function that shows sampled messages of a rollout as colored tokens. @param {number} id of the rollout */
    painter: (id) => (body, message, restore) => {
      turns.push({ id, turn: message.turn, body, restore, channel: "", stream: null });
      observer.observe(body);
    },
    /** Remove turns that are no longer shown. */
    reset() {
      observer.disconnect();
      turns = [];
      tip.hidden = true;
    },
    /** Update the colors of all visible tokens. */
    recolor() {
      for (const { body } of turns) {
        observer.unobserve(body);
        observer.observe(body);
      }
    },
    /** Add listeners for the tokens inside a node. @param {HTMLElement} node */
    listen: (node) =>
      Object.assign(node, {
        onmouseover: showTip,
        onmouseleave: () => (tip.hidden = true),
        onclick: (event) => {
          const span = event.target.closest("[data-k]");
          if (span) select(span);
        },
      }).addEventListener("keydown", onKey),
    choose: select,
    close: () => observer.disconnect(),
  };
}
