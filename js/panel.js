// Code shared by all panels: DOM elements without HTML strings, messages to the kernel, keys, themes, escaped text.

/** Properties that `h` may set, in addition to aria-*, data-* and role. None of them can contain markup or code. */
const PROPERTIES = new Set(
  (
    "id class type value checked disabled hidden tabIndex title placeholder min max step open selected htmlFor name " +
    "rows cols size maxLength spellcheck autocomplete scope colSpan rowSpan draggable width height readOnly multiple " +
    "download lang dir inputMode"
  ).split(" "),
);

/**
 * Create an element. For example, h("span.muted", …) creates a span with class art-muted. Strings and numbers become text
 * nodes; null, false and true are ignored.
 * @param {string} selector a tag and its classes without the prefix `art-`
 * @param {...any} children an optional object of properties (label for aria-label, class, style as an object, on* as
 * functions, aria-*, value, …), followed by nodes, strings, or arrays of them
 * @returns {any}
 */
export function h(selector, ...children) {
  const props = children[0]?.constructor === Object ? children.shift() : {};
  const [tag, ...classes] = selector.split(".");
  if (/^(script|style|iframe|object|embed|link|meta|base)$/i.test(tag)) throw new Error(`h: <${tag}> is not allowed`);
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.map((name) => `art-${name}`).join(" ");
  for (const [name, value] of Object.entries(props))
    if (value != null && (value !== false || name.startsWith("aria-"))) set(node, name, value);
  append(node, children);
  return node;
}

/** @param {any} node @param {string} name @param {any} value */
function set(node, name, value) {
  if (name === "label") node.setAttribute("aria-label", value);
  else if (name === "class") node.className = value;
  else if (name === "style") for (const [key, rule] of Object.entries(value)) node.style.setProperty(key, rule);
  else if (name.startsWith("on") && typeof value === "function")
    node.addEventListener(name.slice(2).toLowerCase(), value);
  else if (PROPERTIES.has(name)) node[name] = value;
  else if (/^(aria-|data-|role$|for$|list$)/.test(name)) node.setAttribute(name, String(value));
  else throw new Error(`h: ${name} is not allowed`);
}

/** @param {Node} node @param {any[]} children */
export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false || child === true) continue;
    node.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replace the content of an element. @param {Element} node @param {...any} children */
export function fill(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

// Control characters except tab and newline, bidi marks, zero-width and other invisible characters, lone surrogates.
const ODD = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b\\u200c\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff9-\\ufffb" +
    "\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]|(?<![\\p{Extended_Pictographic}\\ufe0f\\u{1f3fb}-\\u{1f3ff}])\\u200d",
  "gu",
);

/** Return the escape of a character: \x1b, \u202e, \U000e0041. @param {string} char */
function escaped(char) {
  const code = char.codePointAt(0) ?? 0;
  const [mark, width] = code < 0x100 ? ["\\x", 2] : code < 0x10000 ? ["\\u", 4] : ["\\U", 8];
  return mark + code.toString(16).padStart(width, "0");
}

/** Return a text with invisible characters written as escapes (\x1b, \u202e). @param {any} text @returns {string} */
export const visible = (text) => String(text ?? "").replace(ODD, escaped);

/**
 * Return the same text as nodes. Each escape is a styled element, so that typed text cannot imitate an escape.
 * @param {any} text @returns {DocumentFragment}
 */
export function marked(text) {
  const out = document.createDocumentFragment(),
    source = String(text ?? "");
  let from = 0;
  for (const found of source.matchAll(ODD)) {
    if (found.index > from) out.append(source.slice(from, found.index));
    const name = escaped(found[0]);
    out.append(h("span", { class: "art-odd", title: `invisible character ${name}` }, name));
    from = found.index + found[0].length;
  }
  if (from < source.length) out.append(source.slice(from));
  return out;
}

/**
 * Connect a panel to the kernel. Each request has an id, and the reply with the same id settles its promise.
 * @param {any} model anywidget's model
 */
