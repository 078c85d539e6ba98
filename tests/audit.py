"""The audit's measurements: `make test` runs a selection, `make audit` all of them (docs/audit-2026-11.md)."""
import os

FULL = os.environ.get("ART_NB_AUDIT") == "full"


def count(full, selection):
    """Return how many cases to run: `full` under `make audit`, otherwise `selection`."""
    return full if FULL else selection
