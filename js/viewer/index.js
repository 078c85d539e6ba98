// The index of a run in the browser: one typed array per column, 32 bytes per trajectory.

const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

/** Return a received buffer as a typed array. @param {DataView} view @param {keyof typeof KINDS} kind */
export const typedArray = (view, kind) =>
  new KINDS[kind](view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

/** Convert half-precision numbers to floats. @param {DataView} view */
export function halves(view) {
  const bits = typedArray(view, "u2"),
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
 * @property {string} name scenario, or the number in the step @property {number} step @property {string} split
 * @property {boolean} trained whether its rollouts are compared with one another; those of an evaluation are not
 * @property {number} first @property {number} size
 * @property {number} mean @property {number} std @property {number} place index of the group in its step
 */

/** Create an index that grows with the replies of the command `index`. */
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
    low: 0, // lowest and highest reward of the run; 0 is always between them
    high: 0,
    flags: /** @type {Record<string, number>} */ ({}),
    lost: [],

    /** Add the rows of a reply. @param {any} reply @param {DataView[]} buffers */
    add(reply, buffers) {
      if (reply.version !== index.version && index.count) {
        // Existing rows have changed, so all rows are requested again. Rows and groups keep their numbers, and the old ones
        // are shown until then.
        index.count = 0;
        index.version = reply.version;
      }
      if (reply.from_row !== index.count) return; // a duplicate reply
      reply.columns.forEach(([name, kind], i) =>
        appendColumn(columns, name, kind, typedArray(buffers[i], kind), index.count),
      );
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
        const previous = groups[from + i - 1],
          sameStep = previous && previous.step === steps[i] && previous.split === splits[i];
        const first = previous ? previous.first + previous.size : 0,
          place = sameStep ? previous.place + 1 : 0,
          trained = splits[i] === "train";
        groups[from + i] = {
          name: name || `${trained ? "group" : "evaluation"} ${place}`,
          trained,
          step: steps[i],
          split: splits[i],
          size: sizes[i],
          first,
          place,
          ...rewardStats(index, first, sizes[i]),
        };
      });
    },

    /** Whether the groups come from more than one step or split. */
    get stepped() {
      const first = groups[0],
        last = groups.at(-1);
      return Boolean(last) && (first.step !== last.step || first.split !== last.split);
    },
    /** Whether a row has a flag. @param {number} id @param {string} name */
    has: (id, name) => (columns.flags[id] & (index.flags[name] ?? 0)) !== 0,
    /** Return the group of a row. @param {number} id */
    groupOf: (id) => groups[columns.group[id]],
    /**
     * Return the style of a bar from reward 0 to a reward, on the scale from `low` to `high`.
     * @param {number} reward @param {string} side property of the start @param {string} size property of the length
     */
    bar(reward, side, size) {
      const percent = (part) => `${Math.round((100 * part) / (index.high - index.low || 1))}%`;
      return { [side]: percent(Math.min(0, reward) - index.low), [size]: percent(Math.abs(reward)) };
    },
  };
  return index;
}

/** Return mean and standard deviation of a group's rewards, and extend the run's range of rewards. */
function rewardStats(index, first, size) {
  let count = 0,
    sum = 0,
    squares = 0;
  for (let id = first; id < first + size; id++) {
    const reward = index.columns.reward[id];
    if (!Number.isFinite(reward)) continue;
    index.low = Math.min(index.low, reward);
    index.high = Math.max(index.high, reward);
    count += 1;
    sum += reward;
    squares += reward * reward;
  }
  const mean = count ? sum / count : NaN;
  return { mean, std: count ? Math.sqrt(Math.max(0, squares / count - mean * mean)) : NaN };
}

function appendColumn(columns, name, kind, values, count) {
  const previous = columns[name],
    length = count + values.length;
  if (!previous || previous.length < length) {
    columns[name] = new KINDS[kind](previous ? Math.max(length, previous.length * 2) : length);
    if (previous) columns[name].set(previous.subarray(0, count));
  }
  columns[name].set(values, count);
}
