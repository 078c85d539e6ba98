// Code shared by all panels: DOM elements without HTML strings, messages to the kernel, keys, themes, escaped text.

/** Properties that `h` may set, in addition to aria-*, data-* and role. None of them can contain markup or code. */
const PROPERTIES = new Set(
  (
    "id class type value disabled hidden tabIndex title placeholder min max step open selected rows maxLength " +
    "spellcheck scope"
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
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b\\u200c\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff9-\\ufffb" +
    "\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]|(?<![\\p{Extended_Pictographic}\\ufe0f\\u{1f3fb}-\\u{1f3ff}])\\u200d",
  "gu",
);

/** Return the escape of a character: \x1b, \u202e, \U000e0041. @param {string} char */
function escapeCharacter(char) {
  const code = char.codePointAt(0) ?? 0;
  const [mark, width] = code < 0x100 ? ["\\x", 2] : code < 0x10000 ? ["\\u", 4] : ["\\U", 8];
  return mark + code.toString(16).padStart(width, "0");
}

/** Return a text with invisible characters written as escapes (\x1b, \u202e). @param {any} text @returns {string} */
export const visible = (text) => String(text ?? "").replace(INVISIBLE, escapeCharacter);

/**
 * Return the same text as nodes. Each escape is a styled element, so that typed text cannot imitate an escape.
 * @param {any} text @returns {DocumentFragment}
 */
export function marked(text) {
  const fragment = document.createDocumentFragment(),
    source = String(text ?? "");
  let end = 0;
  for (const match of source.matchAll(INVISIBLE)) {
    if (match.index > end) fragment.append(source.slice(end, match.index));
    const name = escapeCharacter(match[0]);
    fragment.append(h("span.odd", { title: `invisible character ${name}` }, name));
    end = match.index + match[0].length;
  }
  if (end < source.length) fragment.append(source.slice(end));
  return fragment;
}

/**
 * Connect a panel to the kernel. Each request has an id, and the reply with the same id settles its promise.
 * @param {any} model anywidget's model
 */
export function link(model) {
  /** @type {Map<number, {resolve: Function, reject: Function}>} */
  const pending = new Map();
  let nextId = 1,
    lastSeq = /** @type {number|null} */ (null);
  const tickListeners = new Set(),
    gapListeners = new Set(),
    unsubscribers = [];
  const listen = (name, fn) => (model.on(name, fn), unsubscribers.push(() => model.off(name, fn)));
  const client = Math.random().toString(36).slice(2, 10); // several views can share one model

  listen("msg:custom", (message, buffers) => {
    if (message?.client !== client || !pending.has(message?.id)) return;
    const { resolve, reject } = pending.get(message.id);
    pending.delete(message.id);
    if (message.ok) resolve({ reply: message.reply, buffers: buffers ?? [] });
    else reject(new Error(message.error ?? "The kernel sent an error without a message."));
  });
  listen("change:tick", () => {
    const tick = model.get("tick") ?? {};
    const missed = lastSeq != null && tick.seq > lastSeq + 1;
    lastSeq = tick.seq ?? lastSeq;
    for (const fn of tickListeners) fn(tick);
    if (missed) for (const fn of gapListeners) fn(tick);
  });
  lastSeq = model.get("tick")?.seq ?? null;

  return {
    /**
     * Send a command to the kernel and return its reply.
     * @param {string} command @param {Record<string, any>} [args] @param {{signal?: AbortSignal}} [options]
     * @returns {Promise<{reply: any, buffers: DataView[]}>}
     */
    request(command, args = {}, { signal } = {}) {
      return new Promise((resolve, reject) => {
        if (signal?.aborted) return reject(new DOMException("request aborted", "AbortError"));
        const id = nextId++;
        pending.set(id, { resolve, reject });
        signal?.addEventListener("abort", () => {
          if (pending.delete(id)) reject(new DOMException("request aborted", "AbortError"));
        });
        model.send({ id, client, command, args });
      });
    },
    /** Call a function with every tick. Return a function that unsubscribes it. @param {(tick: any) => void} fn */
    onTick(fn) {
      tickListeners.add(fn);
      return () => tickListeners.delete(fn);
    },
    /** Call a function when ticks were lost, so that it can request the index again. Return a function that unsubscribes it. @param {(tick: any) => void} fn */
    onGap(fn) {
      gapListeners.add(fn);
      return () => gapListeners.delete(fn);
    },
    /** Call a function when a trait changes. @param {string} name @param {() => void} fn */
    onChange(name, fn) {
      listen(`change:${name}`, fn);
    },
    close() {
      unsubscribers.splice(0).forEach((stop) => stop());
      for (const { reject } of pending.values()) reject(new DOMException("panel closed", "AbortError"));
      pending.clear();
    },
  };
}

const TEXT_FIELDS =
  "input:not([type=checkbox]):not([type=radio]):not([type=button]), textarea, select, [contenteditable]";

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
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    event.stopPropagation();
    if (target.closest(TEXT_FIELDS) || event.isComposing || event.defaultPrevented) return;
    const name = keyName(event);
    if (/^(Enter| )$/.test(name) && target !== root && target.closest("button, summary, a, [role=button], input"))
      return;
    if (table[name] && table[name](event) !== false) event.preventDefault();
  };
  root.addEventListener("keydown", onKeyDown);
  return () => root.removeEventListener("keydown", onKeyDown);
}

