# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
"""
# Generate and score

In this tutorial you load a language model, generate text with it, and measure how likely the model finds a
text. You need this first, because the other tutorials build on it.

You learn how to:

- load a model, and look at its three parts: parameters, config and tokenizer
- generate an answer as text, and as token ids
- generate a batch of prompts with different lengths
- sample with a temperature and a key, and get the same answer again
- stream an answer while it is generated
- get the log-probability of each token, before and after the temperature
- compute the perplexity of a sentence

You should know [JAX](https://docs.jax.dev) arrays and keys. The tutorial runs offline on a CPU, with a
small checkpoint that is part of the package. It has one million parameters and knows the capitals of
countries.
"""

# %% [markdown]
# ## Set up
#
# `show` displays a figure in a notebook. If you run this file as a script with `MPLBACKEND=agg`, `show` saves
# the figure as a PNG file in the current directory.

# %%
import dataclasses
import math

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import xinfer_jax as xj

plt.rcParams.update({"figure.facecolor": "white", "axes.grid": True, "grid.alpha": 0.3})


def show(name):
    """Shows the current figure, or saves it as NAME.png if the backend has no window."""
    if plt.get_backend().lower() == "agg":
        plt.savefig(f"{name}.png")
    else:
        plt.show()
    plt.close()


# %% [markdown]
# ## Load a model
#
# Without an argument, `xj.load_model` loads the bundled checkpoint. To load another model, pass a directory
# or the name of a model on the [Hugging Face hub](https://huggingface.co/models), for example
# `xj.load_model("Qwen/Qwen2.5-0.5B-Instruct")`.

# %%
model = xj.load_model()
num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
print(f"{num_params:,} parameters in {model.config.num_hidden_layers} layers")

# %% [markdown]
# A `Model` is a plain object with three parts that you use:
#
# - `model.params` is a pytree of arrays. You can pass it to `jax.jit`, `jax.grad` and
#   [optax](https://optax.readthedocs.io).
# - `model.config` is a frozen dataclass. It is hashable, so it is static under `jax.jit`.
# - `model.tokenizer` turns text into token ids and back.

# %%
ids = model.tokenizer.encode("The capital of France is Paris.")
print(ids)
print([model.tokenizer.decode([i]) for i in ids])

# %% [markdown]
# ## Generate text
#
# `xj.generate_text` takes a question and returns the answer. It applies the chat template of the checkpoint,
# and it follows the sampling settings in the checkpoint's `generation_config.json`.

# %%
print(xj.generate_text(model, "What is the capital of France?"))

# %% [markdown]
# If you want token ids, call the two steps yourself. `xj.encode_prompt` applies the chat template.
# `xj.generate` takes the parameters, the config and a list of prompts. It returns a `GenerateOutput`, with
# one entry for each prompt in each field.

# %%
prompt = xj.encode_prompt(model, "What is the capital of France?")
out = xj.generate(model.params, model.config, [prompt], xj.GenerateOptions(max_tokens=20))
print(out.tokens[0], out.finish_reason[0])
print(model.tokenizer.decode(out.text_ids(0)))

# %% [markdown]
# `finish_reason` is `"stop"` if the model ended the answer with an end-of-sequence (EOS) token. It is
# `"length"` if the answer reached `max_tokens`. `out.tokens[0]` contains the EOS token, and `out.text_ids(0)`
# does not.
#
# ## Generate a batch
#
# Prompts in a batch can have different lengths. xinfer_jax pads them on the right, and each prompt gets the
# same tokens that it gets alone. You do not choose a padding side, and you do not build an attention mask.

# %%
countries = ["Spain", "the Democratic Republic of the Congo", "Peru"]
prompts = [xj.encode_prompt(model, f"What is the capital of {country}?") for country in countries]
batch = xj.generate(model.params, model.config, prompts, xj.GenerateOptions(max_tokens=24))
alone = [
    xj.generate(model.params, model.config, [prompt], xj.GenerateOptions(max_tokens=24)) for prompt in prompts
]
for row, prompt in enumerate(prompts):
    print(f"{len(prompt)} prompt tokens: {model.tokenizer.decode(batch.text_ids(row))}")
print("same tokens alone:", batch.tokens == [out.tokens[0] for out in alone])

