// Functions of the curation panel that need no page.
import assert from "node:assert/strict";
import { test } from "node:test";
import { VERDICTS, SIGNS, othersOf, ownOf } from "../curation/verdicts.js";

test("every mark has a sign and a key of its own", () => {
  for (const [name] of VERDICTS) assert.equal(SIGNS[name].length, 2);
  assert.equal(new Set(VERDICTS.map(([, , key]) => key)).size, VERDICTS.length);
});

test("an author's own mark is separate from those of the others", () => {
  const statements = [
    ["ana", "good"],
    ["ben", "fix"],
    ["eve", "odd"],
  ];
  assert.equal(ownOf(statements, "ana"), "good");
  assert.equal(ownOf(statements, "zoe"), "");
  assert.equal(othersOf(statements, "ana"), "ben: needs a fix, eve: odd");
  assert.equal(othersOf([], "ana"), "");
});
