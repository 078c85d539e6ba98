"""Real browsers for the panels' tests: a bare page bridged to the real Python panel, and JupyterLab.

`conftest` imports the fixtures; `page_with` opens a bare page, `lab` a notebook. Where there is no Chromium the tests
are skipped with the reason, unless ART_NB_BROWSER=required. No async tests in a module that uses them.
"""

import base64
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from comm import get_comm_manager
from comm.base_comm import BaseComm
from support.warm import warm_kernel

PAGE_JS = Path(__file__).with_name("ui_page.js")
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A panel</title>
<link rel="icon" href="data:,"><style>
body {{ margin: 12px; background: {back}; }} h1 {{ position: absolute; clip-path: inset(50%); }}</style></head>
<body data-jp-theme-light="{light}"><main><h1>Panel</h1><div id="panel"></div></main>
<script type="module" src="/ui_page.js"></script></body></html>"""


def chromium() -> str:
    """The browser's path; skips where there is none."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    found = found or shutil.which("google-chrome")
    if found and Path(found).exists():
        return found
    if os.environ.get("ART_NB_BROWSER") == "required":
        pytest.fail("ART_NB_BROWSER=required, and there is no Chromium: install it, or name it in CHROMIUM")
    pytest.skip("no Chromium: install it (apt-get install chromium), or name it in CHROMIUM")


@pytest.fixture(scope="module")
def browser():
    """Chromium under Playwright; module-scoped, because its loop forbids async tests while it lives."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield launched
        launched.close()


CALM = """() => new Promise((done, failed) => { let frames = 0;
  setTimeout(() => failed(new Error(`unanswered: ${[...window.unanswered]}`)), 120_000);
  const look = () => { frames = window.unanswered.size ? 0 : frames + 1;
    if (frames > 2) done(); else requestAnimationFrame(look); };
  look(); })"""


def calm(page) -> None:
    """Wait until all that the page has asked for is there and drawn."""
    page.evaluate(CALM)


def waits(page, condition):
    """Wait for something in Python."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        page.wait_for_timeout(20)


class WireComm(BaseComm):
    """A comm whose far end is a page: what is published waits in one queue for each reader."""

    def __init__(self):
        self.readers: list[queue.Queue] = []
        self.messages: list[dict] = []
        super().__init__(primary=False)
        get_comm_manager().register_comm(self)

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        packed = [base64.b64encode(bytes(buffer)).decode() for buffer in buffers or []]
        event = json.dumps({"type": msg_type, "message": data or {}, "buffers": packed}, allow_nan=False)
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # a kernel refuses lone surrogates
        self.messages.append({"type": msg_type, "bytes": len(event), "time": time.monotonic()})
        for reader in [*self.readers]:
            reader.put(event)

    def heard(self, data):
        self.handle_msg({"content": {"data": data}, "buffers": []})


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a page that was closed
            super().handle_error(request, client_address)


class Bridge:
    """Serves pages with a panel, and carries messages between page and panel, in order, as a kernel does."""

    def __init__(self):
        self.comms, self.panels, self.themes = {}, {}, {}
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"bridge": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def serve(self, panel) -> str:
        """Give the address of a page with the panel."""
        name = uuid.uuid4().hex[:8]
        panel.comm = WireComm()
        self.comms[name], self.panels[name] = panel.comm, panel
        return f"http://127.0.0.1:{self.server.server_port}/{name}/"

    def close(self):
        for comm in self.comms.values():
            for reader in comm.readers:
                reader.put(None)
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    bridge: Bridge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content: str | bytes, kind: str = "text/html; charset=utf-8"):
        body = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        path, _, theme = self.path.partition("?")
        name, _, rest = path.strip("/").partition("/")
        if name == "ui_page.js":
            return self.answer(PAGE_JS.read_bytes(), "text/javascript")
        if name not in self.bridge.panels:
            return self.send_error(404)
        if rest == "state":
            state = self.bridge.panels[name].get_state()
            return self.answer(json.dumps({key: value for key, value in state.items() if key != "layout"}))
        if rest == "events":
            return self.events(self.bridge.comms[name])
        self.answer(PAGE.format(light=str(theme != "dark").lower(), back="#111" if theme == "dark" else "#fff"))

    def events(self, comm: WireComm):
        reader = queue.Queue()
        comm.readers.append(reader)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": open\n\n")
        self.wfile.flush()
        try:
            while (event := reader.get()) is not None:
                self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.flush()
        except OSError:  # the page is gone
            pass
        finally:
            comm.readers.remove(reader)
            self.close_connection = True

    def do_POST(self):
        name = self.path.strip("/").split("/")[0]
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.bridge.lock:  # one message at a time, as in a kernel
            self.bridge.comms[name].heard(data)
        self.answer("{}", "application/json")


@pytest.fixture(scope="module")
def bridge():
    """The server between pages and panels."""
    server = Bridge()
    yield server
    server.close()


