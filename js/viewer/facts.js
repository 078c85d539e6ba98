// The column next to the conversation: reward and its parts, board, metrics, metadata, logs.
import { clamp, fill, h, marked, muted, num, row, signed, visible } from "../panel.js";

/** @param {any} app */
export function createFacts(app) {
  const node = h("aside.facts", { label: "Facts about this rollout" });
  let ply = -1,
    frames = [],
    shown = null,
    asked = 0;
  const board = h("div.board-place");

  /** @param {any} reply of the command `traj` */
  function show(reply) {
    shown = reply;
    frames = [];
    fill(board);
    fill(
      node,
      reward(reply),
      board,
      pairs("Metrics", reply.metrics),
      texts("Metadata", reply.metadata),
      texts("Logs", reply.logs, true),
      texts("Tools", reply.tools),
    );
    askBoard(reply.id);
  }

  // reward ---------------------------------------------------------------------------------

  function reward({ id, reward: value, breakdown: parts = {}, status }) {
    const named = parts.parts ?? [],
      widest = Math.max(1e-9, ...named.map(([, number]) => Math.abs(number)));
    const line = (name, number, note) =>
      number == null ? null : row(name, [num(number), note ? muted(` ${note}`) : null]);
    return h(
      "section.card.reward-card",
      h(
        "div.big",
        h("span", status === "failed" ? "failed" : num(value)),
        muted("reward"),
        h("span.grow"),
        h("button.button.plain", { title: "Set your own score (o)", onclick: () => override(id) }, "Override"),
      ),
      h("div.override"),
      named.length
        ? h(
            "table.table.parts",
            h(
              "tbody",
              named.map(([name, number]) =>
                row(
                  marked(name),
                  h(number < 0 ? "i.minus" : "i.plus", { style: { width: `${(50 * Math.abs(number)) / widest}%` } }),
                  num(number),
                ),
              ),
            ),
          )
        : null,
      parts.sums === true
        ? h("div.muted", "✓ The parts add up to the reward.")
        : parts.sums === false
          ? h("div.badge.is-warn", "The parts do not add up to the reward.")
          : null,
      h(
        "table.table",
        h(
          "tbody",
          line("judged (RULER)", parts.ruler),
          line(
            "set by a person",
            parts.override,
            parts.judge_reward != null ? `judge: ${num(parts.judge_reward)}` : "",
          ),
          line("advantage", parts.advantage, "in its group"),
        ),
      ),
      [parts.explanation, parts.reason].map((said) => said && h("p.note", marked(said))),
      parts.why ? h("p.note", marked(parts.why)) : null,
    );
  }

  /** Open or close the form for a human score and its reason. The judge's score is kept. */
  function override(id = shown?.id) {
    const place = node.querySelector(".art-override");
    if (id == null || !place) return;
    if (place.firstChild) return fill(place);
    const score = h("input.input", { type: "number", step: "any", label: "Score", placeholder: "score" });
    const reason = h("input.input", { type: "text", label: "Reason", placeholder: "reason", maxLength: 500 });
    const say = h("div.note", { role: "status" });
    const save = async () => {
      if (score.value === "") return score.focus();
      try {
        await app.wire.request("override", { id, score: Number(score.value), reason: reason.value });
        app.reload(id);
      } catch (error) {
        fill(say, marked(error.message));
      }
    };
    const onkeydown = (event) => {
      if (event.key === "Enter") save();
      else if (event.key === "Escape") {
        fill(place);
        app.reader.focus();
      }
    };
    fill(place, h("div.form", { onkeydown }, score, reason, h("button.button", { onclick: save }, "Save")), say);
    score.focus();
  }

  // board ---------------------------------------------------------------------------------

  async function askBoard(id) {
    const mine = ++asked;
    const { reply } = await app.wire.request("board", { id }).catch(() => ({ reply: { frames: [] } }));
    if (mine !== asked) return;
    frames = reply.frames;
    if (frames.length) {
      ply = frames.length - 1;
      drawBoard();
    }
  }

  function drawBoard() {
    const slider = h("input", {
      type: "range",
      min: "0",
      max: String(frames.length - 1),
      value: String(ply),
      label: "Ply",
      oninput: () => {
        ply = Number(slider.value);
        draw();
        app.reader.showMessage(frames[ply].message);
      },
    });
    const grid = h("div.grid-place"),
      caption = h("div.muted.caption", { "aria-live": "polite" });
    const move = (by) => {
      ply = clamp(ply + by, frames.length);
      slider.value = String(ply);
      draw();
      app.reader.showMessage(frames[ply].message);
    };
    const draw = () => {
      const { rows, last, caption: said } = frames[ply],
        wide = Math.max(0, ...rows.map((row) => row.length));
      fill(
        grid,
        h(
          "table.grid",
          { label: `Board, ply ${ply}`, style: { "--cell": `${Math.max(9, Math.min(48, (220 / wide) | 0))}px` } },
          h(
            "tbody",
            rows.map((row, r) =>
              h(
                "tr",
                row.map((cell, c) =>
                  h(last && last[0] === r && last[1] === c ? "td.is-last" : "td", { style: tint(cell) }, visible(cell)),
                ),
              ),
            ),
          ),
        ),
      );
      fill(caption, `ply ${ply} of ${frames.length - 1}`, said ? [" · ", marked(said)] : null);
      slider.setAttribute("aria-valuetext", `ply ${ply}${said ? `, ${said}` : ""}`);
    };
    fill(
      board,
      h(
        "section.card",
        h("div.label", "Board"),
        grid,
        h(
          "div.ply",
          signed("‹", "Previous ply", () => move(-1)),
          slider,
          signed("›", "Next ply", () => move(1)),
        ),
        caption,
      ),
    );
    draw();
  }

  /** Return the color of a cell: warmer for larger powers of two, one hue each for X and O. */
  const tint = (cell) => {
    const power = Math.log2(Number(cell));
    return power > 0 && Number.isInteger(power)
      ? { background: `rgb(var(--art-warm) / ${Math.min(0.5, 0.04 + power * 0.045)})` }
      : /^[xo]$/i.test(cell)
        ? { color: `rgb(var(--art-${/x/i.test(cell) ? "cool" : "warm"}))` }
        : {};
  };

  // metrics and texts ---------------------------------------------------------------------------------

  function pairs(title, values) {
    const rows = Object.entries(values ?? {});
    return rows.length
      ? h(
          "details.fold.card",
          { open: rows.length <= 8 },
          h("summary", title, muted(` ${rows.length}`)),
          h(
            "table.table",
            h(
              "tbody",
              rows.map(([name, value]) => row(marked(name), typeof value === "number" ? num(value, 4) : marked(value))),
            ),
          ),
        )
      : null;
  }
  const texts = (title, text, open = false) =>
    text && text !== "{}"
      ? h("details.fold.card", { open }, h("summary", title), h("div.text.mono", marked(text)))
      : null;

  return { node, show, override, clear: () => fill(node) };
}
