"""Draft heads: small networks that draft tokens from hidden states of the model, for speculative decoding.

Reading order:

- `draft_head` is the interface: `DraftHead`, and `ChainHead`, which drafts one token after the other.
- `mtp` is multi-token prediction, which is in the files of DeepSeek-V3, GLM-4.5, Qwen3-Next and others.
- `dflash` is DFlash and DSpark, which draft a block of tokens in one pass.
- `draft_vocabulary` is for heads that draft only some tokens of the vocabulary.
- `draft` has `Draft`, a head with its parameters from files of its own.

Decisions:

- Slot s of a head's cache holds a function of token s and of the features of token s - 1. So a page of slots
  is a function of its own prefix, and prefix sharing with a head finds the same tokens as without one. Other
  libraries store token s + 1 with the features of token s, and lose the last page of each hit.
- Slot 0 has no features before it. No other slot sees it.
- A head drafts with the settings and the noise of its row. The model verifies each draft token by its own
  sample, so a wrong head costs time and changes no token. Tests compare drafts and acceptance with the
  published formulas, because nothing else shows a wrong hidden state.
"""
