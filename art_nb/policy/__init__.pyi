# Written by tools/stubs.py. Do not edit.
from .lora import Policy as Policy
from .loading import load_policy as load_policy
from .device import DeviceThread as DeviceThread
