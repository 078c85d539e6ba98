// The side pane: judges and their costs, the rubric, a comparison of two rankings, agreement with the judge.
import { fill, h, marked, muted, num, row as line, visible } from "../panel.js";

/** Return a short description of a ranking. @param {any} one @param {number} n */
const named = (one, n) =>
  `${n + 1} · ${visible(one.judge)}${one.rubric ? ` · ${one.rubric.slice(0, 6)}` : ""}${one.source === "asked" ? "" : ` · ${one.source === "reward" ? "rollout reward" : one.source}`}`;

/** Describe the cost of a ranking. @param {any} one */
function cost(one) {
  if (one.source === "reward") return "";
  const asked = one.cached
    ? "from the cache, free"
    : [
        one.calls ? `${one.calls} call${one.calls === 1 ? "" : "s"}` : "",
        one.seconds > 0.05 ? `${num(one.seconds, 2)} s` : "",
      ]
        .filter(Boolean)
        .join(" · ");
  return [
    one.cost ? `$${one.cost < 0.01 ? one.cost.toFixed(5) : one.cost.toFixed(3)}` : one.cached ? "" : "no cost",
    one.tokens ? `${one.tokens.toLocaleString("en")} tokens` : "",
    asked,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Draw the mean rank by position in the prompt as bars. They are level if the judge has no position bias. @param {any} bias */
const places = (bias) =>
  h(
    "span.j-places",
    {
      role: "img",
      label: `mean rank by position, 0 is best: ${bias.mean_rank.map((rank) => num(rank, 2)).join(", ")}`,
    },
    bias.mean_rank.map((rank, n) =>
      h("i", {
        style: { height: `${Math.round(3 + 17 * (1 - rank))}px` },
        title: `position ${n + 1}: mean rank ${num(rank, 2)}`,
      }),
    ),
  );

/** @param {any} app */
export function createSide(app) {
  const scored = h("section.j-section", { label: "Scored by" }),
    rubric = h("section.j-section", { label: "Rubric" });
  const diff = h("section.j-section", { label: "Two rankings" }),
    session = h("section.j-section", { label: "Agreement" });
  const node = h("aside.j-side", { label: "Judges" }, scored, rubric, diff, session);
  const title = (text) => h("h2.j-title", text);

  // judges -----------------------------------------------------------------------------------------------------------------

  function drawScored({ opinions, using, blind }) {
    scored.hidden = blind || !opinions.length;
    if (scored.hidden) return;
    const one = opinions[using];
    fill(
      scored,
      title("Scored by"),
      h(
        "select.select.j-wide",
        {
          label: "Ranking in use",
          onchange: (event) => app.change("use", { opinion: Number(event.target.value) }),
        },
        opinions.map((each, n) =>
          h(
            "option",
            { value: String(n), selected: n === using, disabled: Boolean(each.failure) },
            named(each, n) + (each.failure ? " · failed" : ""),
          ),
        ),
      ),
      h("p.j-fact", cost(one)),
      one.tau == null
        ? null
        : h(
            "p.j-fact",
            `${one.repeats} repeats in shuffled orders: τ ${num(one.tau, 2)}, spread ±${num(one.spread, 2)}`,
          ),
      one.bias?.mean_rank.length
        ? h(
            "p.j-fact",
            "by position in the prompt ",
            places(one.bias),
            " ",
            one.bias.warning
              ? h("span.badge.is-warn", one.bias.warning)
              : muted(`${one.bias.rounds} rounds, no sign of position bias`),
          )
        : null,
    );
  }

  // rubric -----------------------------------------------------------------------------------------------------------------

  const text = h("textarea.input.j-rubric", {
    rows: 7,
    label: "Rubric",
    spellcheck: false,
    maxLength: 20000,
    oninput: () => {
      edited = true;
    },
    onkeydown: (event) => {
      if (event.ctrlKey && event.key === "Enter") again();
      if (event.key === "Escape") {
        app.back();
        event.stopPropagation();
      }
    },
  });
  const who = h("select.select", { label: "Judge to ask" }),
    repeats = h(
      "select.select",
      { label: "Repeats" },
      [1, 2, 4, 8].map((n) => h("option", { value: String(n) }, n === 1 ? "once" : `${n} times, shuffled`)),
    );
  const ask = h("button.button", { onclick: () => again() }, "Judge again"),
    asking = h("p.j-fact", { role: "status" });
  let edited = false,
    busy = false;
  rubric.append(title("Rubric"), text, h("div.j-line.j-ask", who, repeats, ask), asking);

  async function again() {
    if (busy || ask.disabled) return;
    busy = true;
    ask.disabled = true;
    asking.textContent = `Asking ${who.selectedOptions[0]?.textContent ?? "the judge"} …`;
    edited = false;
    const done = await app.change("rejudge", {
      judge: Number(who.value),
      rubric: text.value,
      repeats: Number(repeats.value),
    });
    busy = false;
    asking.textContent = done ? "" : asking.textContent.replace("Asking", "No answer from").replace(" …", ".");
    drawRubric(app.state);
    loadSession();
  }

  function drawRubric({ rubric: said, judges = [], blind, person, opinions }) {
    if (!edited && document.activeElement !== text) text.value = said ?? "";
    const chosen = who.value,
      names = JSON.stringify(judges);
    if (who.dataset.names !== names) {
      fill(
        who,
        judges.map((name, n) => h("option", { value: String(n) }, visible(name))),
      );
      who.dataset.names = names;
      who.value = judges[Number(chosen)] ? chosen || "0" : "0";
    }
    text.readOnly = blind || person;
    who.hidden = repeats.hidden = ask.hidden = blind || person || !judges.length;
    ask.disabled = busy;
    if (!busy && !judges.length && !blind && !person)
      asking.textContent = opinions?.length ? 'This panel has no judge. To ask one, run await panel.ask("…").' : "";
  }

  // two rankings ---------------------------------------------------------------------------------------------------------------

  let a = -2,
    b = -1,
    told = "",
    known = 0;
  async function drawDiff({ opinions, blind, rows, using }) {
    diff.hidden = blind || !opinions.length || (opinions.length < 2 && !rows.some((row) => row.by_hand));
    if (diff.hidden) return;
    if (opinions.length > known) a = -2; // compare a new ranking with the previous one
    known = opinions.length;
    const fitting = opinions.map((one, n) => n).filter((n) => !opinions[n].failure);
    if (a < -1 || a >= opinions.length || opinions[a]?.failure) a = fitting.filter((n) => n !== using).pop() ?? using;
    if (b >= opinions.length || opinions[b]?.failure) b = -1;
    const stamp = JSON.stringify([
      a,
      b,
      opinions.map((one) => one.judge + one.rubric),
      rows.map((row) => [row.key, row.score]),
    ]);
    if (stamp === told) return;
    told = stamp;
    const pick = (value, label, set) =>
      h(
        "select.select.j-wide",
        {
          label,
          onchange: (event) => {
            set(Number(event.target.value));
            told = "";
            drawDiff(app.state);
          },
        },
        h("option", { value: "-1", selected: value === -1 }, "ranking in use"),
        fitting.map((n) => h("option", { value: String(n), selected: value === n }, named(opinions[n], n))),
      );
    try {
      const { reply } = await app.wire.request("diff", { a, b });
      if (told !== stamp) return;
      fill(
        diff,
        title("Two rankings"),
        pick(a, "First ranking", (n) => {
          a = n;
        }),
        pick(b, "Second ranking", (n) => {
          b = n;
        }),
        h(
          "table.j-table",
          h(
            "thead",
            h(
              "tr",
              ["rollout", "first", "second", ""].map((name) => h("th", { scope: "col" }, name)),
            ),
          ),
          h(
            "tbody",
            reply.rows.map((row) => line(row.label, place(row.a, row.score_a), place(row.b, row.score_b), arrow(row))),
          ),
        ),
        h("p.j-fact", reply.moved ? reply.text : "Same order."),
      );
    } catch (error) {
      fill(diff, title("Two rankings"), muted(error.message));
    }
  }
  const place = (rank, score) => (rank == null ? muted("–") : [h("b", num(rank, 2)), muted(` ${num(score, 2)}`)]);
  const arrow = ({ a: old, b: now, moved }) =>
    !moved || old == null || now == null
      ? ""
      : h(
          "span",
          { class: now < old ? "art-j-better" : "art-j-worse" },
          now < old ? `▲ ${num(old - now, 2)}` : `▼ ${num(now - old, 2)}`,
        );

  // agreement ----------------------------------------------------------------------------------------------------------------

  let sessions = 0;

  async function loadSession() {
    const { blind, person } = app.state,
      now = ++sessions;
    session.hidden = blind || person;
    if (session.hidden) return;
    try {
      const { reply } = await app.wire.request("session");
      if (now === sessions) drawSession(reply);
    } catch (error) {
      if (now === sessions) fill(session, title("You and the judge"), muted(error.message));
    }
  }

  function drawSession({ text: said, pairs, confusions, more, judge, groups }) {
    fill(
      session,
      title("You and the judge"),
      pairs
        ? h(
            "p.j-fact",
            `Over ${groups} group${groups === 1 ? "" : "s"}, `,
            marked(judge),
            ` and you: ${said}.`,
            pairs < 20 ? muted(" Percentages and τ are shown for 20 or more pairs.") : null,
          )
        : h("p.j-fact", muted("There are no pairs that both of you ranked. Blind judging gives unbiased results.")),
      confusions.length
        ? h(
            "details.j-fold",
            h(
              "summary",
              `${confusions.length + more} pair${confusions.length + more === 1 ? "" : "s"} ordered differently, largest score difference of the judge first`,
            ),
            h("ul.j-confusions", confusions.map(confusion), more ? h("li", muted(`and ${more} more`)) : null),
          )
        : null,
    );
  }

  const confusion = (one) => {
    const [x, y] = one.pair,
      words = [
        `judge #${x} `,
        muted(num(one.judge[0], 2)),
        ` over #${y} `,
        muted(num(one.judge[1], 2)),
        "; you ",
        muted(`${num(one.human[0], 2)} : ${num(one.human[1], 2)}`),
      ];
    return h(
      "li",
      one.here
        ? h("button.more", { onclick: () => app.besides([x, y]) }, words)
        : [words, muted(" · ", marked(one.group), one.step ? ` step ${one.step}` : "")],
    );
  };

  return {
    node,
    again,
    loadSession,
    draw(state) {
      drawScored(state);
      drawRubric(state);
      drawDiff(state);
      session.hidden = state.blind || state.person;
    },
    forget() {
      edited = false;
      told = "";
      a = -2;
      b = -1;
    },
  };
}
