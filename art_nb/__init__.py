"""A notebook workbench for training LLM agents with reinforcement learning.

Modules:

- `art_nb.training.diagnostics`: Warnings about a run, derived from its metrics, with advice
- `art_nb.training.evaluation`: The mean of a metric on fixed scenarios, at any step, with a confidence interval
- `art_nb.training.heartbeat`: The status of a run in `run.json`, updated at regular intervals
- `art_nb.training.progress`: The state of a run, derived from its events
- `art_nb.training.run`: `art.train` and its runs: training in the background that you can watch, pause, resume and stop
- `art_nb.training.run_view`: What displays and reports read of a run, whether it trains in this kernel or is read from its directory
- `art_nb.training.sft`: Supervised training from lists and files: learning rates per batch, chunks of a list, files that are read line by line
- `art_nb.training.steps`: The options of a run, its rollouts step by step, and metrics of their trajectories"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from importlib.metadata import version as _version

import lazy_loader as _lazy_loader

from .compat import import_paths as _import_paths

# How long OpenMP's threads spin before they sleep, unless the user has set it. With the default, small products take ten
# times as long on a busy machine, because threads spin too long. After two threads have computed, they spin too briefly,
# and half of the second core is lost (docs/performance.md). torch reads these variables when it is loaded, after this.
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
if not SPINNING.keys() & _os.environ.keys():
    _os.environ |= SPINNING if _sys.platform == "linux" else {"OMP_WAIT_POLICY": "PASSIVE"}

__version__ = _version("art_nb")

# Every name of `art`, by the module that is loaded at its first use. `tools/stubs.py` writes `__init__.pyi` from this.
_NAMES = {
    "core.types": (
        "ArtError BackendMissing JudgeError LocalServingUnavailableError LocalTrainResult Message Messages "
        "MessagesAndChoices RolloutError ServeError StoreError TokenError Tools TrainConfig TrainError TrainResult "
        "TrainSFTConfig"
    ),
    "compat.dev": "LoRAConfig",
    "compat.unavailable": (
        "MegatronBackend MegatronRuntimeConfig MegatronTopologyConfig ServerlessBackend ServerlessTrainResult "
        "get_megatron_runtime_config init_megatron_runtime_config"
    ),
    "rollouts.trajectories": "History Trajectory TrajectoryGroup",
    "rollouts.capture": "capture_yielded_trajectory current_trajectory trajectory trajectory_group yield_trajectory",
    "rollouts.http_capture": "no_capture",
    "rollouts.gather": "gather_trajectories gather_trajectory_groups trajectory_group_batches",
    "core.aio": "limit_concurrency retry",
    "runs.store": "RunStore open_run",
    "views.boards": "register_board",
    "rewards.judges": "Person as_judge",
    "rewards.ruler": "ruler ruler_score_group score_group",
    "rewards.journal": "Journal",
    "models.model": "Model TrainableModel",
    "tokens.tokenized": (
        "TokenFlag TokenizedHistory TokenizedMultiHistoryTrajectory TokenizedTrajectory TokenizedTrajectoryGroup "
        "get_tokenizer tensorize tokenize"
    ),
    "backends.local": "LocalBackend backend",
    "backends.remote_client": "Backend",
    "backends.contract": "check_backend",
    "training.run": "Run train",
    "training.evaluation": "Evaluation evaluate evaluate_steps",
    "pipeline.settings": (
        "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS "
        "PIPELINE_RL_SCORE_METRICS PipelineAutotuneConfig PipelineRuntimeConfig"
    ),
    "training.doctor": "doctor",
    "reports.plots": "comparison_bars learning_curve reward_histogram token_heatmaps",
    "reports.report": "export report",
    "panels.viewer": "view",
    "panels.judging_panel": "judge",
    "panels.ipython": "load_ipython_extension",
}
_PACKAGES = (
    "core rollouts runs models rewards tokens policy learners samplers serving backends training pipeline views reports "
    "panels compat cli"
).split()
# What `art.<TAB>` lists. The other names are ART's, or for programs, and work like these.
_COMPLETIONS = (
    "Model TrainableModel LocalBackend train Run TrainConfig TrainSFTConfig Trajectory TrajectoryGroup "
    "gather_trajectories gather_trajectory_groups trajectory_group_batches ruler ruler_score_group Person Journal judge "
    "view report export open_run evaluate doctor learning_curve comparison_bars reward_histogram token_heatmaps "
    "register_board retry limit_concurrency"
).split()
# Modules that add methods to the classes of another module.
_EXTENSIONS = {"training.run": ["reports.report"], "rollouts.trajectories": ["tokens.tokenized"]}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

_attached, _, __all__ = _lazy_loader.attach(__name__, _PACKAGES, {m: names.split() for m, names in _NAMES.items()})
__all__ = [*(name for name in __all__ if name not in _PACKAGES), "dev"]


def __getattr__(name: str):
    """Load the module of a public name at the first use of the name."""
    value = _attached(name)
    for module in _EXTENSIONS.get(_MODULE_OF.get(name, ""), ()):
        _import_module(f"{__name__}.{module}")
    return value


def __dir__() -> list[str]:
    return sorted([*_COMPLETIONS, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])


def _attach_to_kernel() -> None:
    """In a notebook, attach the displays of objects and the live cell of runs. They are loaded at their first use."""
    shell = _sys.modules["IPython"].get_ipython() if "IPython" in _sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        _import_module(f"{__name__}.panels.ipython").attach_displays(shell)
        _EXTENSIONS["training.run"].append("panels.live_cell")


_import_paths.install(__name__)
_attach_to_kernel()
