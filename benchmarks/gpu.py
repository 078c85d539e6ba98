"""Measure this device (`make gpu`). The rows are described in docs/gpu.md.

Each row is printed as a line of JSON. A row that cannot be measured contains the reason as `empty` or `error`. The rows
are measured in four parts of at most ten minutes: `--part 2` runs one of them. Each measurement has a process of its
own, so that its memory is released and its errors do not end the others.

Without a GPU, all rows but `device` are empty. With `--small`, the same code runs on the CPU with small sizes."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu import loop, peers, samplers, trainer
from gpu.common import CUDA, Empty, device_name, engine_status, versions
from measuring import rounded

from art_nb.backends.engines import choose_sampler
from art_nb.learners.unsloth import unsloth_version
from art_nb.models.weights import fetch
from art_nb.samplers.vllm import vllm_version

PART_S = 580  # limit of a part


def device(model: Path) -> Iterator[dict]:
    """Yield whether the engines are available, and which one `LocalBackend()` chooses."""
    yield {
        "vllm": engine_status(vllm_version)[1],
        "unsloth": engine_status(unsloth_version)[1],
        "auto": choose_sampler("auto", "cuda" if CUDA else "cpu", lambda key, reason: None)[1],
    }


@dataclass(frozen=True)
class Check:
    """A measurement: its part, the names of its rows, and a function of the weights that yields their values."""

    part: int
    rows: tuple[str, ...]
    measure: Callable[[Path], Iterable[dict]]


CHECKS = (
    Check(1, ("device",), device),
    Check(1, ("parity", "rates", "sync"), samplers.each_sampler),
    Check(2, ("trainer",), trainer.small_shapes),
    Check(2, ("trainer-7b",), trainer.shape_7b),
    Check(2, ("trainer-14b",), trainer.shape_14b),
    Check(3, ("rollouts", "idle", "drift", "memory"), loop.loop),
    Check(3, ("learning",), loop.learning),
    Check(4, ("shared",), samplers.shared),
    Check(4, ("own-copy",), samplers.own_copy),
    Check(4, ("unsloth",), trainer.unsloth),
    Check(4, ("vllm-unsloth",), loop.vllm_unsloth),
    Check(4, ("two-devices",), loop.two_devices),
    Check(4, ("trl",), peers.trl),
    Check(4, ("prime-rl",), peers.prime_rl),
)
PARTS = sorted({check.part for check in CHECKS})
ROWS = [row for check in CHECKS for row in check.rows]


def print_row(check: Check, row: str, values: dict, start: float) -> None:
    """Print a row as a line of JSON."""
    sizes = {} if CUDA or {"empty", "error"} & values.keys() else {"sizes": "small"}
    head = {"row": row, "part": check.part, "device": device_name(), **sizes, "seconds": round(time.time() - start, 1)}
    print(json.dumps(rounded({**head, **values, "versions": versions()})), flush=True)


def reason(error: BaseException) -> dict:
    """Return why a row has no values."""
    return {"empty": str(error)} if isinstance(error, Empty) else {"error": f"{type(error).__name__}: {error}"}


def run_here(check: Check, model: Path) -> None:
    """Measure and print the rows of a check. Rows after an error contain the error."""
    rows, start = list(check.rows), time.time()
    try:
        for values in check.measure(model):
            print_row(check, rows.pop(0), values, start)
            start = time.time()
    except Exception as error:
        for row in rows:
            print_row(check, row, reason(error), start)


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_in_process(check: Check, model: Path, limit_s: float) -> None:
    """Run a check in a new process and print its rows. Print the reason for rows that the process does not print."""
    start, rows, late = time.time(), list(check.rows), threading.Event()
    if limit_s <= 0:
        return [print_row(check, row, {"error": f"the {PART_S} s of the part are over"}, start) for row in rows]
    command = [sys.executable, __file__, "--model", str(model), "--check", check.rows[0]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = threading.Timer(limit_s, lambda: (late.set(), kill_group(process)))
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith('{"row": '):  # libraries print other lines
                rows.remove(json.loads(line)["row"])
                print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        kill_group(process)
    why = f"stopped after {limit_s:.0f} s" if late.is_set() else f"the process ended with exit code {code}"
    for row in rows:
        print_row(check, row, {"error": why}, start)


def options() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, help="run one part; the default is all of them in order")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="measure these rows only")
    parser.add_argument("--model", type=Path, help="directory of weights; the default is SmolLM2-135M")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each speed after its warm-up")
    parser.add_argument("--small", action="store_true", help="without a GPU, run with small sizes on the CPU")
    parser.add_argument("--check", choices=ROWS, help=argparse.SUPPRESS)  # measure in this process
    return parser.parse_args()


def main() -> None:
    """Run the checks of the parts one after the other."""
    arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the process of a check ends, too
    os.environ["GPU_REPEATS"] = str(arguments.repeats)  # of the process of each check
    model = arguments.model or fetch("smollm2-135m")
    if arguments.check:
        return run_here(next(check for check in CHECKS if arguments.check in check.rows), model)
    for part in [arguments.part] if arguments.part else PARTS:
        end = time.time() + PART_S
        for check in CHECKS:
            if check.part != part or not set(check.rows) & set(arguments.rows):
                continue
            if CUDA or arguments.small or check.measure is device:
                run_in_process(check, model, end - time.time())
            else:
                for row in check.rows:
                    print_row(check, row, {"empty": "no GPU"}, time.time())


if __name__ == "__main__":
    main()
