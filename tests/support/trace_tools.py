"""Real servers of observability tools that can be killed and restarted, and a proxy that is slow or fails."""

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from support.observed_run import ROOT, wait_until
from support.ui import free_port

MLFLOW = ["mlflow", "server", "--backend-store-uri", "sqlite:///FOLDER/mlflow.db", "--host", "127.0.0.1"]
MLFLOW += ["--default-artifact-root", "FOLDER/artifacts", "--port", "PORT", "--workers", "1"]
PHOENIX = {"PHOENIX_WORKING_DIR": "FOLDER", "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "PORT"}
PHOENIX |= {"PHOENIX_GRPC_PORT": "GRPC", "PHOENIX_TELEMETRY_ENABLED": "false"}
WEAVE = ["python", str(ROOT / "tests" / "support" / "weave_server.py"), "FOLDER/weave.db", "PORT"]
COMMANDS = {  # environment, command, variables, address that answers when the server is ready
    "phoenix": ("phoenix", ["phoenix", "serve"], PHOENIX, "/healthz"),
    "mlflow": ("mlflow", MLFLOW, {"MLFLOW_DISABLE_TELEMETRY": "true"}, "/health"),
    "weave": ("weave-server", WEAVE, {}, "/server_info"),
}


class ToolServer:
    """A server whose data are in a directory, so that it has them again after a restart."""

    def __init__(self, tool, folder):
        self.tool, self.port, self.process = tool, free_port(), None
        self.environment, command, variables, self.health = COMMANDS[tool]
        self.values = {"FOLDER": str(folder), "PORT": str(self.port), "GRPC": str(free_port())}
        self.command, self.variables = [*map(self._filled, command)], {k: self._filled(v) for k, v in variables.items()}
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}"

    def _filled(self, text):
        for name, value in self.values.items():
            text = text.replace(name, value)
        return text

    def start(self, wait_s=240):
        bin_path = ROOT / f".venv-observer-{self.environment}" / "bin"
        if not (bin_path / "python").exists():
            pytest.skip(f"make test-observers-full installs .venv-observer-{self.environment}")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OTEL_"))}
        self.process = subprocess.Popen(
            [str(bin_path / self.command[0]), *self.command[1:]],
            env={**kept, "DO_NOT_TRACK": "true", **self.variables},
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(
            lambda: self.process.poll() is None and httpx.get(self.url + self.health, timeout=5).status_code < 500,
            wait_s,
        )

    def kill(self):
        """End all its processes at once, as a crash does."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def tool_server(tool, folder):
    """Run the server of a tool."""
    running = ToolServer(tool, Path(folder))
    try:
        running.start()
        yield running
    finally:
        running.kill()


class Proxy:
    """An HTTP proxy in front of a server. `delay_s` delays each answer, and `status` answers without the server."""

    def __init__(self, upstream):
        self.delay_s, self.status, self.requests = 0.0, None, 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy.requests += 1
                time.sleep(proxy.delay_s)
                if proxy.status is not None:
                    return self.reply(proxy.status, {}, b"the server failed")
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                url = upstream + self.path
                response = httpx.request(self.command, url, content=body, headers=kept, timeout=60)
                kept = {k: v for k, v in response.headers.items() if k.lower() == "content-type"}
                return self.reply(response.status_code, kept, response.content)

            def reply(self, status, headers, content):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
