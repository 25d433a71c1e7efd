"""Answers that are valid by construction: `xj.grammar`. `json_schema`, `json_object`, `regex`, `choice` and
`lark` make a `Grammar` for `GenerateOptions`; `compile_dfa` makes a `Dfa` for `decode_loop`.

In the order to read: `grammars` has `Grammar` and the functions that make one;
`vocabulary` gives the bytes of each token; `regex_parser`, `byte_automaton` and `token_automaton` make `Dfa`s
of regular expressions; `automaton` follows them; `token_masks` and `compiler` compile grammars by llguidance;
`matcher` follows one answer; `schema_unions` and `served_schemas` rewrite JSON Schemas before they are
compiled; `worker`, `turns` and `pool` compile and follow the grammars of a server's clients in processes of
their own. `generate` does not import this package: it calls `Grammar.compile` and `Dfa.automata_of_rows`;
`decode_loop` has `automata_of_call` by `plugins.TABLE`.

- Two forms sample the same tokens. Masks serve every grammar: the host writes the allowed tokens of each
  constrained row into `Context.allowed_bits`, and a call of the device takes one step. Automata serve small
  regular grammars on the device, without the host and without llguidance; all rows of an engine have a table
  of one size, so a request compiles nothing.
- A mask has every token whose bytes the grammar allows, also where text is forced: probabilities are those
  of the model among the allowed texts. Special tokens have no text, so no grammar allows them.
- Draft tokens are verified under a mask each, so the host must know them before the step: functions propose
  them again within the step, and a draft model is rejected.
- Compiled grammars are kept by content. llguidance bounds its work by counts; what it leaves out is bounded
  here. Compiling happens where a request is made: not in an engine's thread, nor in an event loop.
- JSON has no whitespace between tokens by default: otherwise a model can add it without end. A model that
  reasons before its answer is free until `reasoning_end`, but may not end before.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
