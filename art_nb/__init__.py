"The notebook workbench in which LLM agents are trained with reinforcement learning."
import os
import sys
from importlib import import_module
from importlib.metadata import version

from . import aliases

# How long OpenMP's threads spin before they sleep, unless the user has said so. The default is so long that small products
# take ten times the time on a busy machine, and so short, once two threads compute, that half of the second core is lost
# (docs/performance.md). It is read when torch is loaded, which is after this.
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
if not SPINNING.keys() & os.environ.keys():
    os.environ |= SPINNING if sys.platform == "linux" else {"OMP_WAIT_POLICY": "PASSIVE"}

__version__ = version("art_nb")
_HOMES = {
    "types": "ArtError BackendMissing JudgeError LocalServingUnavailableError LocalTrainResult Message Messages "
             "MessagesAndChoices RolloutError ServeError StoreError TokenError Tools TrainConfig TrainError TrainResult "
             "TrainSFTConfig",
    "dev": "LoRAConfig",
    "unavailable": "MegatronBackend MegatronRuntimeConfig MegatronTopologyConfig ServerlessBackend ServerlessTrainResult "
                   "get_megatron_runtime_config init_megatron_runtime_config",
    "trajectories": "History Trajectory TrajectoryGroup",
    "capture": "capture_yielded_trajectory current_trajectory trajectory trajectory_group yield_trajectory",
    "interceptors": "no_capture",
    "guided_completion": "",
    "gather": "gather_trajectories gather_trajectory_groups trajectory_group_batches",
    "tasks": "limit_concurrency retry",
    "store": "RunStore open_run",
    "boards": "register_board",
    "judges": "Person as_judge",
    "rewards": "ruler ruler_score_group score_group",
    "judgements": "Journal",
    "costs": "",
    "metrics": "",
    "models": "Model TrainableModel",
    "tokenized": "TokenFlag TokenizedHistory TokenizedMultiHistoryTrajectory TokenizedTrajectory "
                 "TokenizedTrajectoryGroup get_tokenizer tensorize tokenize",
    "backends": "LocalBackend backend",
    "remote": "Backend",
    "contract": "check_backend",
    "training": "Run train",
    "evaluation": "Evaluation evaluate evaluate_steps",
    "pipeline": "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS "
                "PIPELINE_RL_SCORE_METRICS PipelineAutotuneConfig PipelineRuntimeConfig",
    "pipeline_trainer": "",
    "checks": "doctor",
    "plots": "comparison_bars learning_curve reward_histogram token_heatmaps",
    "reports": "export report",
    "viewer": "view",
    "judging": "judge",
    "displays": "load_ipython_extension",
}
_ADDS_TO = {"training": ["reports"], "trajectories": ["tokenized"]}        # what gives a module's classes more methods
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*_HOME_OF, "dev"]


def __getattr__(name: str):
    "Load the module of a public name when the name is first asked for."
    if name in _HOME_OF:
        home = _HOME_OF[name]
        value = getattr(import_module(f"{__name__}.{home}"), name)
        for more in _ADDS_TO.get(home, ()):
            import_module(f"{__name__}.{more}")
    elif name in _HOMES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def _in_a_kernel() -> None:
    "In a notebook, objects show themselves and a run has its live cell; nothing of it is loaded before its first use."
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        import_module(f"{__name__}.displays").attach_displays(shell)
        _ADDS_TO["training"].append("live")


aliases.install(__name__)
_in_a_kernel()
