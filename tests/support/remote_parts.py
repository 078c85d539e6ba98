"""A real server in a process of its own, for the tests that talk to one."""

import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from support.registered import ask, better_and_worse
from support.warm import warm_python

import art_nb as art

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from art_nb.cli.main import main; sys.exit(main())"
CALL = "0" * 32


def command(python=None):
    """`art-nb`, in a warm process unless another Python is given."""
    return [python or warm_python(), "-c", MAIN]


class Server:
    """`art-nb run` in a process of its own."""

    def __init__(self, folder, key=None, port=0, *options, max_files=None, warm=True):
        self.folder, self.said = folder, []
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"ART_NB_API_KEY": key} if key else {}
        line = [
            *command(None if warm and not max_files else sys.executable),
            "run",
            "--port",
            str(port),
            "--path",
            str(folder),
            *options,
        ]
        limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (max_files, max_files)) if max_files else None
        self.process = subprocess.Popen(
            line, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit
        )
        while not (found := re.search(r'base_url="(.*?:(\d+))[^"]*"(?:, api_key="(.*)")?', self._read())):
            pass
        self.url, self.port, self.key = found[1], int(found[2]), found[3] or key

    def _read(self):
        line = self.process.stdout.readline()
        assert line, "".join(self.said)
        self.said.append(line)
        return line

    def client(self, folder, **options):
        return art.Backend(**{"base_url": self.url, "api_key": self.key, "path": folder, "verbose": False} | options)

    def end(self, how=signal.SIGINT):
        """Its exit status, and all it ever printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=200)
        return self.process.returncode, "".join(self.said) + rest

    def post(self, body, key=None, number=CALL):
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        return httpx.post(f"{self.url}/calls/{number}", content=body, headers=headers, timeout=200)


LONG = {"learning_rate": 1e-2, "tokens_per_batch": 64}


async def a_long_group(model):
    """With the options LONG, some hundred micro-batches: replies that nobody gave, each another one."""
    choice, draw = await ask(model), np.random.default_rng(0)
    said = [
        choice.model_copy(update={"logprobs": None, "token_logprobs": None, "token_ids": ids.tolist()})
        for ids in draw.integers(3, 290, (400, 24))
    ]
    return better_and_worse(said)
