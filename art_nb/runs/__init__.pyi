# Written by tools/stubs.py. Do not edit.
from .store import RunStore as RunStore
from .store import find_runs as find_runs
from .store import open_run as open_run
from .sessions import read_sessions as read_sessions
from .readers import read_conversations as read_conversations
from .readers import read_groups as read_groups
from .recordings import read_recordings as read_recordings
from .metrics import MetricsBuilder as MetricsBuilder
from .metrics import track_api_cost as track_api_cost
from .costs import ModelPricing as ModelPricing
from .reporters import Reporter as Reporter
from .run_reports import report_run as report_run
