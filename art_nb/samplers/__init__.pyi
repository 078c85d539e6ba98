# Written by tools/stubs.py. Do not edit.
from .base import Sampler as Sampler
from .base import SamplingParams as SamplingParams
from .transformers import TransformersSampler as TransformersSampler
from .vllm import VLLMSampler as VLLMSampler
