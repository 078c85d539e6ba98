// Curves over the training steps: one card per metric, with a common crosshair.
import uPlot from "uplot";
import { h, num, perFrame } from "../panel.js";
import { formatPercent } from "./format.js";

/** @typedef {{key: string, title: string, hint: string, percent?: boolean, zero?: boolean, spread?: string, wide?: boolean}} Chart */

/**
 * Return the range of the vertical axis for values from `low` to `high`, with a margin of 8 %.
 * @param {{zero?: boolean, percent?: boolean}} chart @param {number|null} low null if there are no values @param {number} high
 */
export function axisRange(chart, low, high) {
  if (low == null) return [0, 1];
  const base = chart.zero ? Math.min(0, low) : low,
    margin = (high - base || Math.abs(high) || 1) * 0.08;
  return [
    chart.zero && low >= 0 ? 0 : base - margin,
    chart.percent ? Math.max(0.1, Math.min(1.02, high + margin)) : high + margin,
  ];
}

/**
 * Create the grid of curves.
 * @param {Chart[]} charts @param {string[]} columns names of the values of a row, after its index
 */
export function createCharts(charts, columns) {
  const probe = h("i", { hidden: true }),
    node = h("div.curves", probe);
  const cssColor = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const columnIndex = Object.fromEntries(columns.map((name, i) => [name, i + 1]));
  /** @type {any[]} */
  let rows = [];
  const cards = charts.map((chart) => card(chart));
  node.append(...cards.map((card) => card.figure));

  /** @param {Chart} chart */
  function card(chart) {
    const format = chart.percent ? formatPercent : num;
    const value = h("output.curve-value", "–"),
      plot = h("div.plot");
    const figure = h(
      chart.wide ? "figure.curve.wide" : "figure.curve",
      { role: "img" },
      h("figcaption", { title: chart.hint }, h("span.muted", chart.title), value),
      plot,
    );
    /** @type {any} */
    let plotter = null;
    const crosshair = h("div.cross", { hidden: true });
    const axis = {
      stroke: () => cssColor("--art-muted"),
      grid: { stroke: () => cssColor("--art-line"), width: 1 },
      ticks: { show: false },
      font: "11px sans-serif",
      gap: 3,
    };
    const line = {
      stroke: () => cssColor("--art-accent"),
      width: 1.8,
      points: { show: (self) => self.data[0].length < 3, size: 5, fill: () => cssColor("--art-accent") },
    };
    const edge = { stroke: "transparent", points: { show: false }, width: 0 };
    const range = (self, low, high) => axisRange(chart, low, high);
    const createPlot = (width) =>
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
              size: 44,
              space: chart.wide ? 34 : 30,
              values: (self, ticks) => ticks.map((tick) => (chart.percent ? formatPercent(tick) : num(tick))),
            },
          ],
          series: [{}, ...(chart.spread ? [edge, edge] : []), line],
          bands: chart.spread ? [{ series: [1, 2], fill: () => cssColor("--art-accent-bg") }] : [],
        },
        data(),
        plot,
      );
    const lastRow = () => rows.findLastIndex?.((row) => row[columnIndex[chart.key]] != null) ?? rows.length - 1;
    /** @param {number|null} [i] */
    function show(i) {
      const row = rows[i ?? lastRow()],
        spread = chart.spread && row?.[columnIndex.spread];
      value.textContent =
        (row ? format(row[columnIndex[chart.key]]) : "–") +
        (spread ? ` ± ${num(spread)}` : "") +
        (i != null && row ? ` · step ${row[columnIndex.step]}` : "");
    }
    /** Show the crosshair at a row. @param {number|null} i */
    function showCrosshair(i) {
      crosshair.hidden = i == null || !rows[i] || !plotter;
      if (!crosshair.hidden) crosshair.style.left = `${plotter.valToPos(plotter.data[0][i ?? 0], "x")}px`;
      show(crosshair.hidden ? null : i);
    }
    function data() {
      const values = rows.map((row) => row[columnIndex[chart.key]] ?? null),
        steps = rows.map((row) => row[columnIndex.step] ?? row[0]);
      if (!chart.spread) return [steps, values];
      const spread = rows.map((row) => row[columnIndex.spread] ?? 0);
      return [steps, ...[1, -1].map((sign) => values.map((v, i) => (v == null ? null : v + sign * spread[i]))), values];
    }
    return {
      figure,
      showCrosshair,
      draw() {
        const knownValues = rows.map((row) => row[columnIndex[chart.key]]).filter((v) => v != null);
        show();
        figure.classList.toggle("art-empty", !knownValues.length);
        figure.setAttribute(
          "aria-label",
          `${chart.title} by step: ${knownValues.length ? `${format(knownValues[0])} at first, ${format(knownValues[knownValues.length - 1])} now, between ${format(Math.min(...knownValues))} and ${format(Math.max(...knownValues))}` : "nothing yet"}`,
        );
        const width = plot.clientWidth;
        if (!width || !knownValues.length) return;
        if (!plotter) {
          plotter = createPlot(width);
          plotter.over.append(crosshair);
          plotter.over.addEventListener("pointermove", (event) => showAt(plotter.posToIdx(event.offsetX)));
          plotter.over.addEventListener("pointerleave", () => showAt(null));
        } else {
          if (plotter.width !== width) plotter.setSize({ width, height: plotter.height });
          plotter.setData(data());
        }
      },
      repaint: () => plotter?.redraw(false, true),
      end: () => plotter?.destroy(),
    };
  }

  /** @param {number|null} i */
  function showAt(i) {
    cards.forEach((card) => card.showCrosshair(i));
  }
  const draw = perFrame(() => cards.forEach((card) => card.draw()));
  const resizeObserver = new ResizeObserver(draw);
  resizeObserver.observe(node);
  const themeObserver = new MutationObserver(() => cards.forEach((card) => card.repaint()));
  return {
    node,
    count: columns.length,
    /** Update the colors when the theme class of this element changes. @param {Element} host */
    follow: (host) => themeObserver.observe(host, { attributes: true, attributeFilter: ["class"] }),
    /** @param {any[]} newRows rows, each beginning with its index */
    set(newRows) {
      rows = newRows;
      draw();
    },
    end() {
      resizeObserver.disconnect();
      themeObserver.disconnect();
      cards.forEach((card) => card.end());
    },
  };
}
