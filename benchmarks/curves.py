"""Scaling curves of art_nb: seconds by size, the slope in log-log coordinates, and one figure of all curves."""

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from envs import CACHE
from measuring import Bench, rounded

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
COLORS = {"whole": "#1f4e79", "rollouts": "#c55a11", "training": "#548235"}


@dataclass
class Curve:
    """A measured quantity as a function of size."""

    name: str
    what: str  # the measured operation
    sizes: list[int]
    once: Callable[[int], dict[str, float]]  # size -> seconds of the whole and of its parts


class Parts:
    """The measured operations. Each call uses a new seed."""

    def __init__(self, bench: Bench):
        self.seeds = count(1_000_000, 1_000_000)
        self.loop = partial(bench.child, "ours/loop.py", model=bench.model)
        self.learner = partial(bench.child, "ours/learner.py", model=bench.model)
        self.sampler = partial(
            bench.child, "ours/sampler.py", model=bench.model, adapter_path=str(bench.folder / "adapter")
        )

    def step(self, **shape) -> dict[str, float]:
        request = {"groups": 1, "size": 8, "prompt": 67, "new": 16, "turns": 1, "gap": 40} | shape
        reply = self.loop().ask("step", seed=next(self.seeds), **request)
        return {"whole": reply["seconds"], "rollouts": reply["rollout_seconds"], "training": reply["train_seconds"]}

    def sample(self, n: int) -> dict[str, float]:
        return {"whole": self.sampler().ask("sample", n=n, prompt=100, new=32, seed=next(self.seeds))["seconds"]}

    def train(self, size: int) -> dict[str, float]:
        shape = {"groups": 4, "size": size, "prompt": 192, "new": 48}
        return {"whole": self.learner().ask("train", shape=shape)["seconds"]}

    def history(self, tokens: int) -> dict[str, float]:
        self.learner().ask("history", tokens=tokens)
        return {"whole": self.learner().ask("pack")["seconds"]}


def curves(bench: Bench) -> list[Curve]:
    """Return all curves."""
    parts, powers = Parts(bench), lambda low, n, by=2: [low * by**i for i in range(n)]
    return [
        Curve("groups of 8", "a whole step", powers(1, 7), lambda x: parts.step(groups=x)),
        Curve("turns of 8 rollouts", "a whole step", powers(1, 6), lambda x: parts.step(turns=x)),
        Curve("completion tokens of 8 rollouts", "a whole step", powers(16, 7), lambda x: parts.step(new=x)),
        Curve("requests at once, 100 tokens in, 32 out", "sampling", powers(1, 9), parts.sample),
        Curve("group size, 192 tokens common, 48 own", "training", powers(2, 5), parts.train),
        Curve("history in tokens", "packing", powers(1024, 6, 4), parts.history),
    ]


def slope(x: list[float], y: list[float]) -> float:
    """Return the least-squares slope in log-log coordinates; 1 is linear."""
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    return statistics.linear_regression(a, b).slope


def measured(bench: Bench, pattern: re.Pattern) -> Iterator[dict]:
    """Yield one line for each curve whose name matches. If all of them match, draw the figure."""
    lines, known = [], curves(bench)
    for curve in (curve for curve in known if pattern.search(curve.name)):
        sizes = curve.sizes[:2] if bench.quick else curve.sizes
        curve.once(sizes[0])
        turns = [[curve.once(size) for _ in range(min(bench.repeats, 3))] for size in sizes]
        parts = {
            part: [statistics.median(figures[part] for figures in samples) for samples in turns] for part in turns[0][0]
        }
        line = {
            "curve": curve.name,
            "x": sizes,
            "seconds": parts["whole"],
            "exponent": slope(sizes, parts["whole"]),
            "of": curve.what,
            "parts": {
                part: {"seconds": seconds, "exponent": slope(sizes, seconds)}
                for part, seconds in parts.items()
                if part != "whole"
            },
        }
        lines.append(rounded(line))
        yield lines[-1]
    bench.close()
    if len(lines) < len(known):
        return
    path = CACHE / "scaling-quick.png" if bench.quick else PICTURE
    draw(lines, path)
    yield {"picture": str(path), "bytes": path.stat().st_size}


def draw(lines: list[dict], path: Path) -> None:
    """Draw each curve in a panel of one figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained", facecolor="white")
    for ax, line in zip(axes.flat, lines):
        panel(ax, line)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("seconds")
    axes[0, 0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    with Image.open(path) as picture:  # a palette of 64 colors reduces the file to a third
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def panel(ax, line: dict) -> None:
    """Draw a curve with its parts, and a linear reference through its last point."""
    xs, end = line["x"], line["seconds"][-1]
    for name, part in {"whole": line, **line["parts"]}.items():
        ax.plot(xs, part["seconds"], marker="o", markersize=3.5, linewidth=1.6, color=COLORS[name], label=name)
    ax.plot(xs, [end * x / xs[-1] for x in xs], "--", color="#999999", linewidth=1, label="linear")
    ax.set(xscale="log", yscale="log", xlabel=line["curve"])
    ax.set_title(f"{line['of']}: exponent {line['exponent']:.2f}", fontsize=10, loc="left")
    ax.grid(True, color="#e5e5e5", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ticks = [xs[0], xs[len(xs) // 2], xs[-1]]
    ax.set_xticks(ticks, [short(x) for x in ticks])
    ax.minorticks_off()


def short(x: float) -> str:
    """Format a size: 1024 is 1k."""
    return f"{x / 2**20:.0f}M" if x >= 2**20 else f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}"
