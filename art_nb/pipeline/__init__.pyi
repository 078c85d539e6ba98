# Written by tools/stubs.py. Do not edit.
from .trainer import PipelineTrainer as PipelineTrainer
from .retention import keep_recent_and_top as keep_recent_and_top
from .settings import MetricDefinition as MetricDefinition
from .settings import PIPELINE_RL_DASHBOARD_DEFAULT_METRICS as PIPELINE_RL_DASHBOARD_DEFAULT_METRICS
from .settings import PIPELINE_RL_METRIC_DEFINITIONS as PIPELINE_RL_METRIC_DEFINITIONS
from .settings import PIPELINE_RL_SCORE_METRICS as PIPELINE_RL_SCORE_METRICS
from .settings import PipelineAutotuneConfig as PipelineAutotuneConfig
from .settings import PipelineRuntimeConfig as PipelineRuntimeConfig
from .settings import make_group_rollout_fn as make_group_rollout_fn
