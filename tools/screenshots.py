"""Screenshots of the panels in a real JupyterLab and of the documentation site, as contact sheets.

    .venv/bin/python tools/screenshots.py FINISHED RUNNING AGENT

These are run directories of the embedded model. A process must train in RUNNING while this program works. AGENT is a
run with tools, such as that of examples/rock_paper_tool_use, for the failures panel. `make docs` must have built the
site. The sheets are in docs/images/sheets. Each has the light theme on the left and the dark one on the right. The
rows are the states of the panel, or pages of the site. The images in docs/images show FINISHED and AGENT; overview.png
is the one in the README. The judging panel shows the answers of the RULER tutorial with the recorded scores of a
reader.
"""

import re
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.ui import Lab, LabPage, chromium  # noqa: E402

SHEETS = ROOT / "docs" / "images" / "sheets"
WIDTHS = (1440, 870)
SITE_WIDTHS = (1440, 390)
HEIGHT = 3000  # of the window; the whole output must fit
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCALE = 0.5  # of a screenshot in its sheet
GAP = 8  # pixels between screenshots
LOADING = re.compile("· loading|reading more")  # in the title of a panel that does not show all rollouts yet
VIEWER_HEIGHT = 560  # of the viewer in the README's image
START = "import art_nb as art\nimport art_nb.panels.live_cell"
JUDGE = """
RUBRIC = '''\\
- The answer must be true, and an answer to the question that was asked. Nonsense gets 0, however well it is phrased.
- Of two true answers, the one in one short whole sentence is better; added falsehoods cost more than added words.
- Partly right is worth part of the score.'''
groups = art.open_run({folder!r} + "/rollouts").read_groups("train", 0)
panel = await art.judge(groups[1:5], judge="recording:" + {folder!r} + "/reader.jsonl", rubric=RUBRIC)
"""
ASK = """
import asyncio

person = art.Person()
waiting = asyncio.ensure_future(art.score_group(groups[0], person))
await asyncio.sleep(0.5)
panel = await art.judge(person)
"""
PLAY = """
lora = {{"rank": 16, "alpha": 32}}  # of the demo
model = art.TrainableModel(name={name!r}, project={project!r}, base_model="smollm2-135m", lora_config=lora)
backend = art.LocalBackend(path={root!r}, verbose=False)
await model.register(backend)
panel = art.playground(model)
panel.set_chats(2)
panel.choose_step(0, 0)
panel.add("user", {question!r})
for chat in (0, 1):
    await panel.reply(chat, max_tokens=24)
panel
"""
VIEW = """
from statistics import pstdev

path = {path!r}
step = art.open_run(path).steps("train")[-1]
rewards = [[rollout.reward for rollout in group] for group in art.open_run(path).read_groups("train", step)]
group = max(range(len(rewards)), key=lambda n: pstdev(rewards[n]))
panel = art.view(path)
panel.ui = {{"color": "advantage"}}
panel.goto(f"train/{{step}}/{{group}}/{{rewards[group].index(max(rewards[group]))}}")
panel
"""
QUESTION = "Name three planets, separated by commas."
PAGES = ("index.html", "docs/start/first-task.html", "examples/tic_tac_toe/tic-tac-toe.html", "api/art.Run.html")


def cells(finished, running, agent):
    """Return the cell of each panel and state. `saved` states are taken after the kernel has ended."""
    return {
        ("live", "running"): f"art.Run.attach({running!r})",
        ("live", "finished"): f"art.Run.attach({finished!r})",
        ("viewer", "running"): f"art.view({running!r})",
        ("viewer", "finished"): VIEW.format(path=finished),
        ("judging", "finished"): JUDGE.format(folder=str(ROOT / "examples" / "ruler")),
        ("judging", "running"): ASK,
        ("failures", "finished"): f"art.failures({agent!r})",
        ("compare", "finished"): f"art.compare({finished!r}, {running!r})",
        ("playground", "finished"): play(finished),
    }


def play(path):
    """Return the cell that opens the playground of a run."""
    *_, project, _, name = Path(path).parts
    return PLAY.format(name=name, project=project, root=str(Path(path).parents[2]), question=QUESTION)


def output_image(notebook, n):
    """Return a screenshot of the output of a cell."""
    notebook.cell(n).scroll_into_view_if_needed()
    notebook.cell(n).get_by_text(LOADING).first.wait_for(state="hidden")
    notebook.page.wait_for_timeout(1500)  # charts are drawn in several frames
    panel = notebook.cell(n).locator(".jp-OutputArea-output:has(.art-panel)")
    output = panel.first if panel.count() else notebook.output(n)  # a saved panel is plain HTML
    if notebook.cell(n).locator("[data-mime-type='application/vnd.jupyter.stderr']").count():
        raise RuntimeError(f"Cell {n} failed: {notebook.output(n).inner_text()}")
    return Image.open(BytesIO(output.screenshot()))