export function link(model) {
  /** @type {Map<number, {resolve: Function, reject: Function}>} */
  const open = new Map();
  let next = 1,
    seq = /** @type {number|null} */ (null);
  const ticks = new Set(),
    gaps = new Set(),
    off = [];
  const listen = (name, fn) => (model.on(name, fn), off.push(() => model.off(name, fn)));
  const client = Math.random().toString(36).slice(2, 10); // several views can share one model

  listen("msg:custom", (message, buffers) => {
    if (message?.client !== client || !open.has(message?.id)) return;
    const { resolve, reject } = open.get(message.id);
    open.delete(message.id);
    if (message.ok) resolve({ reply: message.reply, buffers: buffers ?? [] });
    else reject(new Error(message.error ?? "The kernel sent an error without a message."));
  });
  listen("change:tick", () => {
    const tick = model.get("tick") ?? {};
    const missed = seq != null && tick.seq > seq + 1;
    seq = tick.seq ?? seq;
    for (const fn of ticks) fn(tick);
    if (missed) for (const fn of gaps) fn(tick);
  });
  seq = model.get("tick")?.seq ?? null;

  return {
    /**
     * Send a command to the kernel and return its reply.
     * @param {string} command @param {Record<string, any>} [args] @param {{signal?: AbortSignal}} [options]
     * @returns {Promise<{reply: any, buffers: DataView[]}>}
     */
    request(command, args = {}, { signal } = {}) {
      return new Promise((resolve, reject) => {
        if (signal?.aborted) return reject(new DOMException("request aborted", "AbortError"));
        const id = next++;
        open.set(id, { resolve, reject });
        signal?.addEventListener("abort", () => {
          if (open.delete(id)) reject(new DOMException("request aborted", "AbortError"));
        });
        model.send({ id, client, command, args });
      });
    },
    /** Call a function with every tick. Return a function that unsubscribes it. @param {(tick: any) => void} fn */
    onTick(fn) {
      ticks.add(fn);
      return () => ticks.delete(fn);
    },
    /** Call a function when ticks were lost, so that it can request the index again. Return a function that unsubscribes it. @param {(tick: any) => void} fn */
    onGap(fn) {
      gaps.add(fn);
      return () => gaps.delete(fn);
    },
    /** Call a function when a trait changes. @param {string} name @param {() => void} fn */
    onChange(name, fn) {
      listen(`change:${name}`, fn);
    },
    close() {
      off.splice(0).forEach((stop) => stop());
      for (const { reject } of open.values()) reject(new DOMException("panel closed", "AbortError"));
      open.clear();
    },
  };
}

const TYPED = "input:not([type=checkbox]):not([type=radio]):not([type=button]), textarea, select, [contenteditable]";

/** Return the name of a pressed key: "j", "J", "Alt+ArrowUp", "Ctrl+Enter", "Shift+Tab". @param {KeyboardEvent} event */
export function keyName(event) {
  const shift = event.shiftKey && event.key.length > 1 ? "Shift+" : "";
  const control = (event.ctrlKey ? "Ctrl+" : "") + (event.metaKey ? "Meta+" : "");
  return `${control}${event.altKey ? "Alt+" : ""}${shift}${event.key}`;
}

/**
 * Handle the keys of a panel while the panel has the focus and the user is not typing. JupyterLab does not receive these
 * keys. If a handler returns false, the default action of the key is kept. Return a function that removes the listener.
 * @param {HTMLElement} root @param {Record<string, (event: KeyboardEvent) => any>} table
 */
