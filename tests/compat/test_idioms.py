"""Scripts in the idioms of ART's two generations run here; only the import and the model's name are ours."""

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.warm import warm_python

IDIOMS = Path(__file__).parent / "idioms"


class Judge(BaseHTTPRequestHandler):
    "Somebody else's model: it scores as many trajectories as it is shown, the first highest."

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        shown = max(1, sum(f'<trajectory id=\\"{i}\\">' in asked for i in range(1, 20)))
        scores = [{"trajectory_id": str(i), "explanation": "shorter", "score": 1 / i} for i in range(1, shown + 1)]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": json.dumps({"scores": scores})},
        }
        body = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "judge",
                "choices": [choice],
                "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
            }
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("script", sorted(path.name for path in IDIOMS.glob("*.py")))
def test_it_runs_and_has_trained(script, tiny_model_dir, judge, tmp_path):
    env = os.environ | {"IDIOM_MODEL": str(tiny_model_dir), "IDIOM_JUDGE": judge, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [warm_python(), str(IDIOMS / script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("step 2"), done.stdout
    (run,) = tmp_path.glob(".art/*/models/*")
    rows = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if "train/reward" in row} >= {1, 2} or "sft" in script
    assert (run / "checkpoints" / "0002").is_dir() or "sft" in script
    assert list((run / "trajectories" / "train").glob("*.parquet"))
    assert any(row.get("data/step_num_gradient_steps") for row in rows), "no step had anything to learn from"
