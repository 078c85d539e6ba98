// The index of a run in the browser: one typed array a column, 32 bytes a trajectory.

const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

/** A buffer of the wire as a typed array. @param {DataView} view @param {keyof typeof KINDS} kind */
export const array = (view, kind) =>
  new KINDS[kind](view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

/** Half-precision numbers as floats. @param {DataView} view */
export function halves(view) {
  const bits = array(view, "u2"),
    out = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const sign = bits[i] & 0x8000 ? -1 : 1,
      exponent = (bits[i] >> 10) & 31,
      fraction = bits[i] & 1023;
    if (exponent === 31) out[i] = fraction ? NaN : sign * Infinity;
    else out[i] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return out;
}

/**
 * @typedef {object} Group
 * @property {string} name @property {number} step @property {string} split
 * @property {number} first @property {number} size
 * @property {number} mean @property {number} std @property {number} place of the group in its step
 */

/** An index that grows by the replies of the command `index`. */
export function createIndex() {
  /** @type {Record<string, any>} */
  const columns = {};
  /** @type {Group[]} */
  const groups = [];
  const index = {
    columns,
    groups,
    count: 0,
    total: 0,
    done: false,
    title: "",
    low: 0,
    high: 0,
    seen: false,
    flags: /** @type {Record<string, number>} */ ({}),
    lost: [],

    /** Take a reply in. @param {any} reply @param {DataView[]} buffers */
    add(reply, buffers) {
      if (reply.version !== index.version && index.count) {
        // rows were changed in place: all is asked again
        index.count = groups.length = 0;
        index.version = reply.version;
      }
      if (reply.from_row !== index.count) return; // asked twice: the first answer was enough
      reply.columns.forEach(([name, kind], i) => grow(columns, name, kind, array(buffers[i], kind), index.count));
      index.count += reply.rows;
      Object.assign(index, {
        version: reply.version,
        total: reply.total,
        done: reply.done,
        title: reply.title,
        flags: reply.flags,
        lost: reply.lost,
      });
      const { from, names, steps, splits, sizes } = reply.groups;
      names.forEach((name, i) => {
        const before = groups[from + i - 1],
          same = before && before.step === steps[i] && before.split === splits[i];
        const first = before ? before.first + before.size : 0;
        groups[from + i] = {
          name,
          step: steps[i],
          split: splits[i],
          size: sizes[i],
          first,
          place: same ? before.place + 1 : 0,
          ...spread(index, first, sizes[i]),
        };
      });
    },

    /** Whether there is more than one step to tell apart. */
    get stepped() {
      return (
        groups.length > 1 &&
        (groups[0].step !== groups[groups.length - 1].step || groups[0].split !== groups[groups.length - 1].split)
      );
    },
    /** Whether a row has a flag. @param {number} id @param {string} name */
    has: (id, name) => (columns.flags[id] & (index.flags[name] ?? 0)) !== 0,
    /** The group of a row. @param {number} id */
    groupOf: (id) => groups[columns.group[id]],
    /** A reward's place between the lowest and the highest of the run, 0 … 1. @param {number} reward */
    level: (reward) => (index.high > index.low ? (reward - index.low) / (index.high - index.low) : 0.5),
  };
  return index;
}

/** Mean and deviation of a group's rewards; widens the run's range. */
function spread(index, first, size) {
  let n = 0,
    sum = 0,
    squares = 0;
  for (let id = first; id < first + size; id++) {
    const reward = index.columns.reward[id];
    if (!Number.isFinite(reward)) continue;
    index.low = index.seen ? Math.min(index.low, reward) : reward;
    index.high = index.seen ? Math.max(index.high, reward) : reward;
    index.seen = true;
    n += 1;
    sum += reward;
    squares += reward * reward;
  }
  const mean = n ? sum / n : NaN;
  return { mean, std: n ? Math.sqrt(Math.max(0, squares / n - mean * mean)) : NaN };
}

function grow(columns, name, kind, tail, count) {
  const old = columns[name],
    need = count + tail.length;
  if (!old || old.length < need) {
    columns[name] = new KINDS[kind](old ? Math.max(need, old.length * 2) : need);
    if (old) columns[name].set(old.subarray(0, count));
  }
  columns[name].set(tail, count);
}
