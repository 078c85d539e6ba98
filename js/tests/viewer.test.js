// Functions of the viewer that need no page: index, rows of the list, texts, classes of token colors.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createIndex, halves, typedArray } from "../viewer/index.js";
import { visibleRows } from "../viewer/list.js";
import { countLines, firstLines, formatJson, joinPieces, shorten } from "../viewer/thread.js";
import { colorClass } from "../viewer/token-colors.js";

/** Return the values as a received buffer, which can begin anywhere in its memory. */
function received(Kind, values) {
  const bytes = new Uint8Array(new Kind(values).buffer);
  const memory = new Uint8Array(bytes.length + 3);
  memory.set(bytes, 3);
  return new DataView(memory.buffer, 3);
}

/** Return a reply of the command `index` with its buffers. */
function indexReply(fromRow, rewards, groups, options = {}) {
  const ids = rewards.map(() => groups.from);
  return [
    {
      version: 0,
      from_row: fromRow,
      rows: rewards.length,
      total: 9,
      done: false,
      title: "run",
      flags: { truncated: 2 },
      lost: [],
      columns: [
        ["reward", "f4"],
        ["group", "u4"],
        ["flags", "u1"],
      ],
      groups,
      ...options,
    },
    [
      received(Float32Array, rewards),
      received(Uint32Array, ids),
      received(Uint8Array, [2, ...rewards.slice(1).fill(0)]),
    ],
  ];
}

test("buffers become typed arrays at any offset", () => {
  assert.deepEqual([...typedArray(received(Uint16Array, [1, 65535]), "u2")], [1, 65535]);
  assert.deepEqual([...typedArray(received(Float32Array, [0.5, -2]), "f4")], [0.5, -2]);
});

test("half-precision numbers are converted", () => {
  const bits = [0x0000, 0x3c00, 0xc000, 0x3555, 0x7bff, 0x0001, 0x7c00, 0xfc00, 0x7e00];
  const values = [...halves(received(Uint16Array, bits))];
  assert.deepEqual(values.slice(0, 3), [0, 1, -2]);
  assert.ok(Math.abs(values[3] - 1 / 3) < 1e-4);
  assert.deepEqual(values.slice(4), [65504, 2 ** -24, Infinity, -Infinity, NaN]);
});

test("the index grows with its replies", () => {
  const index = createIndex();
  const first = { from: 0, names: ["a"], steps: [1], splits: ["train"], sizes: [2] };
  index.add(...indexReply(0, [0, 1], first));
  index.add(...indexReply(0, [0, 1], first)); // a duplicate
  assert.equal(index.count, 2);
  assert.equal(index.stepped, false);
  assert.deepEqual([index.groups[0].mean, index.groups[0].std], [0.5, 0.5]);
  assert.deepEqual(index.bar(0.5, "left", "width"), { left: "0%", width: "50%" });
  assert.deepEqual(
    [index.has(0, "truncated"), index.has(1, "truncated"), index.has(0, "unknown")],
    [true, false, false],
  );

  const second = { from: 1, names: ["b", "c"], steps: [1, 2], splits: ["train", "train"], sizes: [1, 2] };
  index.add(...indexReply(2, [NaN, 3, 5], second));
  assert.deepEqual(
    index.groups.map(({ name, first, place }) => [name, first, place]),
    [
      ["a", 0, 0],
      ["b", 2, 1],
      ["c", 3, 0],
    ],
  );
  assert.ok(Number.isNaN(index.groups[1].mean));
  assert.deepEqual([index.low, index.high, index.stepped], [0, 5, true]);
  assert.equal(index.groupOf(2).name, "b");
});

test("reward bars begin at 0, although no reward may be 0", () => {
  const bars = (...rewards) => {
    const index = createIndex();
    index.add(...indexReply(0, rewards, { from: 0, names: ["a"], steps: [1], splits: ["train"], sizes: [2] }));
    return rewards.map((reward) => Object.values(index.bar(reward, "left", "width")));
  };
  assert.deepEqual(bars(-1, 1), [
    ["0%", "50%"],
    ["50%", "50%"],
  ]);
  assert.deepEqual(bars(-1, 0)[1], ["100%", "0%"]);
  assert.deepEqual(bars(3, 4)[0], ["0%", "75%"]);
  assert.deepEqual(bars(0, 0)[0], ["0%", "0%"]);
});

