"""A notebook workbench for training LLM agents with reinforcement learning.

Modules:

- `art_nb.backends.local`: `LocalBackend`: sampling and training in this process, on one device or two
- `art_nb.backends.options`: Options of a model and of a training step, with the names of ART and of art_nb
- `art_nb.backends.recovery`: Repair of a run directory after a crash: damaged checkpoints, missing history rows and undone steps
- `art_nb.backends.remote_calls`: The calls of a remote training server: validation, execution and stored results
- `art_nb.backends.remote_client`: The client for models that are sampled and trained on another machine
- `art_nb.backends.steps`: One training step: optimizer steps, publishing the adapter and saving its checkpoint
- `art_nb.cli.live_page`: A read-only web page of a run that updates itself, for `art-nb view --live`
- `art_nb.compat.import_paths`: The import paths of ART and of art_nb 0.1, and the modules that define their names
- `art_nb.core.aio`: Running many awaitables: cancellation, timeouts, retries and concurrency limits
- `art_nb.core.events`: Event records, and the bus that delivers them to subscribers
- `art_nb.core.files`: Reading of files that may be damaged, and atomic writing
- `art_nb.core.jsonable`: Conversion of values to JSON, and a compact form that stores repeated texts once
- `art_nb.core.redaction`: Removal of secrets from files, messages and pages
- `art_nb.core.seeds`: Seeds for the requests of a training step, so that a run can be repeated
- `art_nb.distributed.ray_backend`: `RayBackend`: sampling and training on a Ray cluster, controlled from the notebook
- `art_nb.integrations.auto_rl`: A model trained from a one-sentence task, in stages that can be inspected and changed (AutoRL)
- `art_nb.integrations.live_traces`: Export of the traces of a run while the model is trained, with `report_traces`
- `art_nb.integrations.replay`: Rollouts that repeat a recorded conversation with its user messages and tool results
- `art_nb.integrations.traces`: Export of runs as OpenTelemetry traces with `art.export_traces`
- `art_nb.integrations.weave_calls`: Rollouts as calls of Weave: one tree of calls for each rollout, with its conversations and token counts, without token IDs
- `art_nb.learners.checkpoints`: Atomic checkpoints of a learner
- `art_nb.learners.losses`: Policy-gradient losses over the trained tokens of a micro-batch
- `art_nb.learners.settings`: The options of a training step and their validation
- `art_nb.learners.sft_rows`: Training rows from written conversations
- `art_nb.models.provenance`: What is stored about a training session: options, program, base weights and engine
- `art_nb.panels.base`: The base class of all panels: messages between the browser and Python, live updates, errors and the static form
- `art_nb.panels.judging_session`: A judging session: the ranking of a group, a person's drafts and their effect on the advantages
- `art_nb.panels.playground`: Chat with any checkpoint, or with two of them next to each other, and continue a rollout from any turn by hand
- `art_nb.pipeline.freshness`: The age of a group in steps, and whether the group is still used for training
- `art_nb.pipeline.retention`: Deletion of old checkpoints by a strategy
- `art_nb.policy.device`: The device's memory and the thread that owns the device
- `art_nb.policy.isolation`: Engines like vLLM and Unsloth inside the kernel's process
- `art_nb.policy.packing`: Micro-batches of rows that share prefixes
- `art_nb.reports.html`: HTML elements, tables and collapsible sections with escaped text and a size limit
- `art_nb.reports.profile`: Where the seconds of a training step go, by phase and core
- `art_nb.reports.report`: One self-contained HTML file of a run or of selected rollouts
- `art_nb.reports.reproduce`: A notebook that trains a run again and compares the rewards
- `art_nb.reports.run_summary`: The text sections of a report: summary, results with intervals, setup, findings and warnings
- `art_nb.reports.static_html`: Rollouts, groups and runs as static HTML for saved notebooks, without a kernel or scripts
- `art_nb.rewards.journal`: An append-only journal of judgments, with human overrides, agreement statistics and preference pairs
- `art_nb.rewards.rubrics`: Questions for judges, and the parser of their answers
- `art_nb.rewards.ruler`: RULER: a judge compares the trajectories of a group, and its scores become the rewards
- `art_nb.rollouts.gather`: Parallel rollouts with progress, failures, timeouts and batches
- `art_nb.rollouts.redirects`: Requests of an agent's own client, sent to a model instead of the server that the client was made for
- `art_nb.rollouts.request_overrides`: Fields that replace those of an agent's requests, for example the temperature
- `art_nb.rollouts.scenarios`: The scenarios of each training step, in a reproducible shuffled order
- `art_nb.rollouts.tracers`: Tracers, which add information about rollouts to the calls that another package records
- `art_nb.runs.conversations`: Imported conversations: their scores, their groups, and datasets of messages
- `art_nb.runs.costs`: The cost of API responses, computed from prices or reported by the endpoint
- `art_nb.runs.formats`: File formats of trajectories: ART's Parquet files and older formats, and arrays of token data
- `art_nb.runs.locks`: The lock of a run directory, which allows one writer
- `art_nb.runs.readers`: Rollouts and conversations in the formats of other tools
- `art_nb.runs.report_queue`: The queue and the thread of each reporter, and the reporters of a model
- `art_nb.runs.reporters`: The `Reporter` protocol, and the reporters that a model requests: by name, as an object or as a function
- `art_nb.runs.row_files`: Rows of Parquet, Arrow, JSON and JSON Lines files, with their places
- `art_nb.runs.run_reports`: Reports of runs that have ended: `art.report_run` sends a run directory to Trackio, W&B, MLflow or TensorBoard
- `art_nb.runs.sessions`: What each session of a run was trained with: versions, code, options and machine
- `art_nb.runs.sources`: The source code of a rollout, with everything that it uses
- `art_nb.runs.store`: The run directory: the files of a run, written so that no data is lost if the process is killed
- `art_nb.serving.endpoint`: An OpenAI-compatible endpoint, over HTTP and in process
- `art_nb.tokens.advantages`: Group advantages, row weights of a step, and a report that explains why nothing would train
- `art_nb.tokens.chat`: Conversion between chat messages and token IDs, which keeps every sampled ID
- `art_nb.tokens.grammars`: Grammars that restrict a reply to a valid tool call, or to a format that the request describes
- `art_nb.tokens.learner_records`: Values that the loss used for each trained token, stored with the step's trajectories
- `art_nb.tokens.reply_stream`: Content, reasoning and tool calls of a reply, while it is generated
- `art_nb.tokens.rows`: Training rows of a trajectory: sampled token IDs, a mask, and the sampler's logprobs
- `art_nb.tokens.tool_calls`: Formats of tool calls, and the parsers that read them
- `art_nb.training.diagnostics`: Warnings about a run, derived from its metrics, with advice
- `art_nb.training.evaluation`: The mean of a metric on fixed scenarios, at any step, with a confidence interval
- `art_nb.training.heartbeat`: The status of a run in `run.json`, updated at regular intervals
- `art_nb.training.notifications`: Messages when a run ends, fails or stalls: on the desktop, to a webhook, or to a function
- `art_nb.training.progress`: The state of a run, derived from its events
- `art_nb.training.run`: `art.train` and its runs: training in the background that you can watch, pause, resume and stop
- `art_nb.training.run_view`: The interface through which displays and reports read a run, in this kernel or from its directory
- `art_nb.training.sft`: Supervised fine-tuning from lists and files: one learning rate per batch, datasets in chunks, and files read line by line
- `art_nb.training.steps`: The options of a run, its rollouts step by step, and metrics of their trajectories
- `art_nb.views.boards`: Game boards in a conversation, as rows of text cells
- `art_nb.views.comparison`: Several runs in one view: curves with intervals, settings that differ, and rollouts of the same scenario
- `art_nb.views.conversation`: Messages and token texts of a conversation as JSON for the viewer
- `art_nb.views.curation`: Conversations with their marks, near-duplicates and personal data: selections, splits and training data
- `art_nb.views.duplicates`: Groups of conversations that are nearly the same, by MinHash
- `art_nb.views.failures`: What went wrong in the rollouts of a run: exceptions, truncated replies, missing and invalid tool calls, tool errors, groups without signal
- `art_nb.views.index`: The index of rollouts: loading, filters, sort orders, search and links
- `art_nb.views.marks`: Marks, tags and corrections of conversations, in journals that several people can write
- `art_nb.views.personal_data`: A check of texts for personal data by patterns: addresses, numbers and keys
- `art_nb.views.query`: The filter language of the viewer, sort keys and presets
- `art_nb.views.token_objective`: The terms of the objective of one token, under the trainer's loss and under other losses"""

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
        "ArgumentError ArtError BackendMissing JudgeError LocalServingUnavailableError LocalTrainResult Message Messages "
        "MessagesAndChoices NotRegisteredError RolloutError ServeError StoreError TokenError Tools TrainConfig "
        "TrainError TrainResult TrainSFTConfig"
    ),
    "compat.dev": "LoRAConfig",
    "compat.unavailable": (
        "MegatronBackend MegatronRuntimeConfig MegatronTopologyConfig get_megatron_runtime_config "
        "init_megatron_runtime_config"
    ),
    "rollouts.trajectories": "History Trajectory TrajectoryGroup",
    "rollouts.capture": "capture_yielded_trajectory current_trajectory trajectory trajectory_group yield_trajectory",
    "rollouts.http_capture": "no_capture",
    "rollouts.gather": "gather_trajectories gather_trajectory_groups trajectory_group_batches",
    "core.aio": "limit_concurrency retry",
    "rollouts.scenarios": "conversation_scenarios",
    "runs.store": "RunStore open_run",
    "runs.readers": "read_conversations read_groups",
    "runs.recordings": "read_recordings",
    "runs.reporters": "Reporter",
    "runs.run_reports": "report_run",
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
    "distributed.ray_backend": "RayBackend",
    "backends.remote_client": "Backend",
    "servers.serverless_client": "ServerlessBackend ServerlessTrainResult",
    "backends.contract": "check_backend",
    "training.run": "Run train",
    "integrations.recorder": "record",
    "integrations.sessions": "Session",
    "integrations.programs": "ProgramOutput rollout_from",
    "integrations.agents": "example_rollouts run_agent",
    "integrations.auto_rl": "auto",
    "integrations.trackio_reporter": "TrackioReporter",
    "integrations.wandb_reporter": "WandbReporter",
    "integrations.mlflow_reporter": "MLflowReporter",
    "integrations.tensorboard_reporter": "TensorBoardReporter",
    "integrations.replay": "replay_rollout",
    "integrations.traces": "export_traces",
    "training.notifications": "notify",
    "training.evaluation": "Evaluation EvaluationDifference evaluate evaluate_steps",
    "pipeline.settings": (
        "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS "
        "PIPELINE_RL_SCORE_METRICS PipelineAutotuneConfig PipelineRuntimeConfig"
    ),
    "training.doctor": "doctor",
    "reports.plots": "comparison_bars learning_curve reward_histogram token_heatmaps",
    "reports.report": "export report",
    "panels.viewer": "view",
    "panels.failures_panel": "failures",
    "panels.comparison_panel": "compare",
    "panels.judging_panel": "judge",
    "panels.playground": "playground",
    "panels.curation_panel": "curate",
    "panels.ipython": "load_ipython_extension",
}
_PACKAGES = (
    "core rollouts runs models rewards tokens policy learners samplers serving backends distributed servers training "
    "pipeline views reports panels integrations compat cli"
).split()
# What `art.<TAB>` lists. The other names are ART's, or for programs, and work like these.
_COMPLETIONS = (
    "Model TrainableModel LocalBackend train Run TrainConfig TrainSFTConfig Trajectory TrajectoryGroup "
    "gather_trajectories gather_trajectory_groups trajectory_group_batches ruler ruler_score_group Person Journal judge "
    "view failures compare playground curate report export open_run evaluate doctor notify learning_curve "
    "comparison_bars register_board retry run_agent example_rollouts rollout_from auto record export_traces "
    "environments langgraph"
).split()
# Modules that add methods to the classes of another module.
_EXTENSIONS = {
    "training.run": ["reports.report", "reports.profile", "reports.reproduce"],
    "rollouts.trajectories": ["tokens.tokenized", "integrations.trl_rows"],
    "models.model": ["integrations.sessions", "reports.exports"],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

_attached, _, __all__ = _lazy_loader.attach(__name__, _PACKAGES, {m: names.split() for m, names in _NAMES.items()})
__all__ = [*(name for name in __all__ if name not in _PACKAGES), "dev", "environments", "langgraph", "trl"]


def __getattr__(name: str):
    """Load the module of a public name at the first use of the name."""
    from .core.machine import without_garbage_collection

    with without_garbage_collection():
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


_import_paths.install_import_paths(__name__)
_attach_to_kernel()
