"The notebook workbench in which LLM agents are trained with reinforcement learning."
from importlib import import_module
from importlib.metadata import version

__version__ = version("art_nb")
_HOMES = {
    "types": "ArtError BackendMissing JudgeError LocalTrainResult Message Messages MessagesAndChoices RolloutError ServeError "
             "StoreError TokenError Tools TrainConfig TrainError TrainResult TrainSFTConfig",
    "trajectories": "History Trajectory TrajectoryGroup",
    "gather": "gather_trajectories gather_trajectory_groups limit_concurrency retry trajectory_group_batches",
    "store": "RunStore open_run",
    "models": "Model TrainableModel",
    "backends": "Backend LocalBackend backend check_backend",
    "training": "Run train",
    "evaluation": "Evaluation evaluate evaluate_steps",
    "checks": "doctor",
    "plots": "comparison_bars learning_curve reward_histogram",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*_HOME_OF]


def __getattr__(name: str):
    "Load the module of a public name when the name is first asked for."
    if name in _HOME_OF:
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    elif name in _HOMES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