/** Return whether the page is dark, as set by JupyterLab, Colab or VS Code, or else by the operating system. */
function isDark() {
  const { body, documentElement: html } = document;
  const labTheme = body.getAttribute("data-jp-theme-light");
  if (labTheme) return labTheme === "false";
  if (html.getAttribute("theme")) return html.getAttribute("theme") === "dark";
  if (/\bvscode-/.test(body.className)) return /vscode-dark|vscode-high-contrast(?!-light)/.test(body.className);
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Keep the theme classes of an element up to date. Return a function that stops this. @param {HTMLElement} root */
function followTheme(root) {
  const apply = () => {
    root.classList.toggle("art-dark", isDark());
    root.classList.toggle(
      "art-contrast",
      /high.contrast/i.test(document.body.className + document.body.getAttribute("data-jp-theme-name")),
    );
  };
  const observer = new MutationObserver(apply),
    darkMedia = matchMedia("(prefers-color-scheme: dark)");
  for (const node of [document.body, document.documentElement]) {
    observer.observe(node, {
      attributes: true,
      attributeFilter: ["class", "theme", "data-jp-theme-light", "data-jp-theme-name"],
    });
  }
  darkMedia.addEventListener("change", apply);
  apply();
  return () => (observer.disconnect(), darkMedia.removeEventListener("change", apply));
}

const VIEW_MIME = "application/vnd.jupyter.widget-view+json",
  SAVERS = Symbol.for("art_nb.savers"), // a global symbol, because each panel loads its own copy of this module
  staticForms = /** @type {Record<string, string>} */ ({});

/** Save this static HTML instead of the HTML that the panel was displayed with. @param {any} model @param {string} html */
export const saveStaticHtml = (model, html) => (staticForms[model.get("comm_id")] = html);

/**
 * Return the functions that change the outputs of a document when it is saved.
 * @param {any} doc @returns {Set<(output: any) => any>}
 */
function saversOf(doc) {
  if (doc[SAVERS]) return doc[SAVERS];
  const savers = (doc[SAVERS] = new Set()),
    toJSON = doc.toJSON;
  const applySavers = (/** @type {any} */ output) => [...savers].reduce((out, save) => save(out), output);
  doc.toJSON = () => {
    const json = toJSON.call(doc);
    return {
      ...json,
      cells: json.cells.map((cell) => (cell.outputs ? { ...cell, outputs: cell.outputs.map(applySavers) } : cell)),
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
          live = data?.[VIEW_MIME]?.model_id === id;
        if (!live && metadata?.art_nb !== id) continue;
        const shown = html
          ? { "text/html": html }
          : { ...data, [VIEW_MIME]: { model_id: id, version_major: 2, version_minor: 0 } };
        if (html || !live) outputs.set(i, { output_type: "display_data", data: shown, metadata: {} });
      }
    if (!html) doc.dirty = dirty; // the file has not changed
  };
  const save = (/** @type {any} */ output) => {
    const { [VIEW_MIME]: view, ...data } = output.data ?? {},
      id = view?.model_id;
    if (!id || id !== model.get("comm_id")) return output;
    return {
      ...output,
      data: { ...data, "text/html": staticForms[id] ?? data["text/html"] },
      metadata: { ...output.metadata, art_nb: id },
    };
  };
  const savers = saversOf(doc).add(save);
  model.on("change:static_html", restore);
  setTimeout(restore); // wait until the manager has registered the model
  return () => (savers.delete(save), delete staticForms[model.get("comm_id")]);
}

/**
 * Render a panel: set the theme, show errors, connect to the kernel, and clean up when the panel is closed.
 * @param {{model: any, el: HTMLElement}} host
 * @param {(root: HTMLElement, wire: ReturnType<typeof link>, model: any) => (void | (() => void))} build fills the root element and may return a cleanup function
 * @returns {() => void} closes the panel
 */
export function mount({ model, el }, build) {
  const errorBar = h("div.strip", { role: "alert", hidden: true }),
    root = h("div.panel");
  const wire = link(model),
    host = h("div.host", errorBar, root),
    stopTheme = followTheme(host);
  const showError = () => {
    const text = model.get("last_error_text");
    errorBar.hidden = !text;
    fill(errorBar, h("span", marked(text)), h("button.button", { onclick: () => (errorBar.hidden = true) }, "Dismiss"));
  };
  wire.onChange("last_error_text", showError);
  el.append(host);
  showError();
  const cleanUp = build(root, wire, model);
  return () => {
    cleanUp?.();
    stopTheme();
    wire.close();
  };
}

/** Return the elements below a node that have a class. @param {any} node @param {string} name without the prefix `art-` */
export const all = (node, name) => [...node.querySelectorAll(`.art-${name}`)];

/** Create a label for something unusual. @param {any} text @param {string} [title] */
export const warning = (text, title) => h("span.badge.is-warn", { title }, text);

/** Create secondary text. @param {...any} children */
export const muted = (...children) => h("span.muted", children);

/** Create a table row with a row header. @param {any} name @param {...any} cells */
export const tableRow = (name, ...cells) =>
  h(
    "tr",
    h("th", { scope: "row" }, name),
    cells.map((cell) => h("td", cell)),
  );

/** Create a small button that shows a symbol. @param {string} sign @param {string} label @param {() => any} onclick */
export const iconButton = (sign, label, onclick) => h("button.button.plain", { label, title: label, onclick }, sign);

/**
 * Return a function that runs `work`. Calls during the work lead to one more run.
 * @param {() => Promise<any>} work @param {(message: string, error: any) => void} report called if the work fails
 */
export function coalesce(work, report) {
  let calls = 0; // since the last run began; 0 while nothing runs
  return async () => {
    if (calls++) return;
    try {
      do {
        calls = 1;
        await work();
      } while (calls > 1);
    } catch (error) {
      report(error.message, error);
    } finally {
      calls = 0;
    }
  };
}

/** Return a number with its noun: "1 rollout", "2 rollouts". @param {number} n @param {string} noun */
export const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

/** Limit an index to a list of `count` elements. @param {number} i @param {number} count */
export const clamp = (i, count) => Math.max(0, Math.min(count - 1, i));

/** Return a function that calls `fn` at most once per frame. @param {Function} fn */
export function perFrame(fn) {
  let frame = 0;
  return (...args) => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => fn(...args));
  };
}

