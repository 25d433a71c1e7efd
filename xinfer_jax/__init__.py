"""xinfer_jax: LLM inference as pure functions over a parameter pytree, for JAX."""

from .beam import BeamOutput, beam_search
from .cache import KVCache, init_cache
from .config import ModelConfig, RopeConfig
from .decode import DecodeState, decode_loop, decode_step, prefill
from .errors import InputError
from .generation import generate, kernels_used, stream
from .loading import Model, load_model
from .logprobs import TokenLogprobs
from .model import embed_tokens, forward
from .options import GenerateOptions, GenerateOutput
from .params import init_params
from .prefix import Prefix, load_prefix, save_prefix
from .sampling import SamplingConfig
from .scoring import score, score_completions
from .stats import GenerateStats, LoadStats
from .text import alternatives_text, generate_text, stream_text
from .tokenizer import Tokenizer

__all__ = [
    "BeamOutput",
    "DecodeState",
    "GenerateOptions",
    "GenerateOutput",
    "GenerateStats",
    "InputError",
    "KVCache",
    "LoadStats",
    "Model",
    "ModelConfig",
    "Prefix",
    "RopeConfig",
    "SamplingConfig",
    "TokenLogprobs",
    "Tokenizer",
    "alternatives_text",
    "beam_search",
    "decode_loop",
    "decode_step",
    "embed_tokens",
    "forward",
    "generate",
    "generate_text",
    "init_cache",
    "init_params",
    "kernels_used",
    "load_model",
    "load_prefix",
    "prefill",
    "save_prefix",
    "score",
    "score_completions",
    "stream",
    "stream_text",
]
