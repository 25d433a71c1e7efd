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
# GRPO over an engine

[GRPO](https://arxiv.org/abs/2402.03300) (group relative policy optimization, Shao et al. 2024) is
reinforcement learning from rewards that a program can compute, for example from the result of a test. For
each prompt you sample a group of answers, and you reward each one. An answer that is better than its group
becomes more likely, and a worse one becomes less likely. GRPO needs no value network.

In this tutorial a model learns to answer with capitals of Asia. You learn how to:

- sample groups of answers with an engine, and get their log-probabilities
- write a reward as a Python function
- write the GRPO loss with `xj.score`: advantage, clipped ratio and KL divergence
- train a LoRA adapter with [optax](https://optax.readthedocs.io), and replace it in the running engine
- check that the engine and the trainer agree

You need this if you train with rewards, for example as with [TRL](https://huggingface.co/docs/trl) and
[vLLM](https://docs.vllm.ai), but in one [JAX](https://docs.jax.dev) process. Read [Fine-tune with
LoRA](lora.py) first. The tutorial runs offline on a CPU.
"""

# %% [markdown]
# ## Set up
#
# `STEPS` is the number of batches that you sample and train on. To use another number, set the environment
# variable `XINFER_JAX_TUTORIAL_STEPS`.

# %%
import os
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import xinfer_jax as xj

STEPS = int(os.environ.get("XINFER_JAX_TUTORIAL_STEPS", 15))
PROMPTS = ["Tell me a capital.", "What is a capital?", "Capital?", "capital"]
SAMPLES = 16  # answers to each prompt: a group
MAX_TOKENS = 24  # of an answer
UPDATES = 2  # gradient steps on each batch
CLIP = 0.2
KL_WEIGHT = 0.02

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

# %% [markdown]
# ## The reward
#
# The reward of an answer is 1 if it is a true sentence about a country in the table, and 0 otherwise. The
# answer must match completely, so the model cannot collect rewards with a list of cities.

# %%
ASIA = {
    "Cambodia": "Phnom Penh",
    "China": "Beijing",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Japan": "Tokyo",
    "Malaysia": "Kuala Lumpur",
    "Mongolia": "Ulaanbaatar",
    "Nepal": "Kathmandu",
    "South Korea": "Seoul",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
}


def reward(text):
    """Returns 1.0 if the text is a true sentence about a country of `ASIA`, else 0.0."""
    found = re.fullmatch(r"The capital of (.+) is (.+)\.", text)
    return float(bool(found) and ASIA.get(found[1]) == found[2])


print(reward("The capital of Japan is Tokyo."), reward("The capital of Japan is Hanoi."), reward("Tokyo"))

# %% [markdown]
# A reward must vary inside a group. If all answers to a prompt get the same reward, their advantages are 0
# and the prompt teaches nothing. These prompts name no country, so the answers of the model differ.
#
# ## Sample groups
#
# `engine.generate` returns one `GenerateOutput` for each prompt. With `n=SAMPLES`, each one has the answers
# of its group, and the prompt is prefilled once. `out.logprobs` has the log-probability of each token.
#
# Pass `SamplingConfig(temperature=1.0)` explicitly. Then no `top_k` or `top_p` of the checkpoint's
# `generation_config.json` cuts the distribution, and the log-probabilities belong to the distribution that
# the engine sampled from.
#
# The trainer needs arrays with a fixed shape, so that it compiles once. Each row of the batch is a prompt and
# an answer. Entry `t` of `sampled_BT` and `mask_BT` belongs to token `t + 1`. The entries of `xj.score` have
# the same order.
#
# `out.adapter_versions` says which version of the adapter sampled each token. The first version is 0, and
# each update adds 1. You need it if the engine samples while you train, because then an answer can have
# tokens of two versions.

# %%
prompts = [xj.encode_prompt(model, prompt) for prompt in PROMPTS]
ROW_TOKENS = max(len(prompt) for prompt in prompts) + MAX_TOKENS
OPTIONS = xj.GenerateOptions(max_tokens=MAX_TOKENS, n=SAMPLES, sampling=xj.SamplingConfig(temperature=1.0))


def sample_batch(engine, key):
    """Returns a batch of arrays for the trainer, the text of each answer, and the adapter's versions."""
    rows = len(prompts) * SAMPLES
    batch = dict(
        tokens_BT=np.zeros((rows, ROW_TOKENS), np.int32),
        num_tokens_B=np.zeros(rows, np.int32),
        mask_BT=np.zeros((rows, ROW_TOKENS - 1), bool),
        sampled_BT=np.zeros((rows, ROW_TOKENS - 1), np.float32),
        reward_B=np.zeros(rows, np.float32),
    )
    outs = engine.generate(prompts, OPTIONS, key=key, adapter="policy")
    texts = []
    for row in range(rows):
        group, answer = divmod(row, SAMPLES)
        prompt = prompts[group]
        out = outs[group]
        tokens = prompt + out.tokens[answer]
        entries = slice(len(prompt) - 1, len(tokens) - 1)
        batch["tokens_BT"][row, : len(tokens)] = tokens
        batch["num_tokens_B"][row] = len(tokens)
        batch["mask_BT"][row, entries] = True
        batch["sampled_BT"][row, entries] = out.logprobs[answer]
        texts.append(tokenizer.decode(out.text_ids(answer)))
        batch["reward_B"][row] = reward(texts[-1])
    versions = {version for out in outs for row in out.adapter_versions for version in row}
    return batch, texts, versions


# %% [markdown]
# ## The loss
#
# GRPO has three parts:
#
# - **Advantage.** The reward of an answer minus the mean of its group, divided by the standard deviation of
#   the group. The constant 0.1 keeps the quotient small if almost all rewards of a group are equal.
# - **Clipped ratio.** The ratio $\pi(a) / \pi_\mathrm{sampled}(a)$ of each token. As
#   [PPO](https://arxiv.org/abs/1707.06347) does, the loss clips it to $[1 - \epsilon, 1 + \epsilon]$. It
#   allows several gradient steps on one batch.
# - **KL divergence.** It keeps the policy near the first model. `xj.score(..., reference=params)` computes
#   the exact KL divergence of each token over the whole vocabulary, not an estimate from the sampled token.
#
# The policy is the model with the adapter, and the reference is the model without it. So both share the same
# parameters in memory. The loss is the mean over all sampled tokens of the batch. The paper takes the mean of
# each answer first.

# %%
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


def loss(adapter, params, batch):
    policy = xj.lora.with_adapter(params, adapter)
    scores = xj.score(policy, config, batch["tokens_BT"], batch["num_tokens_B"], reference=params)
    mask_BT = batch["mask_BT"]
    log_ratio_BT = jnp.where(mask_BT, scores.logprobs_BT - batch["sampled_BT"], 0)
    ratio_BT = jnp.exp(log_ratio_BT)

    reward_GS = batch["reward_B"].reshape(-1, SAMPLES)  # groups, samples
    centered_GS = reward_GS - reward_GS.mean(axis=1, keepdims=True)
    advantage_GS = centered_GS / (reward_GS.std(axis=1, keepdims=True) + 0.1)
    advantage_B1 = advantage_GS.reshape(-1, 1)

    clipped_BT = jnp.clip(ratio_BT, 1 - CLIP, 1 + CLIP)
    gain_BT = jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    kl = jnp.mean(scores.kl_BT, where=mask_BT)
    return KL_WEIGHT * kl - jnp.mean(gain_BT, where=mask_BT), (kl, jnp.abs(log_ratio_BT).max())


@jax.jit
def update(adapter, state, params, batch):
    gradient, (kl, difference) = jax.grad(loss, has_aux=True)(adapter, params, batch)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(adapter, updates), state, kl, difference


# %% [markdown]
# ## The training loop
#
# Each step samples a batch, takes `UPDATES` gradient steps, and gives the new adapter to the engine.
# `engine.update_adapter` compiles nothing. It replaces the adapter between two decode steps, and the next
# batch is sampled with the new one.
#
# In the first gradient step of each batch, the trainer has the same weights as the engine. So the
# log-probabilities of both must agree except for rounding. `difference` is the largest disagreement. If it
# grows in your own loop, look for the reason. For example, the engine has old weights, another temperature,
# or a filter that the trainer does not know.

# %%
adapter = xj.lora.init_adapter(config, jax.random.key(1), rank=8)
state = optimizer.init(adapter)
rewards = []
divergences = []
differences = []
with xj.Engine(model, rows=len(PROMPTS) * SAMPLES, capacity=128, adapters={"policy": adapter}) as engine:
    for step in range(STEPS):
        batch, texts, versions = sample_batch(engine, jax.random.fold_in(jax.random.key(0), step))
        for i in range(UPDATES):
            adapter, state, kl, difference = update(adapter, state, model.params, batch)
            if i == 0:
                differences.append(float(difference))
                divergences.append(float(kl))
        engine.update_adapter("policy", adapter)
        rewards.append(batch["reward_B"].reshape(-1, SAMPLES).mean(axis=1))
        print(
            f"step {step}: adapter versions {versions}, reward {rewards[-1].mean():.3f},"
            f" KL {divergences[-1]:.3f}, difference {differences[-1]:.1e}"
        )

# %% [markdown]
# ## The result
#
# The line is the mean reward of all answers. The band reaches from the prompt with the lowest mean to the
# prompt with the highest mean.

# %%
rewards = np.array(rewards)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(rewards.mean(axis=1), label="mean of all prompts")
left.fill_between(
    range(STEPS), rewards.min(axis=1), rewards.max(axis=1), alpha=0.25, label="range of prompts"
)
left.set(xlabel="step", ylabel="reward (0 to 1)", title="Reward", ylim=(-0.02, 1.02))
left.legend(loc="lower right")
right.plot(divergences, color="C1")
right.set(xlabel="step", ylabel="KL divergence (nats per token)", title="Distance from the first model")
show("grpo")
for text in sorted(set(texts)):
    print(f"{texts.count(text):3} × {text}")

# %% [markdown]
# The reward rises, and the KL divergence rises with it, because the policy moves away from the first model.
#
# Look at the last batch: the model names few countries. A reward that pays for each true sentence does not
# ask for variety, so the policy collapses to the countries that it found first. This is a known effect of
# reinforcement learning. These changes act against it:
#
# - a larger `KL_WEIGHT`
# - an entropy bonus, with `xj.score(..., entropy=True)`
# - a reward that pays less for a country that the group already names
#
# ## Change the experiment
#
# - **Other loss.** [Dr. GRPO](https://arxiv.org/abs/2503.20783) removes the division by the standard
#   deviation and by the length of an answer. [DAPO](https://arxiv.org/abs/2503.14476) clips the two sides
#   differently. Both are a line in `loss`.
# - **All parameters.** Train `model.params` instead of an adapter, and call `engine.update(params)`. Pass
#   `copy=True` if the next training step donates the tree.
# - **Turns with a tool, and sampling during training.** [grpo_engine.py](../examples/grpo_engine.py) samples
#   the next batch while it trains on the last one.
# - **A mesh.** [grpo.py](../examples/grpo.py) divides the rollout and the model over devices, in one jitted
#   program.
#
# ## Limits
#
# - If you sample with `top_p` or `top_k`, the distributions of engine and trainer differ. Record the sampling
#   masks, and pass them to `xj.score(support=...)`. [Training](../../xinfer_jax/TRAINING.md) explains how.
# - In bfloat16 the ratio of the first gradient step is 1 ± 0.1, because sampler and trainer are different
#   programs. The clipped ratio uses the recorded log-probabilities, so it corrects for most of this.
# - A trainer in another process sends weights over TCP: [weights in the
#   engine](../../xinfer_jax/engine/README.md).
#
# ## Next
#
# - [Look inside a model](look_inside.py) shows in which layer an answer forms.
# - [DeepSeek-R1](https://arxiv.org/abs/2501.12948) describes GRPO on a large model.
