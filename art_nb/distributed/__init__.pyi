# Written by tools/stubs.py. Do not edit.
from .ray_backend import RayBackend as RayBackend
