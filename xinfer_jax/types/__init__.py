"""Types that you receive and do not make: `xj.types`. Use them in annotations.

For example, `def accept(out: xj.types.GenerateOutput) -> bool`.

The name of an array ends with the letters of its axes. For example, `tokens_BT` has B rows and T tokens. The
overview of `xinfer_jax` lists the letters.

- Results of functions: `GenerateOutput`, `BeamOutput`, `Decoded`, `ModelOutput`, `Scores`, `Stream`,
  `TextStream`, `SampleOutput`, `TokenLogprobs`, `TokenText`, `Prefix`, and `Selection` of `kernels_used`.
- Requests of an engine: `Request`, `Answer`.
- Reports and statistics: `BatchReport`, `GenerateStats`, `EngineStats`, `LoadStats`.
- Results that you give to `decode_loop`: `DraftState`.
- Arguments that your functions get: `DecodeState`, `SamplingContext`.
- A part of a config: `RopeConfig`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
