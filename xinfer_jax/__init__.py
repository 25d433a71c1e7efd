"""xinfer_jax: LLM inference as pure functions over a parameter pytree, for JAX."""

from .cache import KVCache, init_cache
from .config import ModelConfig, RopeConfig
from .decode import DecodeState, decode_loop, decode_step, prefill
from .errors import InputError
from .generate import GenerateOptions, GenerateOutput, generate, kernels_used, stream
from .loading import Model, load_model
from .model import forward
from .params import init_params
from .sampling import SamplingConfig
from .stats import GenerateStats, LoadStats
from .text import generate_text, stream_text
from .tokenizer import Tokenizer

__all__ = [
    "DecodeState",
    "GenerateOptions",
    "GenerateOutput",
    "GenerateStats",
    "InputError",
    "KVCache",
    "LoadStats",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "SamplingConfig",
    "Tokenizer",
    "decode_loop",
    "decode_step",
    "forward",
    "generate",
    "generate_text",
    "init_cache",
    "init_params",
    "kernels_used",
    "load_model",
    "prefill",
    "stream",
    "stream_text",
]
