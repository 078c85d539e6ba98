"""The share of a training run's CPU time that `report_traces` takes: `trace_share.py TASK [STEPS [GROUPS [ROLLOUTS]]]`.

TASK is yes_no_maybe (one turn) or tic_tac_toe (several turns, after imitation of 64 games). It runs with the embedded
model, without and with traces. The endpoint is a process of its own.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import art_nb as art

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "yes_no_maybe"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tic_tac_toe"))
import tic_tac_toe
import yes_no_maybe

TASKS = {
    "yes_no_maybe": (yes_no_maybe.rollout, yes_no_maybe.prompts),
    "tic_tac_toe": (tic_tac_toe.rollout, range(1000)),
}
ENDPOINT = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as by all targets

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def thread_cpu_s(name: str) -> float:
    """Return the CPU time of the threads of this process whose names start with a text."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


async def measure(task: str, name: str, sizes: list[int], folder: str, traces: list[str]) -> dict[str, float]:
    """Train a model, and return its CPU times and the median time of a step."""
    rollout, scenarios = TASKS[task]
    steps, groups, rollouts = sizes
    options = {"groups_per_step": groups, "rollouts_per_group": rollouts, "learning_rate": 1e-4}
    model = art.TrainableModel(
        name=name, project="share", base_model="smollm2-135m", report_to="none", report_traces=traces
    )
    async with art.LocalBackend(path=folder, verbose=False) as backend:
        await model.register(backend)
        if task == "tic_tac_toe":  # the untrained model ends most games with an illegal move
            await model.train_sft(tic_tac_toe.won_games(64), art.TrainSFTConfig(learning_rate=1e-3, batch_size=16))
        first = await model.get_step()
        start_s = time.process_time()
        run = await art.train(model, rollout, scenarios, steps=first + steps, show=False, **options)
        queues = model._reports.queues
        done = all(queue.drain(60) and queue.reporter.live.drain(60) for queue in queues)
        cpu_s, export_s = time.process_time() - start_s, thread_cpu_s("art-nb-traces") + thread_cpu_s("art-nb-report")
        n_spans = sum(queue.reporter.live.report.spans for queue in queues)
        await model.end_reports()
    assert done and run.step == first + steps
    return {
        "cpu_s": cpu_s,
        "export_s": export_s,
        "spans": n_spans,
        "step_s": statistics.median(r["time/step_wall_s"] for r in run.history),
    }


async def main() -> None:
    """Print the figures."""
    task, given = sys.argv[1], [*map(int, sys.argv[2:])]
    sizes = [*given, *[3, 6, 8][len(given) :]]
    endpoint = subprocess.Popen([sys.executable, "-c", ENDPOINT], stdout=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{int(endpoint.stdout.readline())}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, traces in (("without", []), ("with", [url]), ("without-2", []), ("with-2", [url])):
                figures = await measure(task, name, sizes, folder, traces)
                share = figures["export_s"] / figures["cpu_s"]
                print(name, *(f"{key}={value:.2f}" for key, value in figures.items()), f"share={share:.2%}", flush=True)
    finally:
        endpoint.kill()
        endpoint.wait()


if __name__ == "__main__":
    asyncio.run(main())
