// The rollout viewer inside another panel.
import { h } from "./panel.js";

/** Load the viewer. Its script and style sheet come from the kernel. @param {any} wire @param {HTMLElement} root */
async function loadViewer(wire, root) {
  const { buffers } = await wire.request("viewer_files"),
    [script, style] = buffers.map((buffer) => new TextDecoder().decode(buffer));
  const sheet = new CSSStyleSheet(),
    home = /** @type {any} */ (root.getRootNode());
  sheet.replaceSync(style);
  home.adoptedStyleSheets = [...home.adoptedStyleSheets, sheet];
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Create a place for the viewer, which is loaded at its first use. @param {{wire: any, root: HTMLElement, model: any}} app */
export function createEmbeddedViewer({ wire, root, model }) {
  const node = h("div");
  let viewer = null,
    closeViewer = null,
    jumps = 0;

  async function open(ui) {
    viewer ??= await loadViewer(wire, root);
    close();
    model.set("ui", { ...model.get("ui"), turn: null, ...ui });
    closeViewer = viewer.render({ model, el: node });
  }
  function close() {
    closeViewer?.();
    closeViewer = null;
    node.replaceChildren();
  }
  return {
    node,
    close,
    /** Show a rollout. @param {number} id */
    async show(id) {
      if (closeViewer) model.set("jump", { id, turn: null, seq: `page-${++jumps}` });
      else await open({ id, ids: [] });
    },
    /** Show two to four rollouts side by side. @param {number[]} ids */
    compare: (ids) => open({ id: ids[0], ids }),
  };
}
