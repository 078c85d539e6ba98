"Rows, the processes that are compared, and the turns they take."

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
    "What is compared, and what it should come to."

    name: str
    needed: float | None
    aim: float | None
    unit: str
    kind: str = "speed"  # one of KINDS
    note: str = ""


KINDS = {  # what is held against `needed`, and whether more of it is better
    "speed": (lambda ours, peer: ours / peer, True),
    "time": (lambda ours, peer: peer / ours, True),
    "size": (lambda ours, peer: ours / peer, False),
    "alone": (lambda ours, peer: None, False),
}


@dataclass
class Bench:
    "The processes of a run, and the turns they take."

    model: str
    folder: Path  # for what the processes write
    repeats: int = 5
    quick: bool = False
    children: dict[tuple, Child | Failed] = field(default_factory=dict)

    def child(self, script: str, *name: str, peer: str | None = None, environ: dict | None = None, **setup) -> Child:
        "The process of a script, begun on first use; `name` tells several of one script apart."
        key = script, *name
        if isinstance(old := self.children.get(key), Child) and old.process.poll() is not None:
            self.close(*key)
        if key not in self.children:
            try:
                log = CACHE / "logs" / f"{'-'.join(key).replace('/', '-')}.log"
                unset = dict.fromkeys(SPINNING) if peer else {}  # a peer runs as it comes
                self.children[key] = child = Child(
                    python_of(peer) if peer else sys.executable,
                    script,
                    log,
                    TMPDIR=str(self.folder),
                    **unset,
                    **environ or {},
                )
                said = child.ask("setup", **setup) if setup else {}
                if str(said.get("threads", os.environ["OMP_NUM_THREADS"])) != os.environ["OMP_NUM_THREADS"]:
                    print(f"{key} computes with {said['threads']} threads", file=sys.stderr)
            except Failed as error:
                self.children[key] = error
        if isinstance(self.children[key], Failed):
            raise self.children[key]
        return self.children[key]

    def close(self, *key: str) -> None:
        "End the process of a script and name, or all."
        for known in [key] if key else list(self.children):
            child = self.children.pop(known, None)
            if isinstance(child, Child):
                child.close()

    def own_s(self) -> float:
        "CPU that this bench has used, children that have ended included."
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
        "One line: the sides warm up, then take turns. A side that fails is left out, and why is said."
        sides = {"ours": ours} | ({"peer": peer} if peer else {}) | also
        why = {}
        raw = {name: [] for name in sides}

        def turn(name: str) -> dict | None:
            try:
                return None if name in why else sides[name]()
            except Exception as error:  # whatever it is, the other rows are still wanted
                why[name] = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"

        for name in sides if warm_up else ():
            turn(name)
        watch = Watch(self.own_s)
        for _ in range(repeats or self.repeats):
            for name in sides:
                if (found := turn(name)) is not None:
                    raw[name].append(found)
        medians = {name: middle(found) for name, found in raw.items() if found and name not in why}
        return told(row, medians, raw, why) | {"others": watch.others()}


def middle(found: list[dict]) -> dict[str, float]:
    "Medians of the figures of a side's turns."
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def told(row: Row, medians: dict, raw: dict, why: dict) -> dict:
    "A row as it is printed."
    compare, more_is_better = KINDS[row.kind]
    ours, peer = (medians.get(side, {}).get("value") for side in ("ours", "peer"))
    ratio = compare(ours, peer) if ours and peer else None
    held = ours if row.kind == "alone" else ratio
    ok = None if held is None or row.needed is None else held >= row.needed if more_is_better else held <= row.needed
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
    if why:
        line["why"] = why
    rest = {
        side: {k: v for k, v in figures.items() if k != "value" or side not in ("ours", "peer")}
        for side, figures in medians.items()
    }
    line["more"] = {side: figures for side, figures in rest.items() if figures}
    line["raw"] = {side: [one["value"] for one in found] for side, found in raw.items()}
    return rounded(line)


def rounded(said):
    "Four digits are enough."
    if isinstance(said, dict):
        return {name: rounded(value) for name, value in said.items()}
    if isinstance(said, list):
        return [rounded(value) for value in said]
    return float(f"{said:.4g}") if isinstance(said, float) else said
