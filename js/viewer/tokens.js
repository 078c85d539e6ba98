// Tokens colored by a value. The color, the underline pattern and the figures show the same value.
import { append, fill, h, marked, num, visible } from "../panel.js";
import { array, halves } from "./index.js";

/** The values that tokens can be colored by: [key, label, description]. */
export const CHANNELS = [
  ["", "plain", ""],
  ["logprob", "logprob", "log probability of the token under the sampler"],
  ["entropy", "entropy", "entropy of the next-token distribution in nats"],
  ["advantage", "advantage", "reward above the group mean, in standard deviations"],
  ["ratio", "ratio", "importance ratio: learner probability / sampler probability"],
  ["mask", "trained", "whether the token is trained"],
  ["push", "push", "−∂loss/∂logprob: which tokens the next update reinforces or suppresses"],
];
const FIRST = 4000,
  CHUNK = 2000;
const FIXED = { logprob: [-5, 0], entropy: [0, 3], advantage: [-2, 2], ratio: [0.5, 1.5], mask: [0, 1], push: [-1, 1] };
const DIVERGING = ["advantage", "ratio", "push"];

/** Return the class of a value: s0 … s5 for one-sided scales, n4 … z … p4 for two-sided scales, m0/m1 for the mask, x if unknown. */
export function bucket(channel, value, [low, high] = FIXED[channel]) {
  if (value == null || Number.isNaN(value)) return "x";
  if (channel === "mask") return value > 0 ? "m1" : "m0";
  if (!DIVERGING.includes(channel)) {
    const strength = channel === "logprob" ? (high - value) / (high - low) : (value - low) / (high - low);
    return `s${Math.max(0, Math.min(5, Math.floor(strength * 5.999)))}`;
  }
  const side = (value - (low + high) / 2) / ((high - low) / 2),
    level = Math.min(4, Math.round(Math.abs(side) * 4));
  return level <= 0 ? "z" : `${side > 0 ? "p" : "n"}${level}`;
}

/** Create the legend: every class with its color and pattern, and the range of values. @param {string} channel @param {number[]} [range] */
export function legend(channel, range = FIXED[channel]) {
  const [low, high] = range,
    middle = (low + high) / 2;
  const steps =
    channel === "mask"
      ? ["m0", "m1"]
      : DIVERGING.includes(channel)
        ? ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"]
        : ["s0", "s1", "s2", "s3", "s4", "s5"];
  const ends =
    channel === "mask"
      ? ["not trained", "trained"]
      : channel === "push"
        ? ["suppressed", "reinforced"]
        : channel === "logprob"
          ? [`likely ${num(high)}`, `${num(low)} unlikely`]
          : [`${num(low)} or less`, `${num(high)} or more`];
  const about = CHANNELS.find(([key]) => key === channel)?.[2] ?? "";
  return h(
    "span.legend",
    { role: "img", label: `${about}; from ${ends[0]} to ${ends[1]}`, title: about },
    h("span", ends[0]),
    steps.map((step) =>
      h("span", { class: `art-tk art-tk-${step}` }, step === "z" && channel !== "push" ? num(middle) : "ab"),
    ),
    h("span", ends[1]),
  );
}

