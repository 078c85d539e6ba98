# Written by tools/stubs.py. Do not edit.
from .profile import Profile as Profile
from .report import export as export
from .exports import export_model as export_model
from .plots import comparison_bars as comparison_bars
from .plots import learning_curve as learning_curve
from .plots import reward_histogram as reward_histogram
from .plots import token_heatmaps as token_heatmaps
from .static_html import static_html as static_html
