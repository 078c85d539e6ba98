# Written by tools/stubs.py. Do not edit.
from .sessions import Session as Session
from .programs import ProgramOutput as ProgramOutput
from .programs import rollout_from as rollout_from
from .langgraph import init_chat_model as init_chat_model
from .langgraph import wrap_rollout as wrap_rollout
from .auto_rl import AutoRL as AutoRL
from .auto_rl import auto as auto
