"""Rows of the result, the compared processes, and the alternating measurements."""

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from envs import CACHE, python_of
from machine import Watch
from talk import Child, Failed

from art_nb import SPINNING

Side = Callable[[], dict[str, float]]


@dataclass
class Row:
    """A comparison and its targets."""

    name: str
    needed: float | None
    aim: float | None
    unit: str
    kind: str = "speed"  # one of KINDS
    note: str = ""


KINDS = {  # the value that is compared with `needed`, and whether more is better
    "speed": (lambda ours, peer: ours / peer, True),
    "time": (lambda ours, peer: peer / ours, True),
    "size": (lambda ours, peer: ours / peer, False),
    "alone": (lambda ours, peer: None, False),
}


@dataclass
class Bench:
    """The processes of a run. They are measured in turns."""

    model: str
    folder: Path  # for files of the processes
    repeats: int = 5
    quick: bool = False
    children: dict[tuple, Child | Failed] = field(default_factory=dict)

    def child(self, script: str, *name: str, peer: str | None = None, environ: dict | None = None, **setup) -> Child:
        """Return the process of a script, which is started on first use.

        `name` distinguishes processes of the same script.
        """
        key = script, *name
        if isinstance(known := self.children.get(key), Child) and known.process.poll() is not None:
            self.close(*key)
        if key not in self.children:
            try:
                log = CACHE / "logs" / f"{'-'.join(key).replace('/', '-')}.log"
                unset = dict.fromkeys(SPINNING) if peer else {}  # a peer runs with its own defaults
                self.children[key] = child = Child(
                    python_of(peer) if peer else sys.executable,
                    script,
                    log,
                    TMPDIR=str(self.folder),
                    **unset,
                    **environ or {},
                )
                reply = child.ask("setup", **setup) if setup else {}
                if str(reply.get("threads", os.environ["OMP_NUM_THREADS"])) != os.environ["OMP_NUM_THREADS"]:
                    print(f"{key} computes with {reply['threads']} threads", file=sys.stderr)
            except Failed as error:
                self.children[key] = error
        if isinstance(self.children[key], Failed):
            raise self.children[key]
        return self.children[key]

    def close(self, *key: str) -> None:
        """End the process with this script and name, or all processes."""
        for known in [key] if key else list(self.children):
            child = self.children.pop(known, None)
            if isinstance(child, Child):
                child.close()

    def own_s(self) -> float:
        """Return the CPU seconds that this benchmark has used, including children that have ended."""
        return sum(os.times()[:4]) + sum(c.cpu_s() for c in self.children.values() if isinstance(c, Child))

    def measure(
        self,
        row: Row,
        ours: Side,
        peer: Side | None = None,
        repeats: int | None = None,
        warm_up: bool = True,
        **also: Side,
    ) -> dict:
        """Measure a row.

        All sides warm up, then take turns. A side that fails is left out, and the row contains the error.
        """
        sides = {"ours": ours} | ({"peer": peer} if peer else {}) | also
        errors = {}
        raw = {name: [] for name in sides}

        def turn(name: str) -> dict | None:
            try:
                return None if name in errors else sides[name]()
            except Exception as error:  # any error: the other rows must still be measured
                errors[name] = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"

        for name in sides if warm_up else ():
            turn(name)
        watch = Watch(self.own_s)
        for _ in range(repeats or self.repeats):
            for name in sides:
                if (figures := turn(name)) is not None:
                    raw[name].append(figures)
        medians = {name: medians_of(figures) for name, figures in raw.items() if figures and name not in errors}
        return result_line(row, medians, raw, errors) | {"others": watch.others()}


def medians_of(samples: list[dict]) -> dict[str, float]:
    """Return the median of each figure over the turns of a side."""
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def result_line(row: Row, medians: dict, raw: dict, errors: dict) -> dict:
    """Return a row in its printed form."""
    compare, more_is_better = KINDS[row.kind]
    ours, peer = (medians.get(side, {}).get("value") for side in ("ours", "peer"))
    ratio = compare(ours, peer) if ours and peer else None
    compared = ours if row.kind == "alone" else ratio
    ok = (
        None
        if compared is None or row.needed is None
        else compared >= row.needed
        if more_is_better
        else compared <= row.needed
    )
    line = {
        "row": row.name,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "needed": row.needed,
        "aim": row.aim,
        "ok": ok,
        "unit": row.unit,
        "better": "more" if more_is_better else "less",
    }
    if row.note:
        line["note"] = row.note
    if errors:
        line["why"] = errors
    rest = {
        side: {k: v for k, v in figures.items() if k != "value" or side not in ("ours", "peer")}
        for side, figures in medians.items()
    }
    line["more"] = {side: figures for side, figures in rest.items() if figures}
    line["raw"] = {side: [sample["value"] for sample in samples] for side, samples in raw.items()}
    return rounded(line)


def rounded(value):
    """Round all floats to four significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
