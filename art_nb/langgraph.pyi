# Written by tools/stubs.py. Do not edit.
from .integrations.langgraph import init_chat_model as init_chat_model
from .integrations.langgraph import wrap_rollout as wrap_rollout