# %% [markdown]
# ## Sample
#
# With the default options, `xj.generate` is greedy: it takes the most likely token at each position. To
# sample, pass an `xj.SamplingConfig` and a JAX key. `n=4` asks for four answers to the prompt.
#
# The question below has no country, so the model is not sure what to answer.

# %%
prompt = xj.encode_prompt(model, "Tell me a capital.")
options = xj.GenerateOptions(max_tokens=24, n=4, sampling=xj.SamplingConfig(temperature=1.0, top_p=0.95))
out = xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(0))
for row in range(4):
    print(model.tokenizer.decode(out.text_ids(row)))

# %% [markdown]
# The same key gives the same answers. Randomness belongs to the request: other prompts in the batch do not
# change the answer to yours. The [guarantees](../../xinfer_jax/generation/README.md) list the exact
# conditions.

# %%
again = xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(0))
other = xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(1))
print("same key, same tokens:", again.tokens == out.tokens)
print("other key, same tokens:", other.tokens == out.tokens)

# %% [markdown]
# ## Stream
#
# `xj.stream_text` yields the text while it is generated, in pieces of complete characters. Use it if a person
# reads the answer, for example in a chat. After the last piece, `stream.output` has the same fields as the
# result of `xj.generate`.

# %%
stream = xj.stream_text(model, "What is the capital of Japan?", xj.GenerateOptions(max_tokens=24))
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n{len(stream.output.tokens[0])} tokens, finish_reason: {stream.output.finish_reason[0]}")

# %% [markdown]
# ## Log-probabilities of generated tokens
#
# For each position, the model computes a vector of logits $z$ with one number for each token of the
# vocabulary. Two distributions follow from them, and you should know which one you use:
#
# - **before the temperature**: $\log \mathrm{softmax}(z)$. This is the distribution of the model. Use it to
#   compare models or texts.
# - **after the temperature**: $\log \mathrm{softmax}(z / \tau)$, and after each other setting, for example
#   `top_p`. The token was sampled from this distribution. Use it for importance ratios in reinforcement
#   learning.
#
# `GenerateOptions(logprobs=3)` records both for each token, and also the three most likely tokens. The field
# names are `logprob` and `processed_logprob`.

# %%
temperature = 2.0
sampling = xj.SamplingConfig(temperature=temperature)
options = xj.GenerateOptions(max_tokens=24, logprobs=3, sampling=sampling)
out = xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(3))
print("token              before   after")
for token in out.alternatives[0]:
    text = model.tokenizer.token_text(token.id)
    print(f"{text!r:16} {token.logprob:8.3f} {token.processed_logprob:8.3f}")

# %% [markdown]
# A temperature above 1 makes the distribution flatter. So a likely token has a lower log-probability after
# the temperature, and an unlikely token has a higher one.
#
# `xj.alternatives_text` gives the same alternatives as text with probabilities. For example, the first tokens
# below were certain, and the country was not:

# %%
for chosen, *others in xj.alternatives_text(model, out)[:6]:
    listed = ", ".join(f"{token.text!r} {token.probability:.3f}" for token in others)
    print(f"{chosen.text!r:12} {chosen.probability:.3f}  of {listed}")

# %% [markdown]
# ## Score a given text
#
# `xj.score` computes the log-probability of each token of a text that you already have. The result has the
# shape `[B, T-1]`: entry `t` belongs to token `t + 1`, because the first token has no token before it.
#
# Score the answer from above, with and without the temperature. Both results agree with the recorded
# log-probabilities. They differ by rounding only, because generation and scoring are two different compiled
# programs.

# %%
tokens_BT = jnp.array([[*prompt, *out.tokens[0]]])
recorded = np.array([[token.logprob, token.processed_logprob] for token in out.alternatives[0]])
before = xj.score(model.params, model.config, tokens_BT)
after = xj.score(model.params, model.config, tokens_BT, temperature=temperature)
scored = np.stack([scores.logprobs_BT[0, len(prompt) - 1 :] for scores in (before, after)], axis=1)
difference = np.abs(recorded - scored).max(axis=0)
print(f"largest difference before the temperature: {difference[0]:.1e}")
print(f"largest difference after the temperature:  {difference[1]:.1e}")