@pytest.fixture
def page_with(browser, bridge):
    """Open a bare page with a panel: `page = page_with(panel, theme="dark")`; afterwards no error may have happened."""
    contexts, panels, faults = [], [], []

    def open_page(panel, theme="light", width=1100, height=800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme, **options)
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        contexts.append(context)
        panels.append(panel)
        page.goto(bridge.serve(panel) + f"?{theme}")
        page.wait_for_function("window.rendered")
        return page

    yield open_page
    for context in contexts:
        context.close()
    for panel in panels:
        error, panel.last_error = panel.last_error, None
        panel.close()
        if error is not None:
            raise error
    assert not faults, faults


AXE = Path(__file__).parents[2] / "js/node_modules/axe-core/axe.min.js"


def axe_faults(page, root=".art-host", impacts=("serious", "critical")) -> list[str]:
    """Faults of these impacts that axe-core finds below an element; skips where axe-core is not installed."""
    if not AXE.exists():
        if os.environ.get("ART_NB_BROWSER") == "required":
            pytest.fail("ART_NB_BROWSER=required, and axe-core is missing: cd js && npm ci")
        pytest.skip("axe-core is missing: cd js && npm ci")
    page.evaluate(AXE.read_text(encoding="utf-8") + "; null")
    found = page.evaluate("(root) => axe.run(root, {resultTypes: ['violations']})", root)
    faults = [fault for fault in found["violations"] if fault["impact"] in impacts]
    return [f"{fault['id']}: {node['target']} {node['failureSummary']}" for fault in faults for node in fault["nodes"]]


