# Written by tools/stubs.py. Do not edit.
from .ruler import TrajectoryScore as TrajectoryScore
from .ruler import position_bias as position_bias
from .ruler import ruler as ruler
from .ruler import ruler_score_group as ruler_score_group
from .ruler import score_group as score_group
from .rubrics import DEFAULT_RUBRIC as DEFAULT_RUBRIC
from .judges import Person as Person
from .judges import as_judge as as_judge
from .llm_judges import Judge as Judge
from .journal import Journal as Journal
from .journal import imported_judgments as imported_judgments
