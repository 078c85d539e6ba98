# Written by tools/stubs.py. Do not edit.
from .integrations.trl_rows import to_trl as to_trl
from .integrations.trl_rows import trl_dpo_rows as trl_dpo_rows
from .integrations.trl_rows import trl_kto_rows as trl_kto_rows
from .integrations.trl_rows import trl_sft_rows as trl_sft_rows
from .integrations.trl_rollouts import RolloutFunc as RolloutFunc
from .integrations.trl_rollouts import reward_func as reward_func
from .integrations.trl_rollouts import rollout_func as rollout_func
