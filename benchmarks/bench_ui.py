"""Measure the speed of the panels in Chromium and compare it with their budgets.

The script prints a table, or with `--json` a JSON object. A page runs the real script and communicates over HTTP with
the real Python panel. The script asserts nothing."""

import argparse
import json
import statistics
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import ui
from support.view_parts import Talk, crowd

import art_nb as art
from art_nb.panels.viewer import RolloutViewer

PAINTED = """new MutationObserver(() => { const bar = document.querySelector('.art-bar')?.textContent ?? '';
  const later = (name) => window[name] ??
    requestAnimationFrame(() => setTimeout(() => { window[name] ??= performance.now(); }));
  if (document.querySelector('.art-row-rollout')) later('rowsAt');
  if (document.querySelector('.art-row-rollout') && / rollout/.test(bar) && !/loading/.test(bar)) later('allAt');
}).observe(document, { childList: true, subtree: true, characterData: true });"""
SCROLL = """async () => { const list = document.querySelector('.art-list'), took = [];
  for (let i = 0; i < 120; i++) { const before = performance.now(); list.scrollTop += 700;
    await new Promise(requestAnimationFrame); await new Promise((resolve) => setTimeout(resolve));
    took.push(performance.now() - before); }
  return [took.sort((a, b) => a - b)[114], Math.max(document.querySelectorAll('.art-row').length)]; }"""
PAGES = """async () => { const took = [];
  const ask = (id) => new Promise((resolve) => { const hear = (message) => {
    if (message.id === id) { model.off('msg:custom', hear); resolve(); } }; model.on('msg:custom', hear);
    const ids = Array.from({length: 200}, (_, i) => (id * 200 + i) % 10000);
    model.send({ id, client: 'bench', command: 'page', args: { ids } }); });
  for (let i = 0; i < 60; i++) {
    const start = performance.now(); await ask(1e6 + i); took.push(performance.now() - start); }
  return took.sort((a, b) => a - b)[57]; }"""
TOKENS = """() => { const drawn = () => document.querySelectorAll('[data-k]').length >= 4000;
  new MutationObserver(() => { if (drawn() && !window.drawn) {
    window.drawn = true; requestAnimationFrame(() => setTimeout(() => { window.tokensAt = performance.now(); })); } })
    .observe(document.body, { childList: true, subtree: true });
  const fire = model.fire.bind(model);
  model.fire = (name, ...rest) => {
    if (name === 'msg:custom') window.answerAt = performance.now();
    fire(name, ...rest); }; }"""


def opened(browser, bridge, panel):
    """Open a page with a panel and wait until it is painted."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.add_init_script(PAINTED)
    page.goto(bridge.serve(panel))
    page.wait_for_function("window.allAt && document.querySelector('.art-msg')")
    return page


def first_paint(browser, bridge, groups) -> tuple[float, float]:
    """Return the milliseconds until rows are painted, and until the whole index is loaded."""
    panel = RolloutViewer(groups)
    page = opened(browser, bridge, panel)
    took = page.evaluate("[rowsAt - rendered.start, allAt - rendered.start]")
    page.close()
    panel.close()
    return took


def measure(browser, bridge, repeats: int) -> dict[str, tuple[float, float]]:
    """Return each measured value with its budget."""

    def median(values):
        return round(statistics.median(values), 1)

    small, large = crowd(256), crowd(10_000)
    paints = [[first_paint(browser, bridge, groups) for _ in range(repeats)] for groups in (small, large)]
    panel = RolloutViewer(large)
    page = opened(browser, bridge, panel)
    scroll, rows = zip(*[page.evaluate(SCROLL) for _ in range(repeats)])
    pages = [page.evaluate(PAGES) for _ in range(repeats)]
    state = sum(len(json.dumps(value, default=str)) for value in panel.get_state().values())
    words = " ".join(f"w{n}" for n in range(4000))
    long = Talk().add("user", "Go on.").say(words, [-(n % 50) / 10 for n in range(4000)]).end(1.0)
    tokens = []
    for _ in range(repeats):
        page = opened(browser, bridge, RolloutViewer(art.TrajectoryGroup([long])))
        page.evaluate(TOKENS)
        page.select_option("[aria-label='Color tokens by']", "logprob")
        page.wait_for_function("window.tokensAt")
        tokens.append(page.evaluate("tokensAt - answerAt"))
    files = {path.name: path.stat().st_size for path in (Path(art.__file__).parent / "static").iterdir()}
    return {
        "first paint, 256 rollouts, ms": (median(a for a, _ in paints[0]), 100),
        "first paint, 10 000 rollouts, ms": (median(a for a, _ in paints[1]), 300),
        "whole index, 10 000 rollouts, ms": (median(b for _, b in paints[1]), 300),
        "page of 200 previews, p95, ms": (median(pages), 100),
        "scroll frame, p95, ms": (median(scroll), 33),
        "rows in the page while scrolling": (max(rows), 60),
        "4 000 colored tokens, ms": (median(tokens), 250),
        "widget state, kB": (round(state / 1000, 1), 1000),
        **{
            f"{name}, script and style, kB": (round((files[f"{name}.js"] + files[f"{name}.css"]) / 1024, 1), 60)
            for name in ("viewer", "live", "judging")
            if f"{name}.js" in files
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bridge = ui.Bridge()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=ui.chromium(), args=["--no-sandbox"])
        figures = measure(browser, bridge, options.repeats)
        browser.close()
    bridge.close()
    if options.json:
        results = {name: {"measured": value, "budget": budget} for name, (value, budget) in figures.items()}
        print(json.dumps(results, indent=1))
    else:
        for name, (value, budget) in figures.items():
            print(f"{name:42} {value:>8}   budget {budget:>5}   {'ok' if value <= budget else 'over'}")
