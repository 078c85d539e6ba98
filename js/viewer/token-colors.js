// The colors of tokens: the values that tokens can be colored by, the CSS class of a value, and the legend. The classes
// are in viewer.css.
import { h, num } from "../panel.js";

/** The values that tokens can be colored by: [key, label, description]. */
export const CHANNELS = [
  ["", "plain", ""],
  ["logprob", "logprob", "log probability with which the token was sampled"],
  ["entropy", "entropy", "uncertainty about this token (entropy in nats)"],
  ["advantage", "advantage", "reward above the group mean, in standard deviations"],
  ["ratio", "ratio", "importance ratio: learner probability / sampler probability"],
  ["mask", "trained", "whether the token is trained"],
  ["gradient", "gradient", "which tokens the update makes more or less likely (−∂loss/∂logprob)"],
];
const RANGES = {
  logprob: [-5, 0],
  entropy: [0, 3],
  advantage: [-2, 2],
  ratio: [0.5, 1.5],
  mask: [0, 1],
  gradient: [-1, 1],
};
const DIVERGING = ["advantage", "ratio", "gradient"];

/** Return the class of a value: s0 … s5 for one-sided scales, n4 … z … p4 for two-sided scales, m0/m1 for the mask, x if unknown. */
export function colorClass(channel, value, [low, high] = RANGES[channel]) {
  if (value == null || Number.isNaN(value)) return "x";
  if (channel === "mask") return value > 0 ? "m1" : "m0";
  if (!DIVERGING.includes(channel)) {
    const strength = channel === "logprob" ? (high - value) / (high - low) : (value - low) / (high - low);
    return `s${Math.max(0, Math.min(5, Math.floor(strength * 5.999)))}`;
  }
  const side = (value - (low + high) / 2) / ((high - low) / 2),
    level = Math.min(4, Math.round(Math.abs(side) * 4));
  return level <= 0 ? "z" : `${side > 0 ? "p" : "n"}${level}`;
}

/** Create the legend: every class with its color and pattern, and the range of values. @param {string} channel @param {number[]} [range] */
export function legend(channel, range = RANGES[channel]) {
  const [low, high] = range,
    middle = (low + high) / 2;
  const steps =
    channel === "mask"
      ? ["m0", "m1"]
      : DIVERGING.includes(channel)
        ? ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"]
        : ["s0", "s1", "s2", "s3", "s4", "s5"];
  const ends =
    channel === "mask"
      ? ["not trained", "trained"]
      : channel === "gradient"
        ? ["suppressed", "reinforced"]
        : channel === "logprob"
          ? [`likely ${num(high)}`, `${num(low)} unlikely`]
          : [`${num(low)} or less`, `${num(high)} or more`];
  const description = CHANNELS.find(([key]) => key === channel)?.[2] ?? "";
  return h(
    "span.legend",
    { role: "img", label: `${description}; from ${ends[0]} to ${ends[1]}` },
    `${description}: ${ends[0]}`,
    steps.map((step) =>
      h("span", { class: `art-tk art-tk-${step}` }, step === "z" && channel !== "gradient" ? num(middle) : "ab"),
    ),
    ends[1],
  );
}
