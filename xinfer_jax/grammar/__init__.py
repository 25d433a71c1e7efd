"""Answers that are valid by construction: grammars, and which tokens they allow next.

In the order to read: `grammars` has `Grammar` and what makes one (`json_schema`, `regex`, `choice`, …);
`vocabulary` gives the bytes of each token; `regex_parser`, `byte_automaton` and `token_automaton` make `Dfa`s
of regular expressions; `automaton` follows them; `token_masks` and `compiler` compile grammars by llguidance;
`matcher` follows one answer; `served_schemas` rewrites JSON Schemas before they are compiled; `pool` and
`worker` compile and follow those of a server's clients in processes of their own.
`generate` does not import this package: it calls `Grammar.compile` and `Dfa.automata_of_rows`.

There are two forms, which sample the same tokens. Masks of the host serve every grammar. Automata
(`automaton`) serve regular ones of at most 512 states and 65,536 entries of the table, without
the host and without llguidance: they are used where they serve, and `xj.dfa` gives them to callers.

- Masks: the host writes a mask of V bits for each constrained row
  into `Context.allowed_bits`, and a call of the device takes one step while such a row runs. Other rows have
  all bits set: their tokens and numbers stay the same.
- Text that a grammar forces is still tokenized by the model (llguidance's `no_forcing`): a mask has every
  token whose bytes the grammar allows. So a slow reference is one line, and probabilities are those of the
  model among the allowed texts.
- llguidance sees a vocabulary of our own bytes, with one more token for the end of a text. So the EOS ids of
  a request, padded vocabularies and tokenizers wider than the model need no other compilation. Special tokens
  have no text, so no grammar allows them.
- Draft tokens are verified under a mask each, so the host must know them before the step: functions propose
  the same tokens again within the step. A draft model is rejected.
- A table has a column for each class of tokens, so it is small: 152k tokens are a few dozen classes. States
  are those of an automaton over bytes, not minimized: equal states cost only space.
- An engine's rows all have a table of 65,536 entries and the classes of tokens (0.4 MiB for 152k tokens), so
  a request with an automaton compiles nothing.
- Compiled grammars are kept by content, the latest 256 and 4 million characters. llguidance bounds its work
  by counts (lexer states, items); what it leaves out is bounded here (nested groups, & and ~ of Lark). A
  schema of a megabyte still compiles for seconds. That happens where a request is made: not in an engine's
  thread, nor in an event loop.
- Between whole tokens of JSON no whitespace is allowed by default: otherwise a model can add it without end.
- A model that reasons before its answer is free until `reasoning_end`, but may not end before. In Harmony
  it may end with a call instead, after which `<|call|>` is allowed.
"""
