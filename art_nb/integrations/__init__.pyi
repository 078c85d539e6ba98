# Written by tools/stubs.py. Do not edit.
from .sessions import Session as Session
from .programs import ProgramOutput as ProgramOutput
from .programs import rollout_from as rollout_from
from .langgraph import init_chat_model as init_chat_model
from .langgraph import wrap_rollout as wrap_rollout
from .environments import Environment as Environment
from .reasoning_tasks import reasoning_gym as reasoning_gym
from .text_games import textarena as textarena
from .tool_environments import environment_factory as environment_factory
from .openenv_sessions import openenv as openenv
from .gymnasium_tasks import gymnasium as gymnasium
