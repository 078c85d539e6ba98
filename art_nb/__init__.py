"""A notebook workbench for training LLM agents with reinforcement learning."""
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .compat import import_paths

# How long OpenMP's threads spin before they sleep, unless the user has set it. With the default, small products take ten
# times as long on a busy machine, because threads spin too long. After two threads have computed, they spin too briefly,
# and half of the second core is lost (docs/performance.md). torch reads these variables when it is loaded, after this.
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
if not SPINNING.keys() & os.environ.keys():
    os.environ |= SPINNING if sys.platform == "linux" else {"OMP_WAIT_POLICY": "PASSIVE"}

__version__ = version("art_nb")
_MODULES = {
    "core.types": "ArtError BackendMissing JudgeError LocalServingUnavailableError LocalTrainResult Message Messages "
                  "MessagesAndChoices RolloutError ServeError StoreError TokenError Tools TrainConfig TrainError "
                  "TrainResult TrainSFTConfig",
    "compat.dev": "LoRAConfig",
    "compat.unavailable": "MegatronBackend MegatronRuntimeConfig MegatronTopologyConfig ServerlessBackend "
                          "ServerlessTrainResult get_megatron_runtime_config init_megatron_runtime_config",
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
    "tokens.tokenized": "TokenFlag TokenizedHistory TokenizedMultiHistoryTrajectory TokenizedTrajectory "
                        "TokenizedTrajectoryGroup get_tokenizer tensorize tokenize",
    "backends.local": "LocalBackend backend",
    "backends.remote_client": "Backend",
    "backends.contract": "check_backend",
    "training.run": "Run train",
    "training.evaluation": "Evaluation evaluate evaluate_steps",
    "pipeline.settings": "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS "
                         "PIPELINE_RL_SCORE_METRICS PipelineAutotuneConfig PipelineRuntimeConfig",
    "training.doctor": "doctor",
    "reports.plots": "comparison_bars learning_curve reward_histogram token_heatmaps",
    "reports.report": "export report",
    "panels.viewer": "view",
    "panels.judging_panel": "judge",
    "panels.ipython": "load_ipython_extension",
}
_PACKAGES = ("core rollouts runs models rewards tokens policy learners samplers serving backends training pipeline views "
             "reports panels compat cli").split()
_ADDS_TO = {"training.run": ["reports.report"], "rollouts.trajectories": ["tokens.tokenized"]}    # modules that add methods to classes
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_MODULE_OF, "dev"]


def __getattr__(name: str) -> Any:
    """Load the module of a public name at the first use of the name."""
    if name in _MODULE_OF:
        module = _MODULE_OF[name]
        value = getattr(import_module(f"{__name__}.{module}"), name)
        for more in _ADDS_TO.get(module, ()):
            import_module(f"{__name__}.{more}")
    elif name in _PACKAGES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def _in_a_kernel() -> None:
    """In a notebook, attach the displays of objects and the live cell of runs. They are loaded at their first use."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        import_module(f"{__name__}.panels.ipython").attach_displays(shell)
        _ADDS_TO["training.run"].append("panels.live_cell")


import_paths.install(__name__)
_in_a_kernel()
