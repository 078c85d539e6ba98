"""The results in docs/benchmarks.md, and the measured rows that are worse."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
LIMIT = 0.10  # a row that is worse by a larger share is named


def baseline_rows(page: str) -> dict[str, tuple[float | None, float | None]]:
    """Return our value and the ratio to the peer of each row. If several tables have a row, the first one counts."""
    rows = {}
    for rest in page.split("| row | ours | peer |")[1:]:
        for line in rest.partition("\n\n")[0].splitlines()[2:]:
            name, ours, _, ratio, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(name, (first_number(ours), first_number(ratio)))
    return rows


def first_number(text: str) -> float | None:
    """Return the first number of a text."""
    match = re.search(r"\d[\d,.]*", text)
    return float(match[0].replace(",", "")) if match else None


def regressions(lines: Iterable[dict], baseline: dict[str, tuple[float | None, float | None]]) -> list[str]:
    """Return a line for each measured row that is worse than documented or cannot be compared.

    Rows with a peer are compared by their ratio, which depends less on the machine than the value itself.
    """
    worse = []
    for line in lines:
        value, ratio = baseline.get(line["row"], (None, None))
        before, now, unit = value, line["ours"], line["unit"]
        if ratio and line["ratio"]:
            before, now, unit = ratio, line["ratio"], "ratio"
        if not before or not now:
            worse.append(f"{line['row']}: not compared, it {'failed' if before else 'is not in the table'}")
            continue
        loss = before / now - 1 if line["better"] == "more" else now / before - 1
        if loss > LIMIT:
            worse.append(f"{line['row']}: {now:g} instead of {before:g} ({unit}), {loss:.0%} worse")
    return worse
