"""Structured output: `xj.grammar` makes answers that are valid for a schema, an expression or a grammar.

Make a `Grammar` with `json_schema`, `json_object`, `regex`, `choice` or `lark`, and pass it to
`GenerateOptions`. For example, this answer is "yes" or "no"::

    options = xj.GenerateOptions(grammar=xj.grammar.choice(["yes", "no"]))
    xj.generate_text(model, "Is Paris in France?", options)

`compile_dfa` makes a `Dfa` for `decode_loop`.

- By default JSON has no whitespace between tokens, because a model can add it without end.
- A model that reasons before its answer is free until `reasoning_end`, but cannot end the answer before it.
- Probabilities are the model's probabilities among the allowed texts, because every token whose bytes the
  grammar allows is allowed. Special tokens have no text, so no grammar allows them.
- With speculative decoding, each draft token is verified under the grammar. If the host writes the masks,
  it asks for the draft tokens first.
- Compiled grammars are cached by their content. They are compiled in the thread that makes the request, not
  in an engine's thread or an event loop. llguidance bounds its work, and this package bounds the rest.

Two forms sample the same tokens. Masks serve every grammar: in each step the host writes the allowed tokens
of a row into `Context.allowed_bits`. Automata serve small regular expressions on the device. All rows of an
engine have tables of one size, so a request compiles nothing.

If you read the code, begin with the module `grammars`, which has the functions above:

- `vocabulary` has the bytes of each token. `regex_parser`, `byte_automaton` and `token_automaton` make a
  `Dfa`, and `automaton` follows it.
- `token_masks` and `compiler` compile grammars with llguidance, and `matcher` follows one answer.
- `schema_unions` and `served_schemas` rewrite JSON Schemas.
- `worker`, `turns` and `pool` serve the grammars of a server's clients in other processes.
- `generate` does not import this package. It calls `Grammar.compile` and `Dfa.automata_of_rows`.
  `decode_loop` finds `automata_of_call` in `plugins.TABLE`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