/** @param {any} app */
export function createTokens(app) {
  const { ui } = app;
  /** @type {Map<string, Promise<any>>} */ const cache = new Map();
  let places = [];
  const tip = h("div.tip", { role: "presentation", hidden: true });

  const watch = new IntersectionObserver(
    (seen) => seen.forEach(({ isIntersecting, target }) => isIntersecting && draw(target)),
    { rootMargin: "300px" },
  );

  /** Load the values of a turn's tokens. @param {number} id @param {number} turn */
  function load(id, turn) {
    return once(`${id}:${turn}`, async () => {
      const { reply, buffers } = await app.wire.request("tokens", { id, turn });
      const values = {};
      reply.channels.forEach((name, i) => (values[name] = halves(buffers[i + 1])));
      return { ...reply, offsets: reply.n ? array(buffers[0], "u4") : [], values };
    });
  }

  /** Load the gradient of a loss for the tokens of a turn. */
  function loadPush(id, turn) {
    return once(`${id}:${turn}:${ui.loss}`, async () => {
      const { reply, buffers } = await app.wire.request("lens_tokens", {
        id,
        turn,
        losses: ui.loss ? [ui.loss] : null,
      });
      if (!buffers.length || !reply.n) return { why: reply.why, values: null };
      const scale = reply.scale[0] || 1;
      return {
        why: reply.why,
        assumed: reply.assumed,
        scale,
        gradient: array(buffers[0], "f4"),
        values: array(buffers[0], "f4").map((value) => -value / scale),
      };
    });
  }

  function once(key, ask) {
    if (cache.size > 200) cache.clear();
    if (!cache.has(key))
      cache.set(
        key,
        ask().catch((error) => {
          cache.delete(key);
          throw error;
        }),
      );
    return cache.get(key);
  }

  /** Draw a turn that has become visible. */
  async function draw(body) {
    const place = places.find((one) => one.body === body),
      channel = ui.colour;
    if (!place || place.channel === channel + ui.loss) return;
    place.channel = channel + ui.loss;
    if (!channel) {
      place.stream = null;
      return place.restore();
    }
    try {
      const data = await load(place.id, place.turn);
      const push = channel === "push" ? await loadPush(place.id, place.turn) : null;
      if (place.channel !== ui.colour + ui.loss || !places.includes(place)) return;
      place.data = data;
      place.push = push;
      show(place, channel, data, push);
    } catch (error) {
      fill(body, h("div.note", marked(error.message)));
    }
  }

  function show(place, channel, data, push) {
    const values = channel === "push" ? push.values : data.values[channel],
      range = data.range?.[channel] ?? FIXED[channel];
    const why = !data.n
      ? Object.values(data.why ?? {})[0]
      : values
        ? channel === "mask"
          ? data.mask_why
          : push?.assumed
        : push
          ? push.why
          : data.why?.[channel];
    const note = why ? h("div.note", marked(why)) : null;
    if (!data.n) return (place.restore(), void (note && place.body.prepend(note)));
    const style = (k) => `art-tk art-tk-${bucket(channel, values?.[k], range)}`;
    if (place.stream) {
      for (const span of place.stream.children)
        span.className = style(span.dataset.k) + (span.classList.contains("art-is-chosen") ? " art-is-chosen" : "");
      fill(place.note, note);
      return;
    }
    place.note = h("div", note);
    place.stream = h("div.text.stream", {
      role: "group",
      tabIndex: 0,
      label: `${data.n} tokens of turn ${place.turn}, use arrow keys to select one`,
    });
    fill(place.body, place.note, place.stream);
    grow(place, 0, Math.min(FIRST, data.n), style);
  }

  /** Add tokens. Long turns are added in chunks, so that the page stays responsive. */
  function grow(place, from, to, style) {
    const { text, offsets, n } = place.data,
      stream = place.stream,
      part = document.createDocumentFragment();
    for (let k = from; k < to; k++) {
      const span = document.createElement("span");
      span.className = style(k);
      span.dataset.k = String(k);
      const piece = text.slice(offsets[k], offsets[k + 1]);
      if (piece === "") span.append(h("span.odd", "∅"));
      else
        piece
          .split("\n")
          .forEach((line, i) =>
            append(span, [i > 0 && [h("span.newline", { "aria-hidden": "true" }, "↵"), "\n"], marked(line)]),
          );
      part.append(span);
    }
    stream.append(part);
    if (to < n) setTimeout(() => place.stream === stream && grow(place, to, Math.min(n, to + CHUNK), style));
  }

  // one token ---------------------------------------------------------------------------------

  const of = (span) => ({
    span,
    k: Number(span.dataset.k),
    place: places.find((one) => one.stream === span.parentNode),
  });

  /** Return the values of a token as [name, value] pairs. */
  function figures({ k, place }) {
    const { values } = place.data,
      at = (name) => values[name]?.[k];
    const rows = [];
    if (values.logprob)
      rows.push(["log probability", num(at("logprob"))], ["probability", num(Math.exp(at("logprob")))]);
    for (const [name, label] of [
      ["entropy", "entropy"],
      ["advantage", "advantage"],
      ["ratio", "importance ratio"],
    ])
      if (values[name]) rows.push([label, num(at(name))]);
    if (values.mask) rows.push(["trained", at("mask") > 0 ? "yes" : "no"]);
    if (place.push?.gradient) rows.push(["∂loss/∂logprob", num(place.push.gradient[k])]);
    return rows;
  }
  const piece = ({ k, place }) => place.data.text.slice(place.data.offsets[k], place.data.offsets[k + 1]);

  function hover(event) {
    const span = event.target.closest?.("[data-k]");
    if (!span || !app.root.contains(span)) return void (tip.hidden = true);
    const token = of(span);
    if (!token.place) return;
    fill(
      tip,
      h("div.mono", JSON.stringify(visible(piece(token)))),
      figures(token).map(([name, value]) => h("div.pair", h("span", name), h("span", value))),
    );
    tip.hidden = false;
    const box = app.root.getBoundingClientRect(),
      at = span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(at.left - box.left, box.width - tip.offsetWidth - 8))}px`;
    const below = at.bottom - box.top + 6;
    tip.style.top = `${below + tip.offsetHeight > box.height ? at.top - box.top - tip.offsetHeight - 6 : below}px`;
  }

  function choose(span) {
    for (const old of app.root.querySelectorAll(".art-is-chosen")) old.classList.remove("art-is-chosen");
    if (!span) return app.inspector.close();
    span.classList.add("art-is-chosen");
    const token = of(span);
    app.inspector.open({
      id: token.place.id,
      turn: token.place.turn,
      k: token.k,
      text: piece(token),
      n: token.place.data.n,
      figures: figures(token),
    });
    app.announce(
      `token ${token.k + 1}, ${visible(piece(token))}, ${figures(token)
        .map((pair) => pair.join(" "))
        .join(", ")}`,
    );
  }

  function onKey(event) {
    const stream = event.target.closest(".art-stream");
    if (!stream || event.ctrlKey || event.metaKey || event.altKey) return;
    const chosen = stream.querySelector(".art-is-chosen");
    const next = {
      ArrowRight: () => (chosen ? chosen.nextSibling : stream.firstChild),
      ArrowLeft: () => chosen?.previousSibling,
      Enter: () => chosen ?? stream.firstChild,
    }[event.key];
    if (event.key === "Escape" && chosen) choose(null);
    else if (next) {
      const span = next();
      if (span) choose(span);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  return {
    tip,
    load,
    loadPush,
    /** Return a function that shows sampled messages of a rollout as colored tokens. @param {number} id of the rollout */
    painter: (id) => (body, message, restore) => {
      places.push({ id, turn: message.turn, body, restore, channel: "", stream: null });
      watch.observe(body);
    },
    /** Remove turns that are no longer shown. */
    reset() {
      watch.disconnect();
      places = [];
      tip.hidden = true;
    },
    /** Update the colors of all visible tokens. */
    recolour() {
      for (const { body } of places) {
        watch.unobserve(body);
        watch.observe(body);
      }
    },
    /** Add listeners for the tokens inside a node. @param {HTMLElement} node */
    listen: (node) =>
      Object.assign(node, {
        onmouseover: hover,
        onmouseleave: () => (tip.hidden = true),
        onclick: (event) => {
          const span = event.target.closest("[data-k]");
          if (span) choose(span);
        },
      }).addEventListener("keydown", onKey),
    choose,
    close: () => watch.disconnect(),
  };
}