# %% [markdown]
# ## Perplexity of a sentence
#
# The [perplexity](https://en.wikipedia.org/wiki/Perplexity) of a text is $\exp(-\frac{1}{N} \sum_t \log p_t)$
# over its $N$ scored tokens. A perplexity of 1 means that the model was certain of each token. A perplexity
# of 10 means that the model was as unsure as if it chose between ten equally likely tokens.
#
# Compare a true sentence with a false one. Both are one batch: `num_tokens_B` says how many tokens of each
# row are real, and the entries of padding are 0.

# %%
sentences = ["The capital of France is Paris.", "The capital of France is Rome."]
rows = [model.tokenizer.encode(sentence) for sentence in sentences]
num_tokens_B = np.array([len(row) for row in rows])
tokens_BT = np.zeros((len(rows), num_tokens_B.max()), np.int32)
for row, ids in enumerate(rows):
    tokens_BT[row, : len(ids)] = ids
logprobs_BT = np.asarray(xj.score(model.params, model.config, tokens_BT, num_tokens_B).logprobs_BT)
perplexities = [
    math.exp(-logprobs[: n - 1].mean()) for logprobs, n in zip(logprobs_BT, num_tokens_B, strict=True)
]
for sentence, perplexity in zip(sentences, perplexities, strict=True):
    print(f"perplexity {perplexity:8.2f}  {sentence}")

# %% [markdown]
# The plot shows the reason. Both sentences begin with the same tokens, so the first bars are equal. The two
# sentences differ at the city, and there the false one costs many nats.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
for axis, ids, logprobs, sentence, perplexity in zip(
    axes, rows, logprobs_BT, sentences, perplexities, strict=True
):
    labels = [repr(model.tokenizer.token_text(i)) for i in ids[1:]]
    axis.bar(range(len(labels)), logprobs[: len(labels)])
    axis.set_xticks(range(len(labels)), labels, rotation=60)
    axis.set_title(f"{sentence}\nperplexity {perplexity:.1f}")
    axis.set_xlabel("token")
axes[0].set_ylabel("log-probability (nats)")
show("generate_and_score")

# %% [markdown]
# The first tokens are expensive in both sentences. The model was trained mostly on questions in the chat
# format, and many countries can follow "The capital of".
#
# ## Do not mix the two distributions
#
# The perplexity above uses the distribution before the temperature. If you score with another temperature,
# you measure another distribution, and the number is not comparable with published perplexities. For example:

# %%
for temperature in (0.5, 1.0, 2.0):
    scores = xj.score(model.params, model.config, tokens_BT, num_tokens_B, temperature=temperature)
    first = np.asarray(scores.logprobs_BT)[0, : num_tokens_B[0] - 1]
    print(f"temperature {temperature}: perplexity {math.exp(-first.mean()):.2f}")

# %% [markdown]
# ## Many prompts with the same options
#
# `GenerateOptions` is a frozen dataclass. To change one field, use `dataclasses.replace`. You can also give
# each prompt its own sampling settings: pass a list of `SamplingConfig`. Settings are arguments of the
# compiled program, so other values compile nothing.

# %%
per_row = [xj.SamplingConfig(temperature=temperature) for temperature in (0.0, 1.0, 3.0)]
options = dataclasses.replace(options, logprobs=0, sampling=per_row)
out = xj.generate(model.params, model.config, [prompt] * 3, options, key=jax.random.key(1))
for row, sampling in enumerate(per_row):
    print(f"temperature {sampling.temperature}: {model.tokenizer.decode(out.text_ids(row))!r}")

# %% [markdown]
# ## Limits
#
# - The bundled checkpoint knows capitals and a little small talk. Its texts beyond 72 tokens have no meaning.
# - `xj.generate` needs all prompts at the start of the call. If requests arrive at different times, use
#   [`xj.Engine`](../../xinfer_jax/engine/README.md).
# - `xj.generate` is a function of the host. Inside your own `jax.jit`, use `xj.prefill` and `xj.decode_loop`:
#   see [Rollouts in your own jit](rollouts_in_jit.py).
#
# ## Next
#
# - [Generate text](../../xinfer_jax/generation/README.md) lists all options, and which sampling settings a
#   call follows.
# - [Rollouts in your own jit](rollouts_in_jit.py) generates inside `jax.jit`, and takes gradients.
# - [The curious case of neural text degeneration](https://arxiv.org/abs/1904.09751) (Holtzman et al. 2020)
#   introduces `top_p`, and explains why greedy text repeats itself.
