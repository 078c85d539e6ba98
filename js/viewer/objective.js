// The drawer below the conversation: the values of one token, and the terms of its loss.
import { fill, h, iconButton, marked, muted, num, tableRow, visible, warning } from "../panel.js";

/** @param {any} app */
export function createObjective(app) {
  const node = h("section.drawer", { label: "Token", hidden: true });
  const { ui } = app;
  let token = null,
    requests = 0;

  /** @param {any} selected {id, turn, k, text, n, figures}, where k is the index of the token and n the number of tokens */
  function open(selected) {
    token = selected;
    node.hidden = false;
    draw();
  }

  function draw() {
    const terms = h("div");
    fill(
      node,
      h(
        "header.drawer-head",
        h("span.mono.token", JSON.stringify(visible(token.text))),
        muted(`token ${token.k + 1} of ${token.n}, turn ${token.turn}`),
        token.figures.map(([name, value]) => h("span.figure", muted(name), " ", value)),
        h("span.grow"),
        h(
          "button.button",
          {
            "aria-pressed": String(ui.objective),
            onclick: () => {
              app.saveUi({ objective: !ui.objective });
              draw();
            },
          },
          "Loss terms",
        ),
        iconButton("✕", "Close", () => app.tokens.choose(null)),
      ),
      ui.objective && terms,
    );
    if (ui.objective) loadTerms(terms);
    scrollToToken();
  }

  /** Scroll to the selected token, which the drawer may cover. */
  const scrollToToken = () => app.root.querySelector(".art-is-chosen")?.scrollIntoView({ block: "nearest" });

  async function loadTerms(node) {
    const request = ++requests,
      { id, turn, k } = token;
    fill(node, h("p.muted", "Computing the objective …"));
    try {
      const { reply } = await app.wire.request("objective", { id, turn, token: k });
      if (request === requests)
        fill(node, reply.why && h("p.note", marked(reply.why)), reply.losses?.length > 0 && table(reply));
      scrollToToken();
    } catch (error) {
      if (request === requests) fill(node, h("p.note", marked(error.message)));
    }
  }

  /** Create a table with a column per loss and a row per term. A value that is the same for all losses is shown once. */
  function table({ losses, assumed, recorded }) {
    const names = [...new Set(losses.flatMap((loss) => loss.terms.map((term) => term.name)))];
    const findTerm = (loss, name) => loss.terms.find((term) => term.name === name);
    const clipped = (value) => (value ? warning("clipped") : "no");
    const cell = (loss, name) => {
      const term = findTerm(loss, name);
      return !term ? "·" : name === "clipped" ? clipped(term.value) : num(term.value, 4);
    };
    const tableLine = (name, cells, kind = "") => {
      const node = tableRow(name, ...cells);
      node.className = kind;
      return node;
    };
    const term = (name) => {
      const cells = losses.map((loss) => cell(loss, name)),
        values = losses.map((loss) => findTerm(loss, name)?.value),
        allEqual = values.every((value) => value === values[0]);
      const symbol = losses.map((loss) => findTerm(loss, name)?.symbol).find(Boolean) ?? "";
      const node = tableLine(
        [name, symbol.length < 9 && symbol !== name && muted(" ", symbol)],
        allEqual ? cells.slice(0, 1) : cells,
        allEqual ? "" : "art-differs",
      );
      if (allEqual) node.lastChild.colSpan = losses.length;
      node.title = symbol;
      return node;
    };
    return h(
      "div.scroll",
      { tabIndex: 0, role: "region", label: "Loss terms" },
      assumed && !recorded && h("p.note", marked(assumed)),
      h(
        "table.table.terms",
        h(
          "thead",
          h(
            "tr",
            h("th", { scope: "col" }, "term"),
            losses.map((loss) =>
              h(
                loss.trainer ? "th.is-ours" : "th",
                { scope: "col" },
                loss.name,
                loss.trainer && h("span.badge.is-good", "used in training"),
              ),
            ),
          ),
        ),
        h(
          "tbody",
          tableLine(
            "objective",
            losses.map((loss) => h("span.mono", loss.formula)),
            "art-formula",
          ),
          names.map(term),
          tableLine(
            "loss of this token",
            losses.map((loss) => num(loss.loss, 4)),
            "art-total",
          ),
          tableLine(
            "∂loss/∂logprob",
            losses.map((loss) => [
              num(loss.gradient, 4),
              muted(loss.gradient < 0 ? " reinforced" : loss.gradient > 0 ? " suppressed" : ""),
            ]),
          ),
          tableLine(
            "loss of the group",
            losses.map((loss) => num(loss.group_loss, 4)),
          ),
        ),
      ),
    );
  }

  return {
    node,
    open,
    close() {
      node.hidden = true;
      token = null;
      requests += 1;
    },
    get token() {
      return token;
    },
  };
}
