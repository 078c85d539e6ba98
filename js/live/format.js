// Text of durations, sizes and shares in the live training cell.
import { num } from "../panel.js";

/** Format seconds. @param {number} s */
export const formatDuration = (s) =>
  s < 100
    ? `${s < 10 ? num(s, 2) : Math.round(s)} s`
    : s < 6000
      ? `${Math.round(s / 60)} min`
      : `${num(s / 3600, 2)} h`;

/** Format bytes. @param {number} b */
export const formatBytes = (b) => (b >= 1e9 ? `${num(b / 2 ** 30)} GiB` : `${Math.round(b / 2 ** 20)} MiB`);

/** Format a share as a percentage. @param {number|null} value */
export const formatPercent = (value) => (value == null ? "–" : `${Math.round(value * 100)} %`);
