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
# Fine-tune with LoRA, and serve the adapter

[LoRA](https://arxiv.org/abs/2106.09685) (Hu et al. 2021) trains two small matrices next to each large
matrix of a model, and leaves the model itself as it is. You need it if you want to fine-tune with little
memory, or if you serve many variants of one model, for example one for each customer.

In this tutorial you teach the bundled model the capitals of three imaginary countries. You learn how to:

- make an adapter, and put it into the parameters of a model
- train it with [optax](https://optax.readthedocs.io) in a jitted step
- save it in the format of [PEFT](https://huggingface.co/docs/peft), and load it again
- use it in an engine: each request names its adapter
- serve it over HTTP with the OpenAI API

The tutorial runs offline on a CPU. Read [Generate and score](generate_and_score.py) first. To install what
it needs, run `pip install -e '.[docs]'` in your clone.
"""

# %% [markdown]
# ## Set up
#
# `STEPS` is the number of training steps. To use another number, set the environment variable
# `XINFER_JAX_TUTORIAL_STEPS`.

# %%
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import xinfer_jax as xj

STEPS = int(os.environ.get("XINFER_JAX_TUTORIAL_STEPS", 60))
CAPITALS = {"Atlantis": "Poseidonis", "Utopia": "Amaurot", "Laputa": "Lagado"}

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
questions = [f"What is the capital of {country}?" for country in CAPITALS]
for question in questions:
    print(f"{question} {xj.generate_text(model, question)}")

# %% [markdown]
# The model does not know these countries.
#
# ## The data
#
# Each row of the batch is a prompt and its answer, padded on the right. The prompt comes from
# `xj.encode_prompt`, which applies the chat template, so you train on the same tokens that the server will
# see. The answer ends with the EOS token of the chat format, so the model also learns to stop.
#
# The mask selects the tokens of the answer. Entry `t` of `xj.score` belongs to token `t + 1`, so the mask has
# one column less than the tokens.

# %%
prompts = [xj.encode_prompt(model, question) for question in questions]
answers = [
    tokenizer.encode(f"The capital of {country} is {city}.<|im_end|>") for country, city in CAPITALS.items()
]
num_prompt_B = np.array([len(prompt) for prompt in prompts])
num_tokens_B = num_prompt_B + np.array([len(answer) for answer in answers])
tokens_BT = np.zeros((len(prompts), num_tokens_B.max()), np.int32)
for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    tokens_BT[row, : num_tokens_B[row]] = prompt + answer
index_BT = np.arange(1, tokens_BT.shape[1])[None]  # of the token that an entry of `score` belongs to
mask_BT = (index_BT >= num_prompt_B[:, None]) & (index_BT < num_tokens_B[:, None])
print(f"{tokens_BT.shape[0]} rows of {tokens_BT.shape[1]} tokens, {mask_BT.sum()} of them are trained")

# %% [markdown]
# ## The adapter
#
# `xj.lora.init_adapter` makes an adapter for each matrix of each layer. With rank $r$, it adds
# $\frac{\alpha}{r} B A$ to a matrix. $A$ has $r$ rows, and $B$ has $r$ columns. $B$ begins as zero, so a new
# adapter changes nothing.
#
# An adapter is a pytree. You pass it to `jax.grad` and to optax as it is. To train some matrices only, pass
# their names: `targets=["q", "v"]`.

# %%
adapter = xj.lora.init_adapter(config, jax.random.key(0), rank=8)
num_trained = sum(leaf.size for leaf in jax.tree.leaves(adapter))
num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
print(f"{num_trained:,} trained numbers, {num_params:,} frozen parameters")

# %% [markdown]
# LoRA saves little here, because the matrices are small. A matrix of 4,096 × 4,096 has 16.8 million
# parameters, and its adapter of rank 8 has 65,536.
#
# ## The training step
#
# `xj.lora.with_adapter` returns parameters of the adapted model. You use them in each function that takes
# parameters. The loss differentiates with respect to the adapter only, so the frozen parameters have neither
# gradients nor optimizer state.
#
# `model.params` is an argument of `step`. A jitted function treats an array from the enclosing scope as a
# constant, so it would never see new weights.

# %%
optimizer = optax.adam(1e-2)


def loss(adapter, params):
    adapted = xj.lora.with_adapter(params, adapter)
    logprobs_BT = xj.score(adapted, config, tokens_BT, num_tokens_B).logprobs_BT
    return -jnp.mean(logprobs_BT, where=mask_BT)


@jax.jit
def step(adapter, state, params):
    value, gradient = jax.value_and_grad(loss)(adapter, params)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(adapter, updates), state, value


state = optimizer.init(adapter)
losses = []
for i in range(STEPS):
    adapter, state, value = step(adapter, state, model.params)
    losses.append(float(value))
    if i % 10 == 0 or i == STEPS - 1:
        print(f"step {i}: {losses[-1]:.3f} nats per token")

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
axis.semilogy(losses)
axis.set(xlabel="step", ylabel="loss (nats per token)", title="LoRA on three facts")
show("lora_loss")

# %% [markdown]
# The loss falls quickly, because the model memorizes three facts. If you fine-tune on real data, hold some of
# it out, and plot the loss on that as well.
#
# After all steps the loss stays near 0.26 nats, and not near 0. To find the reason, look at the tokens with
# the lowest log-probability:

# %%
adapted = xj.lora.with_adapter(model.params, adapter)
logprobs_BT = np.asarray(xj.score(adapted, config, tokens_BT, num_tokens_B).logprobs_BT)
for flat in np.argsort(np.where(mask_BT, logprobs_BT, 0), axis=None)[:4]:
    row, entry = np.unravel_index(flat, mask_BT.shape)
    text = tokenizer.token_text(int(tokens_BT[row, entry + 1]))
    print(f"{text!r:8} {logprobs_BT[row, entry]:.2f} nats")

# %% [markdown]
# No country or capital in the training data of the model contains these tokens. The adapter changes the
# layers, but neither the final norm nor the vocabulary matrix, and these two limit the probability of each
# token. For example, no state of the last layer gives the token "apu" more than -3.87 nats. Greedy decoding
# still finds it, because each other token is even less likely. To train the vocabulary matrix as well, add
# `"lm_head"` to `targets`.
#
# ## Save the adapter
#
# `xj.lora.save_adapter` writes the two files of PEFT. Each program that reads this format can load the
# directory, for example PEFT and [vLLM](https://docs.vllm.ai). `xj.lora.load_adapter` reads it back, and
# takes the adapters that PEFT wrote.

# %%
folder = Path(tempfile.mkdtemp())
xj.lora.save_adapter(adapter, config, folder / "capitals")
for file in sorted((folder / "capitals").iterdir()):
    print(f"{file.name}: {file.stat().st_size:,} bytes")
loaded = xj.lora.load_adapter(config, folder / "capitals")
same = jax.tree.map(lambda a, b: bool((a == b).all()), adapter.matrices, loaded.matrices)
print("loaded as it was saved:", all(jax.tree.leaves(same)))

# %% [markdown]
# If you always use this one adapter, merge it: `xj.lora.merge_adapter(model.params, adapter)` returns
# ordinary parameters, and a merged model costs nothing extra at each token. You can save it with
# `xj.save_model`.
#
# ## Use the adapter in an engine
#
# An engine holds several adapters, and each request names the one that it wants. Requests with different
# adapters, or with none, are decoded in the same batch. So one engine serves many fine-tuned models with the
# memory of one.

# %%
options = xj.GenerateOptions(max_tokens=24)
with xj.Engine(model, rows=4, capacity=128, adapters={"capitals": folder / "capitals"}) as engine:
    for question in questions:
        outs = engine.generate([question, question], options, adapter=["capitals", None])
        adapted, plain = (tokenizer.decode(out.text_ids(0)) for out in outs)
        print(f"{question}\n  with the adapter: {adapted}\n  without:          {plain}")

# %% [markdown]
# `engine.add_adapter`, `engine.update_adapter` and `engine.remove_adapter` change the adapters of a running
# engine and compile nothing. [GRPO over an engine](grpo.py) uses `update_adapter` after each training step.
#
# ## Serve the adapter over HTTP
#
# Each `--adapter NAME=PATH` is a model of the OpenAI API. In a terminal you would run:
#
# ```bash
# xinfer-jax serve --port 8000 --adapter capitals=PATH
# ```
#
# Here you start the server as a second process. With `--port=0` the system chooses a free port, and the
# server logs the address when it is ready.

# %%
log = folder / "server.log"
command = [sys.executable, "-m", "xinfer_jax", "serve", "--port=0", "--rows=4", "--capacity=128"]
command.append(f"--adapter=capitals={folder / 'capitals'}")
server = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
while not (found := re.search(r"listening on (http://[\w.:]+)", log.read_text())):
    if server.poll() is not None:
        raise RuntimeError(f"the server did not start: {log.read_text()}")
    time.sleep(0.1)
url = found[1]
print("the server is ready")

# %% [markdown]
# A request names the adapter in the field `model`. This code uses only the standard library. Each client of
# the OpenAI API works too, for example `openai.OpenAI(base_url=f"{url}/v1", api_key="none")`.


# %%
def get(path, body=None):
    """Sends a GET request, or a POST request with a JSON body, and returns the JSON answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


try:
    names = [entry["id"] for entry in get("/v1/models")["data"]]
    print("models:", ", ".join(names))
    for name in names:
        body = {"model": name, "messages": [{"role": "user", "content": questions[0]}], "max_tokens": 24}
        answer = get("/v1/chat/completions", body)
        print(f"{name}: {answer['choices'][0]['message']['content']}")
finally:
    server.terminate()
    print("the server ended with exit code", server.wait(timeout=30))

# %% [markdown]
# ## Limits
#
# - The experts and routers of a mixture, norms, the embedding and the output head cannot have a different
#   adapter for each row. An engine serves such an adapter only if you put it into the model with
#   `xj.lora.with_adapter`.
# - You cannot merge an adapter into a quantized model. Merge it into float parameters, then quantize them.
# - The engine needs the largest rank before it compiles. Pass `max_rank` if you add larger adapters later.
#
# ## Next
#
# - [Adapters in an engine](../../xinfer_jax/engine/README.md) describes versions, updates and limits.
# - [The server](../../xinfer_jax/serve/README.md) describes how an admin adds an adapter to a running server.
# - [sft.py](../examples/sft.py) trains all parameters, with packed texts and checkpoints of
#   [Orbax](https://orbax.readthedocs.io).
# - [QLoRA](https://arxiv.org/abs/2305.14314) (Dettmers et al. 2023) trains an adapter over quantized weights.
#   Here you do the same if you load the model with `xj.load_model(quantize="int8")`.