HOSTILE = [
    "<script>window.__pwned=1</script>",
    "<img src=x onerror='window.__pwned=1'>",
    "<svg onload='window.__pwned=1'></svg>",
    "[x](javascript:window.__pwned=1)",
    "</script><script>window.__pwned=1</script>",
    '<button data-commandlinker-command="notebook:run-all-cells" data-commandlinker-args="{}">click</button>',
    "<a id=MathJax name=MathJax>x</a>",
    "<form action='javascript:window.__pwned=1'><input autofocus onfocus='window.__pwned=1'></form>",
    "<style>@import 'data:text/css,*{display:none}'; * { display: none !important }</style>",
    "<details open ontoggle='window.__pwned=1'><summary>x</summary></details>",
    "\u202etxt.exe\u2066",
    "\x1b[31mred\x1b[0m",
    "[red]markup[/]",
    "line " * 1000,
    "a lone surrogate \ud800 here",
    "a NUL \x00 here",
    "zero\u200bwidth\ufeff",
    "{{7*7}} ${7*7}",
    '"><img src=x onerror=window.__pwned=1>',
    "'-window.__pwned=1-'",
    "\u2028window.__pwned=1\u2029",
]


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Lab:
    """A JupyterLab server with a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.token, self.port = folder, uuid.uuid4().hex, free_port()
        dirs = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "RUNTIME", "DATA")}
        self.kernel = warm_kernel()
        config = {"JUPYTER_CONFIG_PATH": str(Path(__file__).parents[2] / "tools/jupyter")}  # as in `make lab`
        self.env = os.environ | dirs | config | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PLATFORM_DIRS": "1"}
        self.process = None

    def settings(self, name: str, values: dict) -> None:
        """Write a setting of Lab's front end."""
        path = self.folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")

    def start(self) -> "Lab":
        """Start it; where somebody else has taken the port meanwhile, on another one."""
        for _ in range(3):
            if self._started():
                return self
            self.stop()
            self.port = free_port()
        raise RuntimeError("JupyterLab did not start:\n" + (self.folder / "lab.log").read_text()[-2000:])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _started(self) -> bool:
        (self.folder / "notebooks").mkdir(parents=True, exist_ok=True)
        self.settings("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False})
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--ip=127.0.0.1",
            f"--port={self.port}",
            "--allow-root",
            f"--IdentityProvider.token={self.token}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={self.folder / 'notebooks'}",
            "--LabApp.extension_manager=readonly",
            f"--LabApp.user_settings_dir={self.folder / 'settings'}",
            f"--LabApp.workspaces_dir={self.folder / 'spaces'}",
        ]
        log = open(self.folder / "lab.log", "wb")
        self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)
        log.close()
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=2).close()
                return True
            except OSError:
                time.sleep(0.2)
        return False

    def write(self, cells: list[str] | Path) -> str:
        """Write a notebook of code cells, or copy one, and give its name."""
        name = f"{uuid.uuid4().hex[:8]}.ipynb"
        if isinstance(cells, Path):
            shutil.copyfile(cells, self.folder / "notebooks" / name)
            return name
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.metadata["kernelspec"] = {"name": self.kernel, "display_name": "Python 3", "language": "python"}
        notebook.metadata["language_info"] = {"name": "python"}  # so that saving adds the kernel's metadata
        nbformat.write(notebook, self.folder / "notebooks" / name)
        return name

    def stop(self) -> None:
        """End the server and its kernels."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class LabPage:
    """A notebook open in JupyterLab."""

    def __init__(self, lab: Lab, page, name: str):
        self.lab, self.page, self.name = lab, page, name

    def open(self) -> "LabPage":
        space = uuid.uuid4().hex[:8]  # an old workspace would reopen its tabs
        self.page.goto(f"{self.lab.url}/lab/workspaces/{space}/tree/{self.name}?token={self.lab.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
        self.idle()
        return self

    def idle(self, timeout_s: float = 60) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.wait_for_selector("#jp-main-statusbar >> text=/\\| Idle/", timeout=timeout_s * 1000)

    def reload(self) -> None:
        """Load the page again, without the question whether to leave it."""
        self.page.once("dialog", lambda dialog: dialog.accept())
        self.page.reload()
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)

    def leave(self) -> None:
        """Close the notebook without saving it."""
        self.page.once("dialog", lambda dialog: dialog.accept())
        self.page.goto("about:blank")

    def end_kernel(self) -> None:
        """Shut the notebook's kernel down."""
        address = f"{self.lab.url}/api/sessions"
        with urllib.request.urlopen(f"{address}?token={self.lab.token}") as answer:
            mine = next(one["id"] for one in json.load(answer) if one["path"] == self.name)
        request = urllib.request.Request(f"{address}/{mine}?token={self.lab.token}", method="DELETE")
        urllib.request.urlopen(request).close()

    def restart_kernel(self) -> None:
        """Restart the notebook's kernel; the page stays open."""
        address = f"{self.lab.url}/api/sessions"
        with urllib.request.urlopen(f"{address}?token={self.lab.token}") as answer:
            mine = next(one["kernel"]["id"] for one in json.load(answer) if one["path"] == self.name)
        restart = f"{self.lab.url}/api/kernels/{mine}/restart?token={self.lab.token}"
        urllib.request.urlopen(urllib.request.Request(restart, method="POST")).close()
        self.idle()

    def cell(self, n: int):
        """The n-th cell."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(n)

    def output(self, n: int):
        """The output area of the n-th cell."""
        return self.cell(n).locator(".jp-OutputArea-output").first

    def start(self, n: int) -> None:
        """Run the n-th cell without waiting for it."""
        self.cell(n).locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Control+Enter")

    def run(self, n: int, timeout_s: float = 120) -> None:
        """Run the n-th cell and wait for its end."""
        self.start(n)
        prompt = self.cell(n).locator(".jp-InputPrompt")
        end = time.monotonic() + timeout_s
        while not any(char.isdigit() for char in prompt.inner_text()):
            assert time.monotonic() < end, f"cell {n} did not end: {prompt.inner_text()!r}"
            self.page.wait_for_timeout(50)

    def text(self, n: int) -> str:
        """The text that the n-th cell put out."""
        return self.cell(n).locator(".jp-OutputArea").inner_text()

    def save(self) -> dict:
        """Save the notebook and read it."""
        path = self.lab.folder / "notebooks" / self.name
        before = path.stat().st_mtime_ns
        self.page.locator(".jp-Notebook").first.click(position={"x": 2, "y": 2})
        self.page.keyboard.press("Control+s")
        end = time.monotonic() + 120
        while path.stat().st_mtime_ns == before:
            assert time.monotonic() < end, "the notebook was not saved"
            self.page.wait_for_timeout(100)
        self.page.wait_for_timeout(300)
        while True:
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError:  # the server writes in place and has not finished
                assert time.monotonic() < end, "the saved notebook is incomplete"
                self.page.wait_for_timeout(100)


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory):
    """One JupyterLab for the whole session."""
    chromium()
    server = Lab(tmp_path_factory.mktemp("lab")).start()
    yield server
    server.stop()


@pytest.fixture
def lab(browser, lab_server):
    """Open a notebook in JupyterLab: `nb = lab(["1 + 1"])`, then `nb.run(0)`, `nb.output(0)`, `nb.save()`, …"""
    contexts = []

    def open_lab(cells, theme="light", width=1300, height=900) -> LabPage:
        themes = {"light": "JupyterLab Light", "dark": "JupyterLab Dark", "contrast": "JupyterLab Dark High Contrast"}
        lab_server.settings("apputils-extension/themes", {"theme": themes[theme]})
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(120_000)
        contexts.append(context)
        return LabPage(lab_server, context.new_page(), lab_server.write(cells)).open()

    yield open_lab
    for context in contexts:
        context.close()


WORD = "w" * 3000
TEXTS = [
    *HOSTILE,
    "<img src='https://evil.example/x.png'>",
    "<style>@import url(https://evil.example/x.css)</style>",
    WORD,
]
