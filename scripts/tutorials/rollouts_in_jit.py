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
# Rollouts in your own jit

A rollout is an answer that you sample in order to train on it, or to measure something. In xinfer_jax,
generation is a `lax.while_loop` over pure functions, so a rollout can be a part of a jitted program that
you write. You need this if you write a training loop, a search or an evaluation in
[JAX](https://docs.jax.dev).

You learn how to:

- write a rollout from `init_cache`, `prefill` and `decode_loop`, and compile it with `jax.jit`
- pass the temperature as a traced argument, so that a new value compiles nothing
- check the sampler against the exact distribution
- sample many answers to one prompt: with rows, and with `jax.vmap`
- measure tokens per second
- take gradients of the log-probabilities of a rollout, also for each row

Read [Generate and score](generate_and_score.py) first. The tutorial runs offline on a CPU.
"""

# %% [markdown]
# ## Set up
#
# `STEPS` is the number of batches that the tutorial samples to check the sampler. To use another number, set
# the environment variable `XINFER_JAX_TUTORIAL_STEPS`.

# %%
import os
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import xinfer_jax as xj

STEPS = int(os.environ.get("XINFER_JAX_TUTORIAL_STEPS", 40))
ROWS = 256  # answers of a batch
MAX_TOKENS = 16  # of an answer

plt.rcParams.update({"figure.facecolor": "white", "axes.grid": True, "grid.alpha": 0.3})


def show(name):
    """Shows the current figure, or saves it as NAME.png if the backend has no window."""
    if plt.get_backend().lower() == "agg":
        plt.savefig(f"{name}.png")
    else:
        plt.show()
    plt.close()


model = xj.load_model(dtype="float32")
config = model.config
tokenizer = model.tokenizer
eos_ids = np.array(config.eos_token_ids)

# %% [markdown]
# ## A rollout
#
# A rollout has three steps:
#
# 1. `xj.init_cache` makes an empty KV cache. Its `capacity` is the most tokens that a row can hold.
# 2. `xj.prefill` appends the prompt to the cache. It returns the logits after the last prompt token.
# 3. `xj.decode_loop` samples until each row has an EOS token or `max_tokens`.
#
# All answers here belong to the same prompt. So prefill the prompt once, and repeat the cache and the logits.
#
# Array names end with their axes: `B` rows, `T` tokens and `V` vocabulary. For example, `tokens_BT` has the
# shape `[B, T]`. The `print` in the function runs only when JAX traces it, so it shows you each compilation.


# %%
@jax.jit
def rollout(params, prompt_1T, key_B, temperature):
    """Samples one answer to the prompt for each key."""
    print("  (jax traces `rollout`)")
    (rows,) = key_B.shape
    num_tokens = prompt_1T.shape[1]
    cache = xj.init_cache(config, rows=1, capacity=num_tokens + MAX_TOKENS)
    logits_1V, cache = xj.prefill(params, config, prompt_1T, jnp.array([num_tokens]), cache)
    logits_BV = jnp.repeat(logits_1V, rows, axis=0)
    sampling = xj.SamplingConfig(temperature=temperature)
    return xj.decode_loop(
        params, config, logits_BV, cache.repeat_rows(rows), key_B, sampling, eos_ids, MAX_TOKENS
    )


prompt_1T = jnp.array([xj.encode_prompt(model, "Tell me a capital.")])
key_B = jax.random.split(jax.random.key(0), 8)
out = rollout(model.params, prompt_1T, key_B, 1.0)
for tokens, length in zip(out.tokens_BT, out.length_B, strict=True):
    print(repr(tokenizer.decode(tokens[:length].tolist())))

# %% [markdown]
# The result has arrays with a fixed shape. `out.tokens_BT` contains the EOS token of each row and 0 after it.
# `out.length_B` is the number of tokens of each row. `out.finished_B` is false for a row that reached
# `max_tokens`.
#
# ## Other values compile nothing
#
# The temperature is a traced argument, so this loop samples at three temperatures with one program: JAX does
# not trace again. You can also pass an array with one temperature for each row. An array has another shape
# than a number, so the first call with an array compiles once.

# %%
for temperature in (0.0, 0.7, 1.5):
    out = rollout(model.params, prompt_1T, key_B, temperature)
    texts = {tokenizer.decode(row[:n].tolist()) for row, n in zip(out.tokens_BT, out.length_B, strict=True)}
    print(f"temperature {temperature}: {len(texts)} different answers of {len(key_B)}")

# %% [markdown]
# A temperature of 0 means greedy decoding, so all answers are equal. You do not need a second program for it.
#
# ## Check the sampler
#
# The distribution of one token is known exactly: it is $\mathrm{softmax}(z / \tau)$ of the logits $z$. So you
# can check the sampler: sample the token many times, and compare frequencies with probabilities.
#
# The answer begins with "The capital of", and the model is unsure about the next token. Put these words into
# the prompt, and sample one token for each key.


# %%
@jax.jit
def next_token_logits(params, prompt_1T):
    """Returns the float32 logits [1, V] after the prompt, and the cache."""
    num_tokens = prompt_1T.shape[1]
    cache = xj.init_cache(config, rows=1, capacity=num_tokens + 1)
    return xj.prefill(params, config, prompt_1T, jnp.array([num_tokens]), cache)


@jax.jit
def sample_next(params, logits_1V, cache, key_B, temperature):
    """Samples the next token of the prompt, once for each key."""
    rows = len(key_B)
    sampling = xj.SamplingConfig(temperature=temperature)
    logits_BV = jnp.repeat(logits_1V, rows, axis=0)
    out = xj.decode_loop(params, config, logits_BV, cache.repeat_rows(rows), key_B, sampling, eos_ids, 1)
    return out.tokens_BT[:, 0]


temperature = 1.5
start = tokenizer.encode("The capital of")
logits_1V, cache = next_token_logits(model.params, jnp.concatenate([prompt_1T, jnp.array([start])], axis=1))
probability_V = np.asarray(jax.nn.softmax(logits_1V[0] / temperature))
count_V = np.zeros(config.vocab_size)
for step in range(STEPS):
    key_B = jax.random.split(jax.random.fold_in(jax.random.key(1), step), ROWS)
    tokens_B = sample_next(model.params, logits_1V, cache, key_B, temperature)
    count_V += np.bincount(tokens_B, minlength=config.vocab_size)
num_draws = STEPS * ROWS
frequency_V = count_V / num_draws

# %% [markdown]
# A frequency is an estimate with a standard error of $\sqrt{p (1 - p) / n}$. If the sampler is right, most
# frequencies are within two standard errors of the probability.

# %%
most_likely = np.argsort(-probability_V)[:12]
p = probability_V[most_likely]
standard_error = np.sqrt(p * (1 - p) / num_draws)
deviations = np.abs(frequency_V[most_likely] - p) / standard_error
print(f"{num_draws} draws, largest deviation: {deviations.max():.1f} standard errors")

labels = [repr(tokenizer.token_text(int(i))) for i in most_likely]
figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
axis.bar(range(len(p)), p, label="probability (softmax of the logits)", color="lightsteelblue")
axis.errorbar(
    range(len(p)), frequency_V[most_likely], 2 * standard_error, fmt="o", color="black", capsize=3,
    label="frequency, with two standard errors",
)  # fmt: skip
axis.set_xticks(range(len(p)), labels, rotation=45)
axis.set(xlabel="token after 'The capital of'", ylabel="probability", title=f"{num_draws} draws")
axis.legend()
show("sampled_distribution")

# %% [markdown]
# ## Rows or vmap?
#
# You can sample many answers in two ways: give `decode_loop` many rows, or write a function for one answer
# and apply `jax.vmap`. Row `i` of a batch uses key `i`, and a mapped call uses its own key. So both ways give
# the same tokens.


# %%
def one_answer(params, key):
    """Returns the tokens [MAX_TOKENS] of one answer."""
    return rollout(params, prompt_1T, key[None], 1.0).tokens_BT[0]


key_B = jax.random.split(jax.random.key(2), 8)
mapped_BT = jax.jit(jax.vmap(one_answer, in_axes=(None, 0)))(model.params, key_B)
batched_BT = rollout(model.params, prompt_1T, key_B, 1.0).tokens_BT
print("vmap gives the same tokens:", bool((mapped_BT == batched_BT).all()))

# %% [markdown]
# Prefer rows. `vmap` of a `while_loop` copies the whole carry of the loop at each step, and the carry
# includes the KV cache. `vmap` also prefills the prompt once for each answer. Use `vmap` if you map over
# something that `decode_loop` does not take for each row, for example over parameters.
#
# ## Tokens per second
#
# A decode step loads all weights once, whatever the number of rows. So more rows give more tokens per second,
# until computation takes longer than loading the weights. Measure the second call, because the first one also
# compiles. `jax.block_until_ready` waits for the result.

# %%
all_rows = [1, 8, 64, 512][:STEPS]
rates = []
for rows in all_rows:
    key_B = jax.random.split(jax.random.key(3), rows)
    jax.block_until_ready(rollout(model.params, prompt_1T, key_B, 1.0))
    seconds = []
    for _ in range(3):
        start_s = time.perf_counter()
        out = jax.block_until_ready(rollout(model.params, prompt_1T, key_B, 1.0))
        seconds.append(time.perf_counter() - start_s)
    rates.append(int(out.length_B.sum()) / min(seconds))
    print(f"{rows:4} rows: {rates[-1]:7.0f} tokens/s")

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
axis.loglog(all_rows, rates, "o-")
axis.set_xticks(all_rows, [str(rows) for rows in all_rows])
axis.minorticks_off()
axis.set(xlabel="rows", ylabel="tokens per second", title=f"Rollouts on {jax.devices()[0].platform}")
show("tokens_per_second")

# %% [markdown]
# The times include the prefill of the prompt. A batch also runs until its last row ends, so the rows that end
# early wait. With many rows, at least one answer is long. This is why the rate falls again for a model as
# small as this one. [Measurements](../bench/README.md) has figures of larger models.
#
# ## Gradients
#
# Sampling has no gradient. The usual way is the [score-function estimator](https://arxiv.org/abs/1906.10652):
# you differentiate the log-probability of the sampled tokens, and multiply it by a reward. This takes two
# steps:
#
# 1. `xj.rollouts.pack_rollout` puts each prompt and its answer into one row. It also returns a mask of the
#    sampled tokens, and their log-probabilities from the rollout.
# 2. `xj.score` computes the log-probabilities again, with gradients in each float parameter.
#
# At temperature 1 without filters, both log-probabilities agree except for rounding.


# %%
@jax.jit
def pack(prompt_1T, out):
    """Returns rows with the prompt and the answer."""
    rows = len(out.tokens_BT)
    prompt_BT = jnp.repeat(prompt_1T, rows, axis=0)
    return xj.rollouts.pack_rollout(prompt_BT, jnp.full(rows, prompt_1T.shape[1]), out)


@jax.jit
def answer_logprob(params, tokens_BT, num_tokens_B, mask_BT):
    """Returns the summed log-probability of each answer."""
    logprobs_BT = xj.score(params, config, tokens_BT, num_tokens_B).logprobs_BT
    return jnp.where(mask_BT, logprobs_BT, 0).sum(axis=1)


key_B = jax.random.split(jax.random.key(4), 8)
packed = pack(prompt_1T, rollout(model.params, prompt_1T, key_B, 1.0))
inputs = packed.tokens_BT, packed.num_tokens_B, packed.mask_BT
scored_B = answer_logprob(model.params, *inputs)
sampled_B = packed.logprobs_BT.sum(axis=1)
print(f"rollout and score differ by at most {jnp.abs(scored_B - sampled_B).max():.1e} nats")

# %% [markdown]
# ### One policy-gradient step
#
# The reward is 1 if the answer names London. The loss is the
# [REINFORCE](https://link.springer.com/article/10.1007/BF00992696) objective with the mean reward as a
# baseline. A small step along the gradient makes the rewarded answers more likely.

# %%
texts = [
    tokenizer.decode(tokens[prompt_1T.shape[1] : n].tolist())
    for tokens, n in zip(packed.tokens_BT, packed.num_tokens_B, strict=True)
]
reward_B = jnp.array([float("London" in text) for text in texts])


@jax.jit
@jax.value_and_grad
def loss(params):
    advantage_B = reward_B - reward_B.mean()
    return -(advantage_B * answer_logprob(params, *inputs)).mean()


value, gradient = loss(model.params)
stepped = jax.tree.map(lambda weight, slope: weight - 1e-3 * slope, model.params, gradient)
rewarded_B = reward_B > 0
change_B = answer_logprob(stepped, *inputs) - scored_B
print(f"reward {reward_B.mean():.2f}")
print(f"rewarded answers: {change_B[rewarded_B].mean():+.3f} nats")
print(f"other answers:    {change_B[~rewarded_B].mean():+.3f} nats")

# %% [markdown]
# ### A gradient for each row
#
# `jax.vmap` of `jax.grad` gives one gradient for each answer. For example,
# [DP-SGD](https://arxiv.org/abs/1607.00133) (Abadi et al. 2016) clips the gradient of each example. You can
# also find the answers that change the model most. Here each gradient is reduced to its norm inside the
# program, so that XLA does not have to return eight gradients.


# %%
def gradient_norm(params, tokens_T, num_tokens, mask_T):
    """Returns the norm of the gradient of one answer's log-probability."""

    def logprob(params):
        return answer_logprob(params, tokens_T[None], num_tokens[None], mask_T[None])[0]

    leaves = jax.tree.leaves(jax.grad(logprob)(params))
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves))


