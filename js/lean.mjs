// Remove the parts of uPlot that the live cell does not use: time and logarithmic scales, paths other than lines, legends,
// cursors, selections. If a new version of uPlot no longer contains one of these parts, the build stops.
import { readFileSync } from "node:fs";

const UNUSED_FUNCTIONS = [
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
const UNUSED_INNER_FUNCTIONS = [
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
const REPLACEMENTS = [
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

/** Replace the text from one mark up to another. @param {string} text @param {string} startMark @param {string} endMark @param {string} replacement */
function replaceBetween(text, startMark, endMark, replacement) {
  const start = text.indexOf(startMark),
    end = text.indexOf(endMark, start + 1);
  if (start < 0 || end < 0)
    throw new Error(`Could not find ${startMark} in the source of uPlot. Update lean.mjs for this version.`);
  return text.slice(0, start) + replacement + text.slice(end);
}

/** Remove the body of a function that has this indentation. @param {string} text @param {string} name @param {string} indent */
function emptyFunction(text, name, indent) {
  const pattern = new RegExp(`\\n${indent}function ${name}\\([\\s\\S]*?\\n${indent}\\}\\n`);
  if (!pattern.test(text))
    throw new Error(`Could not find the function ${name} in the source of uPlot. Update lean.mjs for this version.`);
  return text.replace(pattern, `\n${indent}function ${name}() {}\n`);
}

export const lean = {
  name: "lean-uplot",
  /** @param {any} build */
  setup(build) {
    build.onLoad({ filter: /uPlot\.esm\.js$/ }, (/** @type {{path: string}} */ { path }) => {
      let text = readFileSync(path, "utf8");
      for (const name of UNUSED_FUNCTIONS) text = emptyFunction(text, name, "");
      for (const name of UNUSED_INNER_FUNCTIONS) text = emptyFunction(text, name, "\t");
      for (const [startMark, endMark, replacement] of REPLACEMENTS)
        text = replaceBetween(text, startMark, endMark, replacement);
      return { contents: text, loader: "js" };
    });
  },
};
