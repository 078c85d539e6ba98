"""The CPU path on Windows and macOS imports and calls nothing that these systems lack.

A process of its own pretends to be on the other system: the name of the platform is changed, and modules and functions
of `os` that do not exist there are removed. It imports every module of art_nb, then trains the tiny model for a step.
Libraries are imported before, because they decide by the real system which modules they import.
"""

import subprocess
import sys

import pytest

POSIX = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"]
GPU = ["triton", "vllm", "unsloth", "unsloth_zoo", "bitsandbytes", "xformers", "flash_attn"]
FUNCTIONS = ["sched_getaffinity", "sysconf", "getuid", "geteuid", "getloadavg", "killpg", "mkfifo", "uname", "fchmod"]
SYSTEMS = {"win32": ([*POSIX, *GPU], FUNCTIONS), "darwin": (GPU, ["sched_getaffinity"])}
PROGRAM = """
import asyncio, importlib, os, pkgutil, sys
sys.path[:0] = {path!r}
import httpx, numpy, openai, peft, pyarrow, starlette, torch, transformers, uvicorn  # decide by the real system
from support.gpu_parts import reply

MISSING, FUNCTIONS = {modules!r}, {functions!r}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {{name!r}} on this system", name=name)


for name in [name for name in sys.modules if name.partition(".")[0] in {{*MISSING, "art_nb"}}]:
    del sys.modules[name]
for name in FUNCTIONS:
    delattr(os, name)
sys.platform = {platform!r}
sys.meta_path.insert(0, Absent())
import art_nb as art

modules = [m.name for m in pkgutil.walk_packages(art.__path__, "art_nb.") if not m.name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)


async def step():
    backend = art.LocalBackend(path={runs!r}, device="cpu", dtype="float32", plan=True)
    model = art.TrainableModel(name="ttt", project="tests", base_model={weights!r})
    async with backend:
        await model.register(backend)
        choices = [await reply(model, seed) for seed in range(6)]
        groups = [art.TrajectoryGroup(
            art.Trajectory(messages_and_choices=[{{"role": "user", "content": "A1"}}, choice], reward=float(i))
            for i, choice in enumerate(choices)
        )]
        return (await backend.train(model, groups, learning_rate=1e-3)).step


print(len(modules), "modules, step", asyncio.run(step()), "in", torch.get_num_threads(), "threads")
"""


@pytest.mark.parametrize("platform", SYSTEMS)
def test_a_step_on_another_system(platform, tiny_model_dir, tmp_path, root):
    modules, functions = SYSTEMS[platform]
    places = {"path": [str(root), str(root / "tests")], "runs": str(tmp_path / "runs"), "weights": str(tiny_model_dir)}
    program = PROGRAM.format(modules=modules, functions=functions, platform=platform, **places)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "modules, step 1 in" in done.stdout
