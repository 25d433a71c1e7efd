"""xinfer_jax: LLM inference in JAX, as pure functions over a parameter pytree. Import it as `xj`.

Load a model, and generate text::

    model = xj.load_model()                    # or "Qwen/Qwen2.5-0.5B-Instruct", or a directory
    xj.generate_text(model, "What is the capital of France?")

Functions of a `Model` take and return text::

    load_model, save_model          load and save a checkpoint
    load_draft, save_draft          load and save a Draft, a draft head for speculative decoding
    generate_text, stream_text      answer one prompt, or a list of prompts
    encode_prompt, alternatives_text    prompt to token ids, and probabilities of an answer's tokens
    embed_texts, rerank             vectors of texts, and scores of documents for a query
    generate_file, DatasetGenerator answer a file of prompts, or a dataset
    Engine                          answer requests that come and go, with EngineOptions, RequestOptions

Functions of `params` and `config` take and return arrays or token ids. Call them in your own jit, vmap and
grad::

    forward, run_model              logits of tokens, and hidden states, experts, tapped values
    init_cache, prefill, decode_step, decode_loop    generation inside your own program
    generate, stream, beam_search   answer prompts that you have at once
    score, score_completions        log-probabilities of given tokens
    hidden_states, embed_tokens, final_norm, unembed, attention_weights    parts of the model
    init_params, kernels_used       random parameters, and the kernels that a call would run
    load_prefix, save_prefix        the KV cache of a common beginning, as a file
    enable_export                   lets jax.export write programs with trees of this library

These classes decide how tokens are sampled and when an answer ends: SamplingConfig, GenerateOptions,
LogitsProcessor, Tap.

The name of an array ends with the letters of its axes. For example, `logits_BV` has B rows and V columns::

    B  rows: prompts or answers         V  ids of the vocabulary        L  layers
    T  tokens of this call              D  width of hidden states       N, K  query heads, key/value heads
    S  slots of a row in the KV cache   A  alternatives of a token      H  width of a head
    E  ids that end a row               W  words of a mask: ceil(V/32)  X, U  experts, chosen experts

If an argument is invalid, you get an InputError. Some errors have their own class: ContextLengthError,
GrammarError, NoTokenLeftError. `register` adds your own model family, cache dtype and the like.

Namespaces (for example, `help(xj.lora)` describes one)::

    xj.grammar    JSON Schema, regular expressions, choices and grammars that an answer follows
    xj.tools      calls of tools in an answer
    xj.lora       LoRA adapters
    xj.params     names, conversion, stacking and sharding of the parameter tree
    xj.rollouts   rollouts for training
    xj.types      types of results, for annotations
    xj.testing    checks for your own tests
"""

import sys

from .lazy_names import lazy_names

_find, _names, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        globals()[name] = _version()
        return globals()[name]
    if name in __all__:
        return _find(name)
    from .old_names import moved_name

    return moved_name(sys.modules[__name__], name)


def __dir__() -> list[str]:
    return sorted({*_names(), "__version__"})


def _version() -> str:
    """Returns the installed version, or the one in pyproject.toml if the checkout is not installed."""
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("xinfer-jax")
    except PackageNotFoundError:
        import tomllib

        file = Path(__file__).parents[1] / "pyproject.toml"
        settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        project = settings.get("project", {})
        return project["version"] if project.get("name") == "xinfer-jax" else "0+unknown"
