"""xinfer_jax: LLM inference as pure functions over a parameter pytree, for JAX."""

from .cache import KVCache, init_cache
from .config import ModelConfig, RopeConfig
from .errors import InputError
from .generate import DecodeState, GenerateOptions, GenerateOutput, decode_loop, decode_step, generate, prefill, stream
from .model import forward
from .params import init_params
from .sampling import SamplingConfig
from .stats import GenerateStats, LoadStats
