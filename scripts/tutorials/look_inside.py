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
# Look inside a model

In this tutorial you read the inner states of a model while it computes an answer, and then you change one
of them. You need this for research on interpretability, for example if you want to find out why a model
gives a wrong answer.

You learn how to:

- plot attention weights as a heat map
- read the output of each layer with taps
- see how an answer forms from layer to layer, with the logit lens
- fit a linear probe to the states of a layer
- find a steering vector by its gradient, and generate with it

You should know the parts of a [transformer](https://arxiv.org/abs/1706.03762) (Vaswani et al. 2017): the
residual stream, attention and the MLP. Read [Generate and score](generate_and_score.py) first. The tutorial
runs offline on a CPU.
"""

# %% [markdown]
# ## Set up
#
# `STEPS` is the number of gradient steps that find the steering vector. To use another number, set the
# environment variable `XINFER_JAX_TUTORIAL_STEPS`.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import xinfer_jax as xj

STEPS = int(os.environ.get("XINFER_JAX_TUTORIAL_STEPS", 40))

plt.rcParams.update({"figure.facecolor": "white"})


def show(name):
    """Shows the current figure, or saves it as NAME.png if the backend has no window."""
    if plt.get_backend().lower() == "agg":
        plt.savefig(f"{name}.png")
    else:
        plt.show()
    plt.close()


model = xj.load_model(dtype="float32")
params = model.params
config = model.config
tokenizer = model.tokenizer

sentence = "The capital of Spain is Madrid."
ids = tokenizer.encode(sentence)
labels = [tokenizer.token_text(i) for i in ids]
tokens_BT = jnp.array([ids])
print(labels)

# %% [markdown]
# ## Attention weights
#
# `xj.attention_weights` returns the attention weights of the layers that you ask for, as a dict with one
# array `[B, heads, T, T]` for each layer. Entry `[b, n, t, s]` is the weight of token `s` for token `t`. Each
# row sums to 1.
#
# The function computes all $T^2$ weights of each head, so use it for short texts.

# %%
layers = range(config.num_hidden_layers)
weights = xj.attention_weights(params, config, tokens_BT, layers)
average_LTT = np.stack([weights[layer][0].mean(axis=0) for layer in layers])
sums = average_LTT.sum(axis=-1)
print(f"{len(weights)} layers, {weights[0].shape[1]} heads, rows sum to {sums.min():.3f} … {sums.max():.3f}")

figure, axes = plt.subplots(1, len(layers), figsize=(12, 3.8), sharey=True, layout="constrained")
for layer, axis in zip(layers, axes, strict=True):
    image = axis.imshow(average_LTT[layer], vmin=0, vmax=1, cmap="viridis")
    axis.set_xticks(range(len(labels)), labels, rotation=70)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_title(f"layer {layer}")
    axis.set_xlabel("attends to token")
axes[0].set_ylabel("from token")
figure.colorbar(image, ax=axes, label="attention weight (mean of heads)")
show("attention")

# %% [markdown]
# The upper triangle is empty, because a token attends only to itself and to the tokens before it. Look at the
# row of " is". At this position the model must choose the city, so a head has to look at the country. Each
# heat map shows the mean of all heads, so look at single heads next:

# %%
country = labels.index(" Spain")
question = labels.index(" is")
for layer in layers:
    strongest = int(np.argmax(weights[layer][0, :, question, country]))
    weight = float(weights[layer][0, strongest, question, country])
    print(f"layer {layer}: head {strongest} gives ' Spain' the weight {weight:.2f} at ' is'")

# %% [markdown]
# ## Read the residual stream
#
# A tap is a point between two layers. `xj.Tap(read=True)` returns the residual stream after a layer.
# `xj.run_model` takes a dict with one tap for each layer, and returns what they read in `.reads`. Layer -1 is
# the embedding. To read between the attention and the MLP of a layer, use a pair as the key, for example
# `(2, "attention")`.

# %%
taps = {layer: xj.Tap(read=True) for layer in range(-1, config.num_hidden_layers)}
reads = xj.run_model(params, config, tokens_BT, taps=taps).reads
for layer, hidden_BTD in reads.items():
    norm = jnp.linalg.norm(hidden_BTD[0], axis=-1).mean()
    print(f"after layer {layer:2}: shape {hidden_BTD.shape}, mean norm {norm:.1f}")

# %% [markdown]
# ## The logit lens
#
# The [logit lens](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens) treats
# the state after each layer as if it were the last one: it applies the final norm and the vocabulary matrix.
# The result is the token that the model would predict if it stopped there.

# %%
lens = {}
for layer, hidden_BTD in reads.items():
    logits_BTV = xj.unembed(params, config, xj.final_norm(params, config, hidden_BTD))
    lens[layer] = jax.nn.softmax(logits_BTV[0], axis=-1)

figure, axis = plt.subplots(figsize=(9, 3.8), layout="constrained")
probability_LT = np.array([p_TV.max(axis=-1) for p_TV in lens.values()])
image = axis.imshow(probability_LT, vmin=0, vmax=1, cmap="viridis", aspect="auto")
for row, p_TV in enumerate(lens.values()):
    for t, token in enumerate(np.asarray(p_TV.argmax(axis=-1))):
        color = "white" if probability_LT[row, t] < 0.6 else "black"
        text = repr(tokenizer.token_text(int(token)))
        axis.text(t, row, text, ha="center", va="center", color=color, fontsize=8)
axis.set_xticks(range(len(labels)), labels)
axis.set_yticks(range(len(lens)), ["embedding", *(f"layer {layer}" for layer in layers)])
axis.set(xlabel="input token", title="Most likely next token after each layer")
figure.colorbar(image, label="its probability")
show("logit_lens")

city = int(ids[question + 1])
for layer, p_TV in lens.items():
    print(f"after layer {layer:2}: {tokenizer.token_text(city)!r} has probability {p_TV[question, city]:.4f}")

# %% [markdown]
# The last row is the prediction of the model itself. Look at the column of " is". This small model finds the
# city already in layer 0, and the later layers make it certain. In a larger model, an answer usually forms in
# later layers.
#
# The first row repeats the input, because the embedding and the vocabulary matrix of this model are the same
# matrix.
#
# ## A linear probe
#
# A [probe](https://arxiv.org/abs/1610.01644) (Alain and Bengio 2016) asks whether a state contains a piece of
# information. You fit a linear function to states with a known label, and test it on others.
#
# Here the label is 1 if the sentence ends with a capital, and 0 if it ends before it. The states of the last
# token are fitted for some countries, and tested on other countries.

# %%
capitals = {
    "Spain": " Madrid", "Cuba": " Havana", "Iraq": " Baghdad", "Japan": " Tokyo", "Peru": " Lima",
    "Italy": " Rome", "Norway": " Oslo", "Egypt": " Cairo", "Kenya": " Nairobi", "Greece": " Athens",
}  # fmt: skip
texts = [f"The capital of {land} is{end}" for land, city in capitals.items() for end in ("", city)]
label_N = np.tile([0.0, 1.0], len(capitals))
probe_layer = 1


@jax.jit
def last_state(params, tokens_1T, num_tokens):
    """Returns the state [D] of the last real token after `probe_layer`."""
    taps = {probe_layer: xj.Tap(read=True)}
    reads = xj.run_model(params, config, tokens_1T, num_tokens_B=num_tokens[None], taps=taps).reads
    return reads[probe_layer][0, num_tokens - 1]


state_ND = np.zeros((len(texts), config.hidden_size))
for n, text in enumerate(texts):
    row = tokenizer.encode(text)
    padded_1T = np.zeros((1, 16), np.int32)  # one length, so one program
    padded_1T[0, : len(row)] = row
    state_ND[n] = last_state(params, padded_1T, jnp.array(len(row)))

train = slice(0, 12)
test = slice(12, None)
weight_D = np.linalg.lstsq(state_ND[train], label_N[train] - 0.5, rcond=None)[0]
right = (state_ND[test] @ weight_D > 0) == (label_N[test] > 0.5)
print(f"the probe is right about {right.sum()} of {len(right)} sentences that it was not fitted to")

# %% [markdown]
# There are more dimensions than examples, so the fit is perfect on its own examples. Only the result on other
# sentences means something. A probe also shows only that the information is there, and not that the model
# uses it. To test that, you have to change the state.
#
# ## Steering
#
# A steering vector is added to the residual stream after one layer ([activation
# addition](https://arxiv.org/abs/2308.10248), Turner et al. 2023). Here you search for a vector that makes
# the model say that the capital of Spain is Havana.
#
# A tap with `edit` replaces the residual stream by the result of a function. `xj.Tap.steer(vector, factor)`
# is the tap that adds `factor * vector`. `xj.score` takes taps and has gradients, so `jax.grad` finds the
# vector. Each step moves by a fixed length along the normalized gradient.

# %%
steer_layer = 1
start = tokenizer.encode("The capital of Spain is")
target = tokenizer.encode(" Havana")


@jax.jit
@jax.value_and_grad
def loss(vector_D, params):
    """Returns the negative log-probability of the target after the start."""
    taps = {steer_layer: xj.Tap.steer(vector_D)}
    logprobs_BT = xj.score(params, config, jnp.array([start + target]), taps=taps).logprobs_BT
    return -logprobs_BT[0, len(start) - 1 :].sum()


vector_D = jnp.zeros(config.hidden_size)
losses = []
for _ in range(STEPS):
    value, gradient_D = loss(vector_D, params)
    losses.append(float(value))
    vector_D -= 2.0 * gradient_D / jnp.linalg.norm(gradient_D)
losses.append(float(loss(vector_D, params)[0]))
print(f"' Havana' cost {losses[0]:.2f} nats before, and {losses[-1]:.2f} nats after {STEPS} steps")

# %% [markdown]
# ### Generate with the vector
#
# Pass the tap in `GenerateOptions`. The factor is an argument of the compiled program, so another factor
# compiles nothing.

# %%
for factor in (0.0, 0.5, 1.0):
    options = xj.GenerateOptions(max_tokens=6, taps={steer_layer: xj.Tap.steer(vector_D, factor)})
    out = xj.generate(params, config, [start], options)
    print(f"factor {factor}: The capital of Spain is{tokenizer.decode(out.text_ids(0))}")

# %% [markdown]
# The plot shows the first token of both answers. The lines cross at the factor from which the model prefers
# the steered answer. With very few steps they do not cross, because the vector is still short.


# %%
@jax.jit
def next_logprobs(params, factor):
    """Returns the log-probabilities [V] of the next token after the start."""
    taps = {steer_layer: xj.Tap.steer(vector_D, factor)}
    logits_BTV = xj.forward(params, config, jnp.array([start]), taps=taps)[0]
    return jax.nn.log_softmax(logits_BTV[0, -1])


factors = np.linspace(0, 1.5, 16)
logprobs_FV = np.array([next_logprobs(params, factor) for factor in factors])
figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
for token in (city, target[0]):
    axis.plot(factors, logprobs_FV[:, token], label=repr(tokenizer.token_text(token)))
axis.set(xlabel="factor", ylabel="log-probability (nats)", title="Steering after layer 1")
axis.grid(alpha=0.3)
axis.legend()
show("steering")

# %% [markdown]
# ## Limits
#
# - Taps need layers that are not stacked. If you have stacked layers, pass the tree of
#   `xj.params.unstack_layers`.
# - Only `xj.run_model` returns what taps read. `xj.score`, `xj.generate` and `xj.decode_loop` take taps that
#   edit.
# - The `edit` function of a tap is a static argument. Define it once, because a new function, for example a
#   new `lambda`, compiles again.
# - An engine takes steering vectors that you give it at the start:
#   `xj.Engine(model, taps={"havana": {1: vector_D}})`. A request then gives the factor.
# - `xj.attention_weights` raises `InputError` for a layer without softmax attention.
#
# ## Next
#
# - [Training](../../xinfer_jax/TRAINING.md) lists the functions that take taps.
# - [The engine](../../xinfer_jax/engine/README.md) describes vectors and logits processors of requests.
# - [The tuned lens](https://arxiv.org/abs/2303.08112) (Belrose et al. 2023) corrects the logit lens for each
#   layer.
