"""Entries that OpenPipe's client sends, and preferences in OpenAI's format: `python datasets_writer.py FOLDER`.

OpenAI's services read preferences and write none. `check_file` of the package `together` implements their
specification, and the script ends with an error if it rejects the file.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from openpipe.api_client.types.create_dataset_entries_request_entries_item import CreateDatasetEntriesRequestEntriesItem
from openpipe.client import OpenPipe
from together.utils.files import check_file

FOLDER, entries = Path(sys.argv[1]), []
SYSTEM, ASK = {"role": "system", "content": "You add."}, {"role": "user", "content": "2 + 2?"}
RIGHT, WRONG = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4"}


class Recorder(BaseHTTPRequestHandler):
    """A server that keeps the entries of a dataset."""

    def do_POST(self):
        """Keep the entries of a request."""
        entries.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["entries"])
        reply = {"object": "dataset.entries.creation", "entries_created": 2, "errors": {"object": "list", "data": []}}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Print nothing."""


def write(name, rows, checked=True):
    """Write a file, and check it."""
    path = FOLDER / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_file(path) if checked else {"is_check_passed": True}
    if not report["is_check_passed"]:
        raise SystemExit(f"{name}: {report['message']}")


server = HTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenPipe(api_key="tests", base_url=f"http://127.0.0.1:{server.server_address[1]}")
rows = [
    {"messages": [SYSTEM, ASK, RIGHT], "rejected_message": WRONG, "split": "TRAIN", "metadata": {"topic": "sums"}},
    {"messages": [ASK, CALLING, RESULT, RIGHT], "tools": [SCHEMA], "split": "TEST"},
]
client.create_dataset_entries("tests", entries=[CreateDatasetEntriesRequestEntriesItem.parse_obj(row) for row in rows])
server.shutdown()
write("openpipe.jsonl", entries, checked=False)
pair = {"preferred_output": [RIGHT], "non_preferred_output": [WRONG]}
write("openai_preferences.jsonl", [{"input": {"messages": [SYSTEM, ASK]}, **pair}])
