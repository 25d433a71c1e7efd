from typing import Any

from . import testing as testing
from .adapters.adapted_params import (
    merge_adapter as merge_adapter,
    split_adapter as split_adapter,
    with_adapter as with_adapter,
    with_adapters as with_adapters,
)
from .adapters.adapter import Adapter as Adapter, LowRank as LowRank, init_adapter as init_adapter
from .adapters.peft_files import load_adapter as load_adapter, save_adapter as save_adapter
from .backends.kernel_report import kernels_used as kernels_used
from .batch.dataset import DatasetGenerator as DatasetGenerator
from .batch.run_batch import generate_file as generate_file
from .cache.kv_cache import KVCache as KVCache, init_cache as init_cache
from .cache.prefix import Prefix as Prefix
from .cache.prefix_files import load_prefix as load_prefix, save_prefix as save_prefix
from .cache.truncation import truncate as truncate
from .checkpoint.loading import LoadStats as LoadStats, Model as Model, load_model as load_model
from .checkpoint.saving import save_model as save_model
from .config.model_config import ModelConfig as ModelConfig
from .config.rope import RopeConfig as RopeConfig
from .embedding import embed_texts as embed_texts
from .engine.answers import Answer as Answer
from .engine.async_sampling import SampleOutput as SampleOutput
from .engine.engine import Engine as Engine
from .engine.engine_options import EngineOptions as EngineOptions
from .engine.engines import Engines as Engines
from .engine.request_options import RequestOptions as RequestOptions
from .engine.requests import Request as Request
from .engine.statistics import EngineStats as EngineStats
from .errors import InputError as InputError
from .families.conversion import (
    ParamName as ParamName,
    param_names as param_names,
    params_from_tensors as params_from_tensors,
    params_to_tensors as params_to_tensors,
)
from .families.reading import from_hf as from_hf
from .generation.beams import BeamOutput as BeamOutput, beam_search as beam_search
from .generation.entrypoints import generate as generate
from .generation.functional import (
    Decoded as Decoded,
    decode_loop as decode_loop,
    decode_step as decode_step,
    prefill as prefill,
)
from .generation.options import GenerateOptions as GenerateOptions, GenerateOutput as GenerateOutput
from .generation.rollouts import (
    PackedRollout as PackedRollout,
    continue_rows as continue_rows,
    pack_rollout as pack_rollout,
    repeat_rows as repeat_rows,
)
from .generation.scoring import (
    Scores as Scores,
    map_logits as map_logits,
    score as score,
    score_completions as score_completions,
)
from .generation.state import DecodeState as DecodeState
from .generation.streaming import Stream as Stream, stream as stream
from .grammar.automaton import Dfa as Dfa, dfa as dfa
from .grammar.grammars import (
    Grammar as Grammar,
    choice as choice,
    json_object as json_object,
    json_schema as json_schema,
    lark as lark,
    regex as regex,
)
from .model.attention_maps import attention_weights as attention_weights
from .model.decoder import (
    ModelOutput as ModelOutput,
    forward as forward,
    run_model as run_model,
    unembed as unembed,
)
from .model.forward_parts import (
    embed_tokens as embed_tokens,
    final_norm as final_norm,
    hidden_states as hidden_states,
)
from .model.taps import Tap as Tap
from .plugins import register as register
from .reranking import rerank as rerank
from .sampling.caller_processors import Processor as Processor, SamplingContext as SamplingContext
from .sampling.logprobs import TokenLogprobs as TokenLogprobs
from .sampling.sampling_config import SamplingConfig as SamplingConfig
from .stats import GenerateStats as GenerateStats
from .text import (
    TextStream as TextStream,
    alternatives_text as alternatives_text,
    encode_prompt as encode_prompt,
    generate_text as generate_text,
    stream_text as stream_text,
)
from .tokenization.tokenizer import Tokenizer as Tokenizer
from .tokenization.tool_choice import tool_grammar as tool_grammar
from .tool_calls.answer_parser import (
    AnswerDelta as AnswerDelta,
    AnswerParser as AnswerParser,
    ParsedAnswer as ParsedAnswer,
    ToolCall as ToolCall,
    parse_tool_calls as parse_tool_calls,
)
from .tool_calls.tool_call_parser import ToolCallDelta as ToolCallDelta
from .weights.dequantization import dequantize as dequantize
from .weights.initialization import init_params as init_params
from .weights.layout import shardings as shardings
from .weights.resharding import reshard as reshard
from .weights.stacking import stack_layers as stack_layers, unstack_layers as unstack_layers

__version__: str

def plugin(kind: str, name: str) -> Any: ...
