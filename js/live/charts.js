// Curves over the training steps: one card per metric, with a common crosshair.
import uPlot from "uplot";
import { h, num, perFrame } from "../panel.js";

/** @typedef {{key: string, title: string, hint: string, percent?: boolean, zero?: boolean, band?: string, wide?: boolean}} Chart */

/** @type {Chart[]} */
export const CHARTS = [
  {
    key: "reward",
    title: "Reward",
    hint: "mean of the step; band: standard deviation within groups",
    band: "std",
    wide: true,
  },
  {
    key: "kl",
    title: "KL",
    hint: "KL of the policy to its reference, or to the sampler if there is no reference",
    zero: true,
  },
  { key: "entropy", title: "Entropy", hint: "nats per token", zero: true },
  { key: "grad", title: "Gradient norm", hint: "before clipping", zero: true },
  { key: "length", title: "Length", hint: "sampled tokens per rollout", zero: true },
  {
    key: "flat",
    title: "Groups without variance",
    hint: "all rewards are equal: no gradient",
    percent: true,
    zero: true,
  },
  { key: "truncated", title: "Truncated", hint: "rollouts that reached the token limit", percent: true, zero: true },
];

const share = (value) => (value == null ? "–" : `${Math.round(value * 100)} %`);

/**
 * Create the grid of curves.
 * @param {string[]} columns names of the values of a row, after its index
 */
export function createCharts(columns) {
  const probe = h("i", { hidden: true }),
    node = h("div.curves", probe);
  const paint = (name) => {
    probe.style.color = `var(--art-${name})`;
    return getComputedStyle(probe).color;
  };
  const at = Object.fromEntries(columns.map((name, i) => [name, i + 1]));
  /** @type {any[]} */
  let rows = [];
  const cards = CHARTS.map((chart) => card(chart));
  node.append(...cards.map((one) => one.figure));

  /** @param {Chart} chart */
  function card(chart) {
    const say = chart.percent ? share : num;
    const value = h("output.curve-value", "–"),
      plot = h("div.plot");
    const figure = h(
      chart.wide ? "figure.curve.wide" : "figure.curve",
      { role: "img" },
      h("figcaption", { title: chart.hint }, h("span.muted", chart.title), value),
      plot,
    );
    /** @type {any} */
    let u = null;
    const cross = h("div.cross", { hidden: true });
    const axis = {
      stroke: () => paint("muted"),
      grid: { stroke: () => paint("line"), width: 1 },
      ticks: { show: false },
      font: "11px sans-serif",
      gap: 3,
    };
    const line = {
      stroke: () => paint("accent"),
      width: 1.8,
      points: { show: (self) => self.data[0].length < 3, size: 5, fill: () => paint("accent") },
    };
    const edge = { stroke: "transparent", points: { show: false }, width: 0 };
    const range = (self, low, high) => {
      if (low == null) return [0, 1];
      const from = chart.zero ? Math.min(0, low) : low,
        room = (high - from || Math.abs(high) || 1) * 0.08;
      return [
        chart.zero && low >= 0 ? 0 : from - room,
        chart.percent ? Math.max(0.1, Math.min(1.02, high + room)) : high + room,
      ];
    };
    const start = (width) =>
      new uPlot(
        {
          width,
          height: chart.wide ? 218 : 92,
          padding: [6, 8, chart.wide ? 0 : 7, 0],
          legend: { show: false },
          cursor: { show: false },
          select: { show: false },
          scales: { x: { time: false }, y: { range } },
          axes: [
            {
              ...axis,
              show: Boolean(chart.wide),
              size: 22,
              incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
              grid: { show: false },
            },
            {
              ...axis,
              size: 40,
              space: chart.wide ? 34 : 30,
              values: (self, ticks) => ticks.map((tick) => (chart.percent ? share(tick) : num(tick))),
            },
          ],
          series: [{}, ...(chart.band ? [edge, edge] : []), line],
          bands: chart.band ? [{ series: [1, 2], fill: () => paint("accent-bg") }] : [],
        },
        data(),
        plot,
      );
    const last = () => rows.findLastIndex?.((row) => row[at[chart.key]] != null) ?? rows.length - 1;
    /** @param {number|null} [i] */
    function show(i) {
      const row = rows[i ?? last()],
        spread = chart.band && row?.[at[chart.band]];
      value.textContent =
        (row ? say(row[at[chart.key]]) : "–") +
        (spread ? ` ± ${num(spread)}` : "") +
        (i != null && row ? ` · step ${row[at.step]}` : "");
    }
    /** Show the crosshair at a row. @param {number|null} i */
    function cut(i) {
      cross.hidden = i == null || !rows[i] || !u;
      if (!cross.hidden) cross.style.left = `${u.valToPos(u.data[0][i ?? 0], "x")}px`;
      show(cross.hidden ? null : i);
    }
    function data() {
      const values = rows.map((row) => row[at[chart.key]] ?? null),
        steps = rows.map((row) => row[at.step] ?? row[0]);
      if (!chart.band) return [steps, values];
      const spread = rows.map((row) => row[at[chart.band ?? ""]] ?? 0);
      return [steps, ...[1, -1].map((sign) => values.map((v, i) => (v == null ? null : v + sign * spread[i]))), values];
    }
    return {
      figure,
      cut,
      draw() {
        const known = rows.map((row) => row[at[chart.key]]).filter((v) => v != null);
        show();
        figure.classList.toggle("art-empty", !known.length);
        figure.setAttribute(
          "aria-label",
          `${chart.title} by step: ${known.length ? `${say(known[0])} at first, ${say(known[known.length - 1])} now, between ${say(Math.min(...known))} and ${say(Math.max(...known))}` : "nothing yet"}`,
        );
        const width = plot.clientWidth;
        if (!width || !known.length) return;
        if (!u) {
          u = start(width);
          u.over.append(cross);
          u.over.addEventListener("pointermove", (event) => point(u.posToIdx(event.offsetX)));
          u.over.addEventListener("pointerleave", () => point(null));
        } else {
          if (u.width !== width) u.setSize({ width, height: u.height });
          u.setData(data());
        }
      },
      repaint: () => u?.redraw(false, true),
      end: () => u?.destroy(),
    };
  }

  /** @param {number|null} i */
  function point(i) {
    cards.forEach((one) => one.cut(i));
  }
  const draw = perFrame(() => cards.forEach((one) => one.draw()));
  const sized = new ResizeObserver(draw);
  sized.observe(node);
  const themed = new MutationObserver(() => cards.forEach((one) => one.repaint()));
  return {
    node,
    /** Update the colors when the theme class of this element changes. @param {Element} host */
    follow: (host) => themed.observe(host, { attributes: true, attributeFilter: ["class"] }),
    /** @param {any[]} next rows, each beginning with its index */
    set(next) {
      rows = next;
      draw();
    },
    end() {
      sized.disconnect();
      themed.disconnect();
      cards.forEach((one) => one.end());
    },
  };
}
