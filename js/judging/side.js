// The side pane: judges and their costs, the rubric, a comparison of two rankings, agreement with the judge.
import { fill, h, marked, muted, num, plural, tableRow as line, visible } from "../panel.js";

/** Return a short description of a ranking. @param {any} ranking @param {number} n */
export const rankingLabel = (ranking, n) =>
  `${n + 1} · ${visible(ranking.judge)}${ranking.rubric ? ` · “${visible(ranking.line.replace(/^\W+/, "").slice(0, 24))}…”` : ""}${ranking.source === "asked" ? "" : ` · ${ranking.source === "reward" ? "rollout reward" : ranking.source}`}`;

/** Describe the cost of a ranking. @param {any} ranking */
export function costText(ranking) {
  if (ranking.source === "reward") return "";
  const callText = ranking.cached
    ? "from the cache, free"
    : [ranking.calls ? plural(ranking.calls, "call") : "", ranking.seconds > 0.05 ? `${num(ranking.seconds, 2)} s` : ""]
        .filter(Boolean)
        .join(" · ");
  return [
    ranking.cost
      ? `$${ranking.cost < 0.01 ? ranking.cost.toFixed(5) : ranking.cost.toFixed(3)}`
      : ranking.cached
        ? ""
        : "no cost",
    ranking.tokens ? `${ranking.tokens.toLocaleString("en")} tokens` : "",
    callText,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Draw the mean rank by position in the prompt as bars. They are level if the judge has no position bias. @param {any} bias */
const positionBars = (bias) =>
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
    const ranking = opinions[using];
    fill(
      scored,
      title("Scored by"),
      h(
        "select.select.j-wide",
        {
          label: "Ranking in use",
          onchange: (event) => app.change("use", { opinion: Number(event.target.value) }),
        },
        opinions.map((ranking, n) =>
          h(
            "option",
            { value: String(n), selected: n === using, disabled: Boolean(ranking.failure) },
            rankingLabel(ranking, n) + (ranking.failure ? " · failed" : ""),
          ),
        ),
      ),
      h("p.j-fact", costText(ranking)),
      ranking.tau == null
        ? null
        : h(
            "p.j-fact",
            `${ranking.repeats} repeats in shuffled orders: agreement (Kendall's τ) ${num(ranking.tau, 2)}, spread ±${num(ranking.spread, 2)}`,
          ),
      ranking.bias?.mean_rank.length
        ? h(
            "p.j-fact",
            "by position in the prompt ",
            positionBars(ranking.bias),
            " ",
            ranking.bias.warning
              ? h("span.badge.is-warn", ranking.bias.warning)
              : muted(`${ranking.bias.rounds} rounds, no sign of position bias`),
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
      isEdited = true;
    },
    onkeydown: (event) => {
      if (event.ctrlKey && event.key === "Enter") judgeAgain();
      if (event.key === "Escape") {
        app.focusCurrent();
        event.stopPropagation();
      }
    },
  });
  const judgeSelect = h("select.select", { label: "Judge to ask" }),
    repeats = h(
      "select.select",
      { label: "Repeats" },
      [1, 2, 4, 8].map((n) => h("option", { value: String(n) }, n === 1 ? "once" : `${n} times, shuffled`)),
    );
  const askButton = h("button.button", { onclick: () => judgeAgain() }, "Judge again"),
    statusNode = h("p.j-fact", { role: "status" });
  let isEdited = false,
    isBusy = false;
  rubric.append(title("Rubric"), text, h("div.j-line.j-ask", judgeSelect, repeats, askButton), statusNode);

  async function judgeAgain() {
    if (isBusy || askButton.disabled) return;
    isBusy = true;
    askButton.disabled = true;
    statusNode.textContent = `Asking ${judgeSelect.selectedOptions[0]?.textContent ?? "the judge"} …`;
    isEdited = false;
    const reply = await app.change("rejudge", {
      judge: Number(judgeSelect.value),
      rubric: text.value,
      repeats: Number(repeats.value),
    });
    isBusy = false;
    statusNode.textContent = reply ? "" : statusNode.textContent.replace("Asking", "No answer from").replace(" …", ".");
    drawRubric(app.state);
    loadSession();
  }

  function drawRubric({ rubric: rubricText, judges = [], blind, person, opinions, reads_rubric: isRead = true }) {
    rubric.hidden = !isRead;
    if (!isEdited && document.activeElement !== text) text.value = rubricText ?? "";
    const selected = judgeSelect.value,
      names = JSON.stringify(judges);
    if (judgeSelect.dataset.names !== names) {
      fill(
        judgeSelect,
        judges.map((name, n) => h("option", { value: String(n) }, visible(name))),
      );
      judgeSelect.dataset.names = names;
      judgeSelect.value = judges[Number(selected)] ? selected || "0" : "0";
    }
    text.readOnly = blind || person;
    judgeSelect.hidden = repeats.hidden = askButton.hidden = blind || person || !judges.length;
    askButton.disabled = isBusy;
    if (!isBusy && !judges.length && !blind && !person)
      statusNode.textContent = opinions?.length ? 'This panel has no judge. To ask one, run await panel.ask("…").' : "";
  }

  // two rankings ---------------------------------------------------------------------------------------------------------------

  let first = -2,
    second = -1,
    drawnDiff = "",
    knownCount = 0;
  async function drawDiff({ opinions, blind, rows, using }) {
    diff.hidden = blind || !opinions.length || (opinions.length < 2 && !rows.some((row) => row.by_hand));
    if (diff.hidden) return;
    if (opinions.length > knownCount) first = -2; // compare a new ranking with the previous one
    knownCount = opinions.length;
    const usable = opinions.map((ranking, n) => n).filter((n) => !opinions[n].failure);
    if (first < -1 || first >= opinions.length || opinions[first]?.failure)
      first = usable.filter((n) => n !== using).pop() ?? using;
    if (second >= opinions.length || opinions[second]?.failure) second = -1;
    const stamp = JSON.stringify([
      first,
      second,
      opinions.map((ranking) => ranking.judge + ranking.rubric),
      rows.map((row) => [row.key, row.score]),
    ]);
    if (stamp === drawnDiff) return;
    drawnDiff = stamp;
    const rankingSelect = (value, label, set) =>
      h(
        "select.select.j-wide",
        {
          label,
          onchange: (event) => {
            set(Number(event.target.value));
            drawnDiff = "";
            drawDiff(app.state);
          },
        },
        h("option", { value: "-1", selected: value === -1 }, "ranking in use"),
        usable.map((n) => h("option", { value: String(n), selected: value === n }, rankingLabel(opinions[n], n))),
      );
    try {
      const { reply } = await app.wire.request("diff", { a: first, b: second });
      if (drawnDiff !== stamp) return;
      fill(
        diff,
        title("Two rankings"),
        rankingSelect(first, "First ranking", (n) => {
          first = n;
        }),
        rankingSelect(second, "Second ranking", (n) => {
          second = n;
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
            reply.rows.map((row) =>
              line(row.label, rankCell(row.a, row.score_a), rankCell(row.b, row.score_b), changeCell(row)),
            ),
          ),
        ),
        h("p.j-fact", reply.moved ? reply.text : "Same order."),
      );
    } catch (error) {
      fill(diff, title("Two rankings"), muted(error.message));
    }
  }
  const rankCell = (rank, score) => (rank == null ? muted("–") : [h("b", num(rank, 2)), muted(` ${num(score, 2)}`)]);
  const changeCell = ({ a: old, b: now, moved }) =>
    !moved || old == null || now == null
      ? ""
      : h(
          "span",
          { class: now < old ? "art-j-better" : "art-j-worse" },
          now < old ? `▲ ${num(old - now, 2)}` : `▼ ${num(now - old, 2)}`,
        );

  // agreement ----------------------------------------------------------------------------------------------------------------

  let requests = 0;

  async function loadSession() {
    const { blind, person } = app.state,
      request = ++requests;
    session.hidden = blind || person;
    if (session.hidden) return;
    try {
      const { reply } = await app.wire.request("session");
      if (request === requests) drawSession(reply);
    } catch (error) {
      if (request === requests) fill(session, title("You and the judge"), muted(error.message));
    }
  }

  function drawSession({ text: agreement, pairs, confusions, more, judge, groups }) {
    fill(
      session,
      title("You and the judge"),
      pairs
        ? h(
            "p.j-fact",
            `Over ${plural(groups, "group")}, `,
            marked(judge),
            ` and you: ${agreement}.`,
            pairs < 20 ? muted(" Percentages and τ are shown for 20 or more pairs.") : null,
          )
        : h("p.j-fact", muted("There are no pairs that both of you ranked. Blind judging gives unbiased results.")),
      confusions.length
        ? h(
            "details.j-fold",
            h(
              "summary",
              `${plural(confusions.length + more, "pair")} ordered differently, largest score difference of the judge first`,
            ),
            h("ul.j-confusions", confusions.map(confusionItem), more ? h("li", muted(`and ${more} more`)) : null),
          )
        : null,
    );
  }

  const confusionItem = (pair) => {
    const [x, y] = pair.pair,
      words = [
        `judge #${x} `,
        muted(num(pair.judge[0], 2)),
        ` over #${y} `,
        muted(num(pair.judge[1], 2)),
        "; you ",
        muted(`${num(pair.human[0], 2)} : ${num(pair.human[1], 2)}`),
      ];
    return h(
      "li",
      pair.here
        ? h("button.more", { onclick: () => app.compareTwo([x, y]) }, words)
        : [words, muted(" · ", marked(pair.group), pair.step ? ` step ${pair.step}` : "")],
    );
  };

  return {
    node,
    loadSession,
    draw(state) {
      drawScored(state);
      drawRubric(state);
      drawDiff(state);
      session.hidden = state.blind || state.person;
    },
    forget() {
      isEdited = false;
      drawnDiff = "";
      first = -2;
      second = -1;
    },
  };
}