/** Add an ARIA live region. Return a function that announces a text, at most twice per second. @param {HTMLElement} root */
export function announcer(root) {
  const region = h("div.quiet", { role: "status", "aria-live": "polite" });
  root.append(region);
  let lastTime = 0,
    timer = 0;
  return (/** @type {string} */ text) => {
    clearTimeout(timer);
    timer = setTimeout(
      () => ((lastTime = Date.now()), (region.textContent = text)),
      Math.max(0, 500 - (Date.now() - lastTime)),
    );
  };
}

/** Move the focus to the next or previous element of a list. @param {HTMLElement} root @param {string} selector @param {number} by */
export function moveFocus(root, selector, by) {
  const nodes = [...root.querySelectorAll(selector)],
    i = nodes.indexOf(/** @type {any} */ (root.getRootNode()).activeElement);
  /** @type {any} */ (nodes[i < 0 ? 0 : clamp(i + by, nodes.length)])?.focus();
}

/** Create the button that replaces a panel with its static form. @param {any} wire */
export const freezeButton = (wire) =>
  h(
    "button.button",
    {
      title: "Replace this panel with static HTML in the notebook",
      onclick: () => wire.request("freeze").catch(() => {}),
    },
    "Make static",
  );

/** Format a number with few digits and a typographic minus, or "–" if there is no number. @param {any} value @param {number} [digits] */
export function num(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const abs = Math.abs(value),
    rounded = +value.toPrecision(digits);
  const text = abs !== 0 && (abs < 1e-3 || abs >= 1e6) ? rounded.toExponential() : String(rounded);
  return text.replace("-", "−");
}
