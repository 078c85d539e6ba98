# Written by tools/stubs.py. Do not edit.
from .integrations.environments import Environment as Environment
from .integrations.reasoning_tasks import reasoning_gym as reasoning_gym
from .integrations.text_games import textarena as textarena
from .integrations.tool_environments import environment_factory as environment_factory
from .integrations.openenv_sessions import openenv as openenv
from .integrations.gymnasium_tasks import gymnasium as gymnasium
