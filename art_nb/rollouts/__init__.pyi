# Written by tools/stubs.py. Do not edit.
from .trajectories import Trajectory as Trajectory
from .trajectories import TrajectoryGroup as TrajectoryGroup
from .trajectories import choices as choices
from .entries import History as History
from .entries import get_messages as get_messages
from .gather import gather_trajectories as gather_trajectories
from .gather import gather_trajectory_groups as gather_trajectory_groups
from .gather import trajectory_group_batches as trajectory_group_batches
from .capture import capture_yielded_trajectory as capture_yielded_trajectory
from .capture import current_trajectory as current_trajectory
from .capture import trajectory as trajectory
from .capture import trajectory_group as trajectory_group
from .capture import yield_trajectory as yield_trajectory
from .http_capture import no_capture as no_capture
from .scenarios import conversation_scenarios as conversation_scenarios
from .scenarios import iterate_dataset as iterate_dataset
from .scenarios import scenarios_of_step as scenarios_of_step
