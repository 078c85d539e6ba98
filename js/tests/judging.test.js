// Functions of the judging panel that need no page: texts of scores, rankings and costs.
import assert from "node:assert/strict";
import { test } from "node:test";
import { formatSigned } from "../judging/cards.js";
import { costText, rankingLabel } from "../judging/side.js";

test("advantages have a sign", () => {
  assert.deepEqual([0.5, 0, -0.25, null].map(formatSigned), ["+0.5", "0", "−0.25", "–"]);
});

test("a ranking has a number, its judge, its rubric and its source", () => {
  assert.equal(rankingLabel({ judge: "strict", source: "asked" }, 0), "1 · strict");
  assert.equal(
    rankingLabel(
      { judge: "a\u202eb", rubric: "0123456789", line: "Prefer answers\u202e that are short.", source: "journal" },
      1,
    ),
    "2 · a\\u202eb · “Prefer answers\\u202e that are…” · journal",
  );
  assert.equal(rankingLabel({ judge: "rewards", source: "reward" }, 2), "3 · rewards · rollout reward");
});

test("the cost of a ranking", () => {
  const ranking = { source: "asked", cost: 0.008, tokens: 2400, calls: 4, seconds: 0 };
  assert.equal(costText(ranking), "$0.00800 · 2,400 tokens · 4 calls");
  assert.equal(costText({ ...ranking, cost: 0.5, calls: 1, seconds: 1.25 }), "$0.500 · 2,400 tokens · 1 call · 1.3 s");
  assert.equal(costText({ ...ranking, cost: 0, cached: true }), "2,400 tokens · from the cache, free");
  assert.equal(costText({ ...ranking, cost: 0, tokens: 0 }), "no cost · 4 calls");
  assert.equal(costText({ source: "reward" }), "");
});
