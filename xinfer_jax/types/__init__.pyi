from ..cache.prefix import Prefix as Prefix
from ..checkpoint.loading import LoadStats as LoadStats
from ..config.rope import RopeConfig as RopeConfig
from ..engine.answers import Answer as Answer
from ..engine.async_sampling import SampleOutput as SampleOutput
from ..engine.requests import Request as Request
from ..engine.statistics import EngineStats as EngineStats
from ..generation.beams import BeamOutput as BeamOutput
from ..generation.functional import Decoded as Decoded
from ..generation.options import GenerateOutput as GenerateOutput
from ..generation.scoring import Scores as Scores
from ..generation.state import DecodeState as DecodeState
from ..generation.streaming import Stream as Stream
from ..model.decoder import ModelOutput as ModelOutput
from ..sampling.caller_processors import SamplingContext as SamplingContext
from ..sampling.logprobs import TokenLogprobs as TokenLogprobs
from ..stats import GenerateStats as GenerateStats
from ..text import TextStream as TextStream, TokenText as TokenText