export function keys(root, table) {
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  if (!root.hasAttribute("tabindex")) root.tabIndex = 0;
  const hear = (/** @type {KeyboardEvent} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    event.stopPropagation();
    if (target.closest(TYPED) || event.isComposing || event.defaultPrevented) return;
    const name = keyName(event);
    if (/^(Enter| )$/.test(name) && target !== root && target.closest("button, summary, a, [role=button], input"))
      return;
    if (table[name] && table[name](event) !== false) event.preventDefault();
  };
  root.addEventListener("keydown", hear);
  return () => root.removeEventListener("keydown", hear);
}

/** Return whether the page is dark, as set by JupyterLab, Colab or VS Code, or else by the operating system. */
function isDark() {
  const { body, documentElement: html } = document;
  const lab = body.getAttribute("data-jp-theme-light");
  if (lab) return lab === "false";
  if (html.getAttribute("theme")) return html.getAttribute("theme") === "dark";
  if (/\bvscode-/.test(body.className)) return /vscode-dark|vscode-high-contrast(?!-light)/.test(body.className);
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Keep the theme classes of an element up to date. Return a function that stops this. @param {HTMLElement} root */
function themed(root) {
  const apply = () => {
    root.classList.toggle("art-dark", isDark());
    root.classList.toggle(
      "art-contrast",
      /high.contrast/i.test(document.body.className + document.body.getAttribute("data-jp-theme-name")),
    );
  };
  const watch = new MutationObserver(apply),
    media = matchMedia("(prefers-color-scheme: dark)");
  for (const node of [document.body, document.documentElement]) {
    watch.observe(node, {
      attributes: true,
      attributeFilter: ["class", "theme", "data-jp-theme-light", "data-jp-theme-name"],
    });
  }
  media.addEventListener("change", apply);
  apply();
  return () => (watch.disconnect(), media.removeEventListener("change", apply));
}

const VIEW = "application/vnd.jupyter.widget-view+json",
  SAVERS = Symbol.for("art_nb.savers"), // a global symbol, because each panel loads its own copy of this module
  forms = /** @type {Record<string, string>} */ ({});

/** Save this static HTML instead of the HTML that the panel was displayed with. @param {any} model @param {string} html */
export const keepForm = (model, html) => (forms[model.get("comm_id")] = html);

/**
 * Return the functions that change the outputs of a document when it is saved.
 * @param {any} doc @returns {Set<(output: any) => any>}
 */
function saversOf(doc) {
  if (doc[SAVERS]) return doc[SAVERS];
  const savers = (doc[SAVERS] = new Set()),
    toJSON = doc.toJSON;
  const saved = (/** @type {any} */ output) => [...savers].reduce((out, save) => save(out), output);
  doc.toJSON = () => {
    const json = toJSON.call(doc);
    return {
      ...json,
      cells: json.cells.map((cell) => (cell.outputs ? { ...cell, outputs: cell.outputs.map(saved) } : cell)),
    };
  };
  return savers;
}

/**
 * Keep the output of a panel readable in JupyterLab and Notebook 7, where the widget manager has access to the notebook
 * document. A saved notebook contains only the static HTML and, in the metadata of the output, the ID of the panel. When
 * a page opens the notebook and the kernel still has the panel, the live panel replaces the static HTML. A frozen panel is
 * replaced in the document, because a reloaded page has no display IDs.
 * @param {{model: any}} host anywidget's model
 */
export function initialize({ model }) {
  const doc = model.widget_manager?.context?.model;
  if (!doc?.cells) return;
  const restore = () => {
    const id = model.get("comm_id"),
      html = model.get("static_html"),
      { dirty } = doc;
    for (const { outputs } of id ? doc.cells : [])
      for (let i = 0; i < outputs?.length; i++) {
        const { data, metadata } = outputs.get(i),
          live = data?.[VIEW]?.model_id === id;
        if (!live && metadata?.art_nb !== id) continue;
        const shown = html
          ? { "text/html": html }
          : { ...data, [VIEW]: { model_id: id, version_major: 2, version_minor: 0 } };
        if (html || !live) outputs.set(i, { output_type: "display_data", data: shown, metadata: {} });
      }
    if (!html) doc.dirty = dirty; // the file has not changed
  };
  const save = (/** @type {any} */ output) => {
    const { [VIEW]: view, ...data } = output.data ?? {},
      id = view?.model_id;
    if (!id || id !== model.get("comm_id")) return output;
    return {
      ...output,
      data: { ...data, "text/html": forms[id] ?? data["text/html"] },
      metadata: { ...output.metadata, art_nb: id },
    };
  };
  const savers = saversOf(doc).add(save);
  model.on("change:static_html", restore);
  setTimeout(restore); // wait until the manager has registered the model
  return () => (savers.delete(save), delete forms[model.get("comm_id")]);
}

/**
 * Render a panel: set the theme, show errors, connect to the kernel, and clean up when the panel is closed.
 * @param {{model: any, el: HTMLElement}} host
 * @param {(root: HTMLElement, wire: ReturnType<typeof link>, model: any) => (void | (() => void))} build fills the root element and may return a cleanup function
 * @returns {() => void} closes the panel
 */
export function mount({ model, el }, build) {
  const strip = h("div", { class: "art-strip", role: "alert", hidden: true }),
    root = h("div", { class: "art-panel" });
  const wire = link(model),
    host = h("div", { class: "art-host" }, strip, root),
    unTheme = themed(host);
  const say = () => {
    const text = model.get("last_error_text");
    strip.hidden = !text;
    fill(
      strip,
      h("span", marked(text)),
      h("button", { class: "art-button", onclick: () => (strip.hidden = true) }, "Dismiss"),
    );
  };
  wire.onChange("last_error_text", say);
  el.append(host);
  say();
  const done = build(root, wire, model);
  return () => {
    done?.();
    unTheme();
    wire.close();
  };
}

/** Create secondary text. @param {...any} children */
export const muted = (...children) => h("span.muted", children);

/** Create a table row with a row header. @param {any} name @param {...any} cells */
export const row = (name, ...cells) =>
  h(
    "tr",
    h("th", { scope: "row" }, name),
    cells.map((cell) => h("td", cell)),
  );

/** Create a small button that shows a symbol. @param {string} sign @param {string} label @param {() => any} onclick */
export const signed = (sign, label, onclick) => h("button.button.plain", { label, title: label, onclick }, sign);

/** Limit an index to a list of `count` elements. @param {number} i @param {number} count */
export const clamp = (i, count) => Math.max(0, Math.min(count - 1, i));

/** Return a function that calls `fn` at most once per frame. @param {Function} fn */
export function perFrame(fn) {
  let asked = 0;
  return (...args) => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => fn(...args));
  };
}

/** Add an ARIA live region. Return a function that announces a text, at most twice per second. @param {HTMLElement} root */
export function announcer(root) {
  const region = h("div", { class: "art-quiet", role: "status", "aria-live": "polite" });
  root.append(region);
  let last = 0,
    timer = 0;
  return (/** @type {string} */ text) => {
    clearTimeout(timer);
    timer = setTimeout(
      () => ((last = Date.now()), (region.textContent = text)),
      Math.max(0, 500 - (Date.now() - last)),
    );
  };
}

/** Format a number with few digits and a typographic minus, or "–" if there is no number. @param {any} value @param {number} [digits] */
export function num(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const abs = Math.abs(value),
    short = +value.toPrecision(digits);
  const text = abs !== 0 && (abs < 1e-3 || abs >= 1e6) ? short.toExponential() : String(short);
  return text.replace("-", "−");
}
