// One chart with a curve and a band of intervals for each run.
import uPlot from "uplot";
import { fill, h, num, perFrame } from "../panel.js";

/** @typedef {{step?: number[], x?: number[], value?: (number|null)[], low?: (number|null)[], high?: (number|null)[]}} Curve */

/** The colors of the runs, and of their bands. */
export const COLORS = [
  "--art-run-0",
  "--art-run-1",
  "--art-run-2",
  "--art-run-3",
  "--art-run-4",
  "--art-run-5",
  "--art-run-6",
  "--art-run-7",
];
const BANDS = [
  "--art-run-0-bg",
  "--art-run-1-bg",
  "--art-run-2-bg",
  "--art-run-3-bg",
  "--art-run-4-bg",
  "--art-run-5-bg",
  "--art-run-6-bg",
  "--art-run-7-bg",
];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]]; // in addition to colors

/**
 * Return the values of a curve at common positions. A value that is unknown is null, which interrupts the line. A position
 * of other runs is undefined, which does not. @param {Curve} curve @param {string} name @param {number[]} xs
 */
export function aligned(curve, name, xs) {
  const values = new Map((curve.x ?? []).map((x, i) => [x, curve[name][i] ?? null]));
  return xs.map((x) => values.get(x));
}

/** Return the number of the last point at or before a position, or -1. @param {Curve} curve @param {number} position */
export const pointAt = ({ x = [] }, position) => x.filter((value) => value <= position).length - 1;

/** Return seconds, tokens or steps as a short text. @param {string} axis @param {number} value */
export function axisText(axis, value) {
  if (axis === "time") return value < 120 ? `${num(value)} s` : `${num(value / 60)} min`;
  if (axis === "tokens") return value < 10_000 ? num(value) : `${num(value / 1000)}k`;
  return num(value, 6);
}

/** Create the chart. @param {(position: number | null) => void} onMove called with the position of the pointer */
export function createChart(onMove) {
  const plot = h("div.c-plot"),
    probe = h("i", { hidden: true }),
    node = h("figure.c-chart", { role: "img" }, probe, plot);
  const cssColor = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  /** @type {any} */
  let plotter = null,
    shown = { axis: "step", curves: /** @type {Curve[]} */ ([]) };

  const axisOptions = () => ({
    stroke: () => cssColor("--art-muted"),
    grid: { stroke: () => cssColor("--art-line"), width: 1 },
    ticks: { show: false },
    font: "11px sans-serif",
    gap: 4,
  });

  /** @param {number} i number of the run */
  const seriesOf = (i) => {
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const line = {
      stroke: () => cssColor(COLORS[i]),
      width: 2,
      dash: DASHES[Math.floor(i / 2) % DASHES.length],
      points: { show: (shown.curves[i].x?.length ?? 0) < 3, size: 6, fill: () => cssColor(COLORS[i]) },
    };
    return [edge, edge, line];
  };

  function draw() {
    const { axis, curves } = shown,
      width = plot.clientWidth;
    if (!width) return;
    const xs = [...new Set(curves.flatMap((curve) => curve.x ?? []))].sort((a, b) => a - b);
    plotter?.destroy();
    plotter = null;
    node.classList.toggle("art-c-empty", !xs.length);
    if (!xs.length) return void fill(plot);
    plotter = new uPlot(
      {
        width,
        height: 260,
        padding: [8, 12, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        select: { show: false },
        scales: { x: { time: false } },
        axes: [
          { ...axisOptions(), size: 28, values: (_, ticks) => ticks.map((tick) => axisText(axis, tick)) },
          { ...axisOptions(), size: 48, values: (_, ticks) => ticks.map((tick) => num(tick)) },
        ],
        series: [{}, ...curves.flatMap((_, i) => seriesOf(i))],
        bands: curves.map((_, i) => ({
          series: [3 * i + 1, 3 * i + 2],
          fill: () => cssColor(BANDS[i]),
        })),
      },
      [xs, ...curves.flatMap((curve) => ["high", "low", "value"].map((name) => aligned(curve, name, xs)))],
      plot,
    );
    plotter.over.addEventListener("pointermove", (event) => onMove(plotter.posToVal(event.offsetX, "x")));
    plotter.over.addEventListener("pointerleave", () => onMove(null));
  }
  const drawSoon = perFrame(draw);
  const resizeObserver = new ResizeObserver(() => plotter?.width !== plot.clientWidth && drawSoon());
  resizeObserver.observe(node);
  const themeObserver = new MutationObserver(() => plotter?.redraw(false, true));
  return {
    node,
    /** Update the colors when the theme class of this element changes. @param {Element} host */
    follow: (host) => themeObserver.observe(host, { attributes: true, attributeFilter: ["class"] }),
    /** @param {string} axis @param {Curve[]} curves @param {string} text the alternative text */
    set(axis, curves, text) {
      shown = { axis, curves };
      node.setAttribute("aria-label", text);
      drawSoon();
    },
    end() {
      resizeObserver.disconnect();
      themeObserver.disconnect();
      plotter?.destroy();
    },
  };
}
