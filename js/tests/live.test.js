// Functions of the live training cell that need no page: texts and the axes of the curves.
import assert from "node:assert/strict";
import { test } from "node:test";
import { axisRange } from "../live/charts.js";
import { formatBytes, formatDuration, formatPercent } from "../live/format.js";

test("durations", () => {
  const cases = [
    [0.123, "0.12 s"],
    [9.96, "10 s"],
    [42.4, "42 s"],
    [99.9, "100 s"],
    [100, "2 min"],
    [5990, "100 min"],
    [9000, "2.5 h"],
  ];
  for (const [seconds, expected] of cases) assert.equal(formatDuration(seconds), expected);
});

test("sizes and shares", () => {
  assert.equal(formatBytes(300 * 2 ** 20), "300 MiB");
  assert.equal(formatBytes(1.5 * 2 ** 30), "1.5 GiB");
  assert.deepEqual([formatPercent(0.256), formatPercent(null)], ["26 %", "–"]);
});

test("the axis leaves a margin around the values", () => {
  const near = (range, expected) => range.forEach((value, i) => assert.ok(Math.abs(value - expected[i]) < 1e-9, range));
  near(axisRange({}, null, 0), [0, 1]);
  near(axisRange({}, 1, 2), [0.92, 2.08]);
  near(axisRange({ zero: true }, 1, 2), [0, 2.16]);
  near(axisRange({ zero: true }, -1, 1), [-1.16, 1.16]);
  near(axisRange({}, 5, 5), [4.6, 5.4]);
  near(axisRange({ zero: true, percent: true }, 0, 0), [0, 0.1]);
  near(axisRange({ zero: true, percent: true }, 0.5, 1), [0, 1.02]);
});
