"""How much of a measurement runs: `make test` runs a selection, `make test-full` and `make audit` all of it."""

import os

FULL = os.environ.get("ART_NB_TESTS") == "full"


def count(full, selection):
    """Return how many cases to run: `full` with ART_NB_TESTS=full, otherwise `selection`."""
    return full if FULL else selection
