"""`import art_nb` is light, and every public name is there."""

import json
import subprocess
import sys
from functools import cache

LIGHT = """
import json, sys
before = set(sys.modules)
import art_nb
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded - sys.stdlib_module_names)))
"""
NAMES = """
import importlib, json, pkgutil
import art_nb
missing = [name for name in [*art_nb.__all__, *dir(art_nb)] if not hasattr(art_nb, name)]
listed = [name for name in dir(art_nb) if not name.startswith("_")]
print(json.dumps([len(art_nb.__all__), missing, listed, sorted({*listed} - {*art_nb.__all__})]))
"""
LOW = """
import importlib, json, sys
for name in {names}: importlib.import_module("art_nb." + name)
print(json.dumps(sorted(set(sys.modules) & set(sys.argv[1:]))))
"""


COMPLETIONS = """
import json, sys
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import art_nb as art")
with provisionalcompleter():
    names = [completion.text.lstrip(".") for completion in shell.Completer.completions("art.", 4)]
print(json.dumps([sorted(names), "torch" in sys.modules]))
"""


@cache
def fresh(source, *arguments):
    """What a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BUILT_IN = """
import json
from art_nb.rollouts.tracers import BUILT_IN_TRACERS, known_tracers
from art_nb.runs.reporters import BUILT_IN, TRACES, known_reporters
points = [known_tracers()[name] for name in BUILT_IN_TRACERS] + [known_reporters()[name] for name in BUILT_IN]
print(json.dumps([point.load().__name__ for point in [*points, TRACES]]))
"""


def test_every_built_in_reporter_and_tracer_can_be_imported_without_its_package():
    names = fresh(BUILT_IN)
    assert {"WeaveTracer", "WeaveReporter", "TraceReporter"} < {*names} and len(names) >= 7


def test_the_import_loads_no_other_package():
    assert fresh(LIGHT) == ["art_nb", "lazy_loader"]


def test_packages_without_torch():
    """Only the packages that compute with a model load torch or transformers, and two modules loaded on demand."""
    from test_layers import NUMBERS

    with_torch = {"policy", "learners", "samplers", "serving", "backends", "distributed", "servers"}
    on_demand = {"views.token_objective", "integrations.gateway"}
    modules = [name for name in NUMBERS if name.partition(".")[0] not in with_torch and name not in on_demand]
    assert fresh(LOW.format(names=modules), "torch", "transformers") == []


def test_every_public_name_is_there():
    count, missing, listed, unknown = fresh(NAMES)
    assert count > 0
    assert not missing
    assert not unknown
    assert 25 <= len(listed) <= 40


def test_completion_lists_the_same_names_and_loads_no_torch():
    names, torch = fresh(COMPLETIONS)
    assert names == fresh(NAMES)[2]
    assert not torch
