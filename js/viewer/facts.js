// The column next to the conversation: reward and its parts, board, metrics, metadata, logs.
import { append, clamp, fill, h, iconButton, marked, muted, num, tableRow, visible, warning } from "../panel.js";

/** Create a table from rows. @param {string} classes @param {...any} rows */
const table = (classes, ...rows) => h(`table.table${classes}`, h("tbody", rows));

/** @param {any} app */
export function createFacts(app) {
  const node = h("aside.facts", { label: "Facts about this rollout" });
  let ply = -1,
    frames = [],
    shown = null,
    requests = 0;
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
      reply.links?.map((link) => h("a", ...link)), // properties and text, which the kernel has checked
      texts("Logs", reply.logs, true),
      texts("Tools", reply.tools),
    );
    loadBoard(reply.id);
  }

  // reward ---------------------------------------------------------------------------------

  function reward({ id, reward: value, breakdown: breakdown = {}, status }) {
    const parts = breakdown.parts ?? [],
      largest = Math.max(1e-9, ...parts.map(([, number]) => Math.abs(number)));
    const line = (name, number, note) => number != null && tableRow(name, [num(number), note && muted(` ${note}`)]);
    return h(
      "section.card.reward-card",
      h(
        "div.big",
        status === "failed" ? h("span", status) : [h("span", num(value)), muted("reward")],
        h("span.grow"),
        h("button.button", { title: "Set your own score (o)", onclick: () => override(id) }, "Set score"),
      ),
      h("div.override"),
      parts.length > 0 &&
        table(
          ".parts",
          parts.map(([name, number]) =>
            tableRow(
              marked(name),
              h(number < 0 ? "i.minus" : "i.plus", { style: { width: `${(50 * Math.abs(number)) / largest}%` } }),
              num(number),
            ),
          ),
        ),
      breakdown.sums != null &&
        (breakdown.sums
          ? h("div.muted", "✓ The parts add up to the reward.")
          : warning("The parts do not add up to the reward.")),
      table(
        "",
        line("judged (RULER)", breakdown.ruler),
        line("set by a person", breakdown.override),
        line("advantage", breakdown.advantage, "in its group"),
      ),
      [breakdown.explanation, breakdown.reason, breakdown.trained, breakdown.why].map(
        (text) => text && h("p.note", marked(text)),
      ),
    );
  }

  /** Open or close the form for a human score and its reason. The judge's score is kept. */
  function override(id = shown?.id) {
    const place = node.querySelector(".art-override");
    if (id == null || !place) return;
    if (place.firstChild) return fill(place);
    const score = h("input.input", { type: "number", step: "any", label: "Score", placeholder: "score" });
    const reason = h("input.input", { type: "text", label: "Reason", placeholder: "reason", maxLength: 500 });
    const status = h("div.note", { role: "status" });
    const save = async () => {
      if (score.value === "") return score.focus();
      try {
        await app.wire.request("override", { id, score: Number(score.value), reason: reason.value });
        app.reload(id);
      } catch (error) {
        fill(status, marked(error.message));
      }
    };
    const onkeydown = (event) => {
      if (event.key === "Enter") save();
      else if (event.key === "Escape") {
        fill(place);
        app.reader.focus();
      }
    };
    fill(place, h("div.form", { onkeydown }, score, reason, h("button.button", { onclick: save }, "Save")), status);
    score.focus();
  }

  // board ---------------------------------------------------------------------------------

  async function loadBoard(id) {
    const request = ++requests;
    const { reply } = await app.wire.request("board", { id }).catch(() => ({ reply: { frames: [] } }));
    if (request !== requests) return;
    frames = reply.frames;
    if (frames.length) {
      ply = frames.length - 1;
      drawBoard();
    }
    if (reply.error) append(board, [h("p.note", "Board: ", marked(reply.error))]);
  }

  function drawBoard() {
    const slider = h("input", {
      type: "range",
      min: "0",
      max: String(frames.length - 1),
      value: String(ply),
      label: "Board number",
      oninput: () => go(Number(slider.value)),
    });
    const grid = h("div.grid-place"),
      caption = h("div.muted.caption", { "aria-live": "polite" });
    const move = (offset) => go(ply + offset);
    const go = (number) => {
      ply = clamp(number, frames.length);
      slider.value = String(ply);
      draw();
      app.reader.showMessage(frames[ply].message);
    };
    const draw = () => {
      const { rows, last, caption: text } = frames[ply],
        columns = Math.max(0, ...rows.map((row) => row.length));
      fill(
        grid,
        h(
          "table.grid",
          { label: `Board ${ply + 1}`, style: { "--cell": `${Math.max(9, Math.min(48, (220 / columns) | 0))}px` } },
          h(
            "tbody",
            rows.map((row, r) =>
              h(
                "tr",
                row.map((cell, c) =>
                  h(
                    last && last[0] === r && last[1] === c ? "td.is-last" : "td",
                    { style: cellColor(cell) },
                    visible(cell),
                  ),
                ),
              ),
            ),
          ),
        ),
      );
      fill(caption, `${ply + 1} of ${frames.length}`, text && [" · ", marked(text)]);
      slider.setAttribute("aria-valuetext", `${ply + 1}${text ? `, ${text}` : ""}`);
    };
    fill(
      board,
      h(
        "section.card",
        h("div.label", "Board"),
        grid,
        h(
          "div.ply",
          iconButton("‹", "Previous board", () => move(-1)),
          slider,
          iconButton("›", "Next board", () => move(1)),
        ),
        caption,
      ),
    );
    draw();
  }

  /** Return the color of a cell: warmer for larger powers of two, one hue each for X and O. */
  const cellColor = (cell) => {
    const power = Math.log2(Number(cell));
    return power > 0 && Number.isInteger(power)
      ? { background: `rgb(var(--art-warm) / ${Math.min(0.5, 0.04 + power * 0.045)})` }
      : /^[xo]$/i.test(cell)
        ? { color: `rgb(var(${/x/i.test(cell) ? "--art-cool" : "--art-warm"}))` }
        : {};
  };

  // metrics and texts ---------------------------------------------------------------------------------

  function pairs(title, values) {
    const rows = Object.entries(values ?? {});
    return (
      rows.length > 0 &&
      h(
        "details.fold.card",
        { open: rows.length <= 8 },
        h("summary", title, muted(` ${rows.length}`)),
        table(
          "",
          rows.map(([name, value]) =>
            tableRow(marked(name), [
              typeof value === "number" ? num(value, 4) : marked(value),
              name === "duration" && " s",
            ]),
          ),
        ),
      )
    );
  }
  const texts = (title, text, open = false) =>
    text && text !== "{}" && h("details.fold.card", { open }, h("summary", title), h("div.text.mono", marked(text)));

  return { node, show, override, clear: () => fill(node) };
}
