"""Types that you receive and do not make: `xj.types`. Use them in annotations.

- Results of functions: `GenerateOutput`, `BeamOutput`, `Decoded`, `ModelOutput`, `Scores`, `Stream`,
  `TextStream`, `SampleOutput`, `TokenLogprobs`, `TokenText`, `Prefix`.
- Requests of an engine: `Request`, `Answer`. What `kernels_used` returns: `Selection`.
- Reports and statistics: `BatchReport`, `GenerateStats`, `EngineStats`, `LoadStats`.
- Arguments that your functions get: `DecodeState`, `SamplingContext`; and `RopeConfig`, a part of a config.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