test("groups without a name have a number, and evaluations are not groups", () => {
  const index = createIndex();
  const groups = { from: 0, names: ["", "", "a"], steps: [1, 1, 1], splits: ["train", "val", "val"], sizes: [1, 1, 1] };
  index.add(...indexReply(0, [0, 1, 2], groups));
  assert.deepEqual(
    index.groups.map(({ name, trained }) => [name, trained]),
    [
      ["group 0", true],
      ["evaluation 0", false],
      ["a", false],
    ],
  );
});

test("a new version of the index replaces the old rows", () => {
  const index = createIndex();
  const groups = { from: 0, names: ["a"], steps: [1], splits: ["train"], sizes: [2] };
  index.add(...indexReply(0, [0, 1], groups));
  index.add(...indexReply(2, [7], groups, { version: 1 }));
  assert.equal(index.count, 0); // the next request starts at row 0
  assert.equal(index.groupOf(1).name, "a"); // the old rows are shown until then
  index.add(...indexReply(0, [4, 6], groups, { version: 1 }));
  assert.deepEqual([index.count, index.groups[0].mean], [2, 5]);
});

test("only the rows near the visible part are in the page", () => {
  assert.deepEqual(visibleRows(0, 260, 10_000), [0, 16]);
  assert.deepEqual(visibleRows(26 * 100, 260, 10_000), [94, 116]);
  assert.deepEqual(visibleRows(26 * 9_990, 260, 10_000), [9_984, 10_000]);
  assert.deepEqual(visibleRows(0, 260, 3), [0, 3]);
  assert.deepEqual(visibleRows(0, 0, 0), [0, 0]);
});

test("pieces of a message are joined", () => {
  const messages = [
    { i: 0, history: 0, role: "user", content: "a" },
    { i: 1, history: 0, role: "assistant", content: "b", thinking: "x" },
    { i: 1, history: 0, piece: 1, content: "c", thinking: "y" },
    { i: 1, history: 1, piece: 1, content: "d" },
  ];
  const joined = joinPieces(messages);
  assert.deepEqual(
    joined.map(({ content, thinking }) => [content, thinking]),
    [
      ["a", undefined],
      ["bc", "xy"],
      ["d", undefined],
    ],
  );
  assert.equal(messages[1].content, "b"); // the input is not changed
});

test("long texts are cut by lines, and long lines count as several", () => {
  const long = "x".repeat(250);
  assert.deepEqual([countLines("a\nb"), countLines(long), countLines("")], [2, 3, 1]);
  assert.equal(firstLines("a\nb\nc", 2), "a\nb\n");
  assert.equal(firstLines("a\nb", 9), "a\nb");
  assert.equal(firstLines(long, 2), "x".repeat(220));
});

test("texts are shortened to one line, and arguments are formatted", () => {
  assert.equal(shorten("  a\n b\t c "), "a b c");
  assert.equal(shorten("abcdef", 3), "abc…");
  assert.equal(formatJson('{"a":1}'), '{\n  "a": 1\n}');
  assert.equal(formatJson("{broken"), "{broken");
});

test("values become classes of colors", () => {
  assert.deepEqual(
    [0, -2.5, -5, -50].map((value) => colorClass("logprob", value)),
    ["s0", "s2", "s5", "s5"],
  );
  assert.deepEqual(
    [-2, -0.1, 0, 1, 9].map((value) => colorClass("advantage", value)),
    ["n4", "z", "z", "p2", "p4"],
  );
  assert.deepEqual([colorClass("mask", 1), colorClass("mask", 0)], ["m1", "m0"]);
  assert.deepEqual([colorClass("entropy", null), colorClass("ratio", NaN)], ["x", "x"]);
  assert.equal(colorClass("entropy", 5, [0, 10]), "s2");
});
