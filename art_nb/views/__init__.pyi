# Written by tools/stubs.py. Do not edit.
from .index import RolloutIndex as RolloutIndex
from .index import open_rollouts as open_rollouts
from .boards import register_board as register_board