def screenshots(browser, lab, sources, theme, width):
    """Return the screenshots of one theme and width: while the kernel lives, and of the saved notebook."""
    lab.settings("apputils-extension/themes", {"theme": THEMES[theme]})
    context = browser.new_context(viewport={"width": width, "height": HEIGHT})
    context.set_default_timeout(120_000)
    notebook = LabPage(lab, context.new_page(), lab.write([START, *sources.values()])).open()
    if width < 1000:
        notebook.page.keyboard.press("Control+b")  # hides the list of files
    images = {}
    notebook.run(0)
    for n, (panel, state) in enumerate(sources, 1):
        notebook.run(n, 120)
        images[panel, state] = output_image(notebook, n)
    notebook.save()
    notebook.end_kernel()
    notebook.reload()
    for n, (panel, state) in enumerate(sources, 1):
        if state == "finished":
            images[panel, "saved"] = output_image(notebook, n)
    context.close()
    return images


def with_palette(image):
    """Return a small image with a palette that keeps rare colors."""
    return image.convert("RGB").quantize(192, method=Image.Quantize.MAXCOVERAGE)


def overview(images):
    """Return the README's image: the live cell, and the upper part of the viewer below it."""
    live, viewer = images["live", "finished"], images["viewer", "finished"]
    viewer = viewer.crop((0, 0, viewer.width, min(viewer.height, VIEWER_HEIGHT)))
    whole = Image.new("RGB", (max(live.width, viewer.width), live.height + GAP + viewer.height), "white")
    whole.paste(live.convert("RGB"), (0, 0))
    whole.paste(viewer.convert("RGB"), (0, live.height + GAP))
    return with_palette(whole)


def save_images(taken):
    """Write the images of README and documentation."""
    overview(taken["light"]).save(SHEETS.parent / "overview.png", optimize=True)
    for theme, images in taken.items():
        for panel in ("live", "viewer", "judging", "failures"):
            path = SHEETS.parent / f"{panel}-{theme}.png"
            with_palette(images[panel, "finished"]).save(path, optimize=True)


def pages(browser, theme, width):
    """Return the screenshots of some pages of the documentation site."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page, images = context.new_page(), []
    for name in PAGES:
        page.goto((ROOT / "build" / "docs" / name).as_uri())
        page.wait_for_timeout(500)
        images.append(Image.open(BytesIO(page.screenshot())))
    context.close()
    return images


def sheet(rows):
    """Return one image of rows of images."""
    rows = [[image.resize((int(image.width * SCALE), int(image.height * SCALE))) for image in row] for row in rows]
    width = max(sum(image.width + GAP for image in row) for row in rows)
    height = sum(max(image.height for image in row) + GAP for row in rows)
    whole, top = Image.new("RGB", (width, height), "#888888"), 0
    for row in rows:
        left = 0
        for image in row:
            whole.paste(image.convert("RGB"), (left, top))
            left += image.width + GAP
        top += max(image.height for image in row) + GAP
    return with_palette(whole)


def link_run(folder, name, run):
    """Return the path of a run in the folder of the notebooks, below a link with this name. Panels show this path."""
    root, notebooks = Path(run).resolve().parents[2], Path(folder) / "notebooks"
    notebooks.mkdir(exist_ok=True)
    (notebooks / name).symlink_to(root)
    return str(Path(name) / Path(run).resolve().relative_to(root))


def main(finished, running, agent):
    SHEETS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = {".art": finished, ".running": running, ".agent": agent}
        sources = cells(*(link_run(folder, name, run) for name, run in runs.items()))
        lab = Lab(Path(folder)).start()
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            for width in WIDTHS:
                taken = {theme: screenshots(browser, lab, sources, theme, width) for theme in THEMES}
                if width == WIDTHS[0]:
                    save_images(taken)
                for panel in dict.fromkeys(panel for panel, _ in sources):
                    states = [state for name, state in taken["light"] if name == panel]
                    rows = [[taken[theme][panel, state] for theme in THEMES] for state in states]
                    sheet(rows).save(SHEETS / f"{panel}-{width}.png", optimize=True)
                    print(SHEETS / f"{panel}-{width}.png", *states, flush=True)
            for width in SITE_WIDTHS:
                columns = [pages(browser, theme, width) for theme in THEMES]
                sheet([*zip(*columns, strict=True)]).save(SHEETS / f"site-{width}.png", optimize=True)
        finally:
            browser.close()
            lab.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
