"""Types that you receive and do not make: `xj.types`. Use them in annotations.

For example, `def accept(out: xj.types.GenerateOutput) -> bool`.

- Results of functions: `GenerateOutput`, `BeamOutput`, `Decoded`, `ModelOutput`, `Scores`, `Stream`,
  `TextStream`, `SampleOutput`, `TokenLogprobs`, `TokenText`, `Prefix`, and `Selection` of `kernels_used`.
- Requests of an engine: `Request`, `Answer`.
- Reports and statistics: `BatchReport`, `GenerateStats`, `EngineStats`, `LoadStats`.
- Arguments that your functions get: `DecodeState`, `SamplingContext`.
- A part of a config: `RopeConfig`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
