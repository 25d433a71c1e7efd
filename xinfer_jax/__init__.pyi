from . import (
    grammar as grammar,
    lora as lora,
    params as params,
    rollouts as rollouts,
    testing as testing,
    tools as tools,
    types as types,
)
from .backends.kernel_report import kernels_used as kernels_used
from .batch.dataset import DatasetGenerator as DatasetGenerator
from .batch.run_batch import generate_file as generate_file
from .cache.kv_cache import KVCache as KVCache, init_cache as init_cache
from .cache.prefix_files import load_prefix as load_prefix, save_prefix as save_prefix
from .checkpoint.draft_loading import load_draft as load_draft, save_draft as save_draft
from .checkpoint.loading import Model as Model, load_model as load_model
from .checkpoint.saving import save_model as save_model
from .config.model_config import ModelConfig as ModelConfig
from .draft_heads.draft import Draft as Draft
from .embedding import embed_texts as embed_texts
from .engine.engine_options import EngineOptions as EngineOptions
from .engine.engines import Engine as Engine
from .engine.request_options import RequestOptions as RequestOptions
from .errors import (
    ContextLengthError as ContextLengthError,
    GrammarError as GrammarError,
    InputError as InputError,
    NoTokenLeftError as NoTokenLeftError,
)
from .exporting import enable_export as enable_export
from .generation.beams import beam_search as beam_search
from .generation.entrypoints import generate as generate
from .generation.functional import decode_loop as decode_loop, decode_step as decode_step, prefill as prefill
from .generation.options import GenerateOptions as GenerateOptions
from .generation.scoring import score as score, score_completions as score_completions
from .generation.streaming import stream as stream
from .model.attention_maps import attention_weights as attention_weights
from .model.decoder import forward as forward, run_model as run_model, unembed as unembed
from .model.forward_parts import (
    embed_tokens as embed_tokens,
    final_norm as final_norm,
    hidden_states as hidden_states,
)
from .model.taps import Tap as Tap
from .plugins import register as register
from .reranking import rerank as rerank
from .sampling.caller_processors import LogitsProcessor as LogitsProcessor
from .sampling.sampling_config import SamplingConfig as SamplingConfig
from .text import (
    alternatives_text as alternatives_text,
    encode_prompt as encode_prompt,
    generate_text as generate_text,
    stream_text as stream_text,
)
from .tokenization.tokenizer import Tokenizer as Tokenizer
from .weights.initialization import init_params as init_params

__version__: str
