// Remove the parts of uPlot that the live cell does not use: time and logarithmic scales, paths other than lines, legends,
// cursors, selections. If a new version of uPlot no longer contains one of these parts, the build stops.
import { readFileSync } from "node:fs";

const UNUSED = [
  "stepped",
  "bars",
  "monotoneCubic",
  "_monotoneCubic",
  "splineInterp",
  "findColWidth",
  "join",
  "sortCols",
  "genTimeStuffs",
  "timeAxisStamps",
  "timeAxisVals",
  "timeAxisVal",
  "timeSeriesStamp",
  "timeSeriesVal",
  "rangeLog",
  "rangeAsinh",
  "logAxisSplits",
  "asinhAxisSplits",
  "log10AxisValsFilt",
  "log2AxisValsFilt",
  "snapLogY",
  "snapAsinhY",
  "legendStroke",
  "legendFill",
  "cursorPointShow",
  "cursorPointFill",
  "cursorPointStroke",
  "cursorPointSize",
  "cursorMove",
  "filtBtn0",
  "filtTarg",
  "elColor",
  "elSize",
  "_sync",
];
const UNUSED_INSIDE = [
  "initLegendRow",
  "addSeries",
  "delSeries",
  "setBand",
  "addBand",
  "delBand",
  "syncLegend",
  "setLegend",
  "setLegendValues",
  "updateCursor",
  "cacheMouse",
  "mouseMove",
  "mouseDown",
  "mouseUp",
  "mouseLeave",
  "dblClick",
  "syncRect",
  "setSelH",
  "setSelV",
  "setSelect",
  "hideSelect",
  "setSeries",
  "toggleDOM",
  "setFocus",
  "initCursorPt",
  "onMouse",
  "offMouse",
  "pubSync",
  "pub",
  "batch",
  "setAlpha",
];
const REPLACED = [
  ["{\n\tuPlot.join = join;", "export { uPlot as default }", ""],
  ["const months = [", "const onlyWhole", "const fmtDate = noop;\n"],
  ["const sync = _sync(syncKey);", "function destroy() {", ""],
  ["sync.unsub(self);", "off(dppxchange", ""],
  ["\tconst events = {};", "// external on/off", ""],
  ["if (showLegend) {\n\t\tlegendTable", "const son", ""],
  [
    "const [ timeIncrsMs,",
    "const [ timeIncrsS",
    "const timeIncrsMs = [], _timeAxisStampsMs = [], timeAxisSplitsMs = noop;\n",
  ],
  ["const [ timeIncrsS", "// base 2", "const timeIncrsS = [], _timeAxisStampsS = [], timeAxisSplitsS = noop;\n"],
];

/** Replace the text from one mark up to another. @param {string} text @param {string} from @param {string} to @param {string} by */
function between(text, from, to, by) {
  const start = text.indexOf(from),
    end = text.indexOf(to, start + 1);
  if (start < 0 || end < 0)
    throw new Error(`Could not find ${from} in the source of uPlot. Update lean.mjs for this version.`);
  return text.slice(0, start) + by + text.slice(end);
}

/** Remove the body of a function that has this indentation. @param {string} text @param {string} name @param {string} indent */
function emptied(text, name, indent) {
  const whole = new RegExp(`\\n${indent}function ${name}\\([\\s\\S]*?\\n${indent}\\}\\n`);
  if (!whole.test(text))
    throw new Error(`Could not find the function ${name} in the source of uPlot. Update lean.mjs for this version.`);
  return text.replace(whole, `\n${indent}function ${name}() {}\n`);
}

export const lean = {
  name: "lean-uplot",
  /** @param {any} build */
  setup(build) {
    build.onLoad({ filter: /uPlot\.esm\.js$/ }, (/** @type {{path: string}} */ { path }) => {
      let text = readFileSync(path, "utf8");
      for (const name of UNUSED) text = emptied(text, name, "");
      for (const name of UNUSED_INSIDE) text = emptied(text, name, "\t");
      for (const [from, to, by] of REPLACED) text = between(text, from, to, by);
      return { contents: text, loader: "js" };
    });
  },
};
