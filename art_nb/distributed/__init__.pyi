# Written by tools/stubs.py. Do not edit.
from .capacity import CapacityPlan as CapacityPlan
from .capacity import plan_capacity as plan_capacity
from .ray_backend import RayBackend as RayBackend
