# Written by tools/stubs.py. Do not edit.
from .viewer import view as view
from .failures_panel import failures as failures
from .comparison_panel import compare as compare
from .judging_panel import judge as judge
from .playground import playground as playground
from .curation_panel import curate as curate
from .ipython import load_ipython_extension as load_ipython_extension
from .base import Panel as Panel
from .base import command as command