norm_B = jax.jit(jax.vmap(gradient_norm, in_axes=(None, 0, 0, 0)))(model.params, *inputs)
for row in np.argsort(-norm_B):
    print(f"gradient norm {norm_B[row]:8.2f}, log-probability {scored_B[row]:7.2f}  {texts[row]!r}")

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
axis.scatter(-scored_B, norm_B)
axis.set(xlabel="negative log-probability of the answer (nats)", ylabel="gradient norm")
axis.set_title("Unlikely answers have large gradients")
show("gradient_norms")

# %% [markdown]
# An answer that the model finds likely has a small gradient. This is why a policy gradient learns mostly from
# surprising answers, and why training loops clip the norm.
#
# ## Limits
#
# - `decode_loop` has no reverse-mode gradient through log-probabilities or the cache. It raises `InputError`.
#   Use `xj.score`, as above.
# - Under your own `jax.jit` the library sees shapes only, not values. It drops tokens beyond the capacity of
#   the cache, and flags them in `cache.overflow_B`. Outside `jit` it raises `InputError`.
# - A batch ends when its last row ends. If answers have very different lengths, an
#   [engine](../../xinfer_jax/engine/README.md) wastes less time, because it starts another request in a free
#   slot.
#
# ## Next
#
# - [GRPO over an engine](grpo.py) trains with these gradients.
# - [Training](../../xinfer_jax/TRAINING.md) explains rematerialization, packed rows, meshes and sampling
#   masks.
# - [The functional API](../../xinfer_jax/generation/README.md) describes all arguments of `decode_loop`.
