"""Trains the bundled tiny chat model on train_tiny_data.py and writes it as a Hugging Face checkpoint.

`pip install -e '.[train]'`, then `python scripts/train_tiny.py`: some minutes on two CPU cores. Files reach
--output only when the model loaded from them answers rightly. The same seed gives the same weights on one
machine with the same versions.
"""

from one_line import start

# isort: split
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_tiny_data as data
from absl import flags
from safetensors.numpy import save_file

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import BUNDLED
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.model.decoder import hidden_states, unembed
from xinfer_jax.weights.params import Params, param_specs

_OUTPUT = flags.DEFINE_string("output", str(BUNDLED), "Directory to write to.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first weights and of the stream of conversations.")
_STEPS = flags.DEFINE_integer("steps", 1300, "Training steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 32, "Conversations in a step.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Highest learning rate of AdamW.", lower_bound=0)
_LEAST = flags.DEFINE_float(
    "least_accuracy", 0.95, "Write nothing when a group of questions is below this.", lower_bound=0
)

LENGTHS = (48, 72)  # conversations are padded to one of these; the rare longer ones are dropped
WRITTEN = 32  # most tokens of a conversation that the loss is about
# Tokens [B, T], positions that predict [B, W], 1 where one counts [B, W].
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def hf_config(tokenizer) -> dict:
    """The contents of config.json."""
    stop = tokenizer.token_to_id(data.END)
    pad = tokenizer.token_to_id(data.END_OF_TEXT)
    return dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", dtype="bfloat16",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="silu", attention_dropout=0.0, initializer_range=0.02, rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=2048, tie_word_embeddings=True, use_cache=True, use_sliding_window=False,
        sliding_window=None,
        max_window_layers=4, bos_token_id=pad, eos_token_id=stop, pad_token_id=pad,
    )  # fmt: skip


def batches(tokenizer, seed: int, rows: int) -> Iterator[Batch]:
    """Endless stream of batches; each holds conversations of about one length."""
    waiting: dict[int, list] = {length: [] for length in LENGTHS}
    for ids, written in data.examples(tokenizer, random.Random(seed)):
        at = np.flatnonzero(written) - 1
        length = next((length for length in LENGTHS if len(ids) <= length), None)
        if length is None or len(at) > WRITTEN:
            continue
        waiting[length].append((ids, at))
        if len(waiting[length]) == rows:
            tokens_BT = np.zeros((rows, length), np.int32)
            (at_BW, counts_BW) = np.zeros((2, rows, WRITTEN), np.int32)
            for row, (ids, at) in enumerate(waiting[length]):
                tokens_BT[row, : len(ids)] = ids
                at_BW[row, : len(at)] = at
                counts_BW[row, : len(at)] = 1
            waiting[length] = []
            yield tokens_BT, at_BW, counts_BW


def mean_loss(params: Params, config: xj.ModelConfig, tokens_BT, at_BW, counts_BW) -> jax.Array:
    """Cross-entropy of the tokens that the assistant writes; logits are computed for those alone."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT)
    logits_BWV = unembed(params, config, jnp.take_along_axis(hidden_BTD, at_BW[..., None], 1))
    wanted_BW = jnp.take_along_axis(tokens_BT, at_BW + 1, 1)
    loss_BW = optax.softmax_cross_entropy_with_integer_labels(logits_BWV, wanted_BW)
    return jnp.sum(loss_BW * counts_BW) / counts_BW.sum()


def train(
    config: xj.ModelConfig, stream: Iterator[Batch], steps: int, learning_rate: float, seed: int
) -> Params:
    """AdamW with warm-up and a cosine to nearly nothing; prints the loss as it goes."""
    params = xj.init_params(config, jax.random.key(seed), jnp.float32)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, max(1, steps // 20), steps, learning_rate / 100
    )
    adamw = optax.adamw(
        schedule, b2=0.98, weight_decay=0.05, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, *batch):
        loss, gradient = jax.value_and_grad(mean_loss)(params, config, *batch)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    state = optimizer.init(params)
    losses = []
    start = time.perf_counter()
    for step, batch in zip(range(1, steps + 1), stream, strict=False):
        params, state, loss = update(params, state, *batch)
        losses.append(loss)
        if step % 100 == 0 or step == steps:
            print(
                f"step {step:5}  loss {np.mean(jax.device_get(losses)):.4f} "
                f" {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            losses = []
    return params


def write_checkpoint(directory: Path, settings: dict, params: Params) -> None:
    """config.json, generation_config.json and the weights, rounded to bfloat16."""
    specs = param_specs(from_hf(settings))
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16)), params)
    tensors = {
        spec.hf_name: leaf
        for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(rounded), strict=True)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    stop = settings["eos_token_id"]
    pad = settings["pad_token_id"]
    generation = dict(do_sample=False, bos_token_id=pad, pad_token_id=pad, eos_token_id=[stop, pad])
    for name, contents in (("config.json", settings), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def questions(tokenizer: xj.Tokenizer) -> dict[str, list[tuple[str, str]]]:
    """What the model is asked in the end: name of the group -> rendered prompts with their right answers."""

    def chat(turns: list[data.Turn], system: str | None = None) -> list[tuple[str, str]]:
        before = [] if system is None else [{"role": "system", "content": system}]
        return [
            (tokenizer.apply_chat_template([*before, {"role": "user", "content": asked}]), right)
            for asked, right in turns
        ]

    groups = {}
    first = data.evaluation_set(data.PHRASINGS[0])
    for phrasing in data.EVALUATION_PHRASINGS:
        group = phrasing + (" (phrasing never trained)" if phrasing == data.HELD_OUT else "")
        groups[group] = chat(data.evaluation_set(phrasing))
        groups[group + ", other system message"] = chat(data.evaluation_set(phrasing), data.OTHER_SYSTEMS[0])
    groups["system message never trained"] = chat(first, data.HELD_OUT_SYSTEM)
    groups["lower case, no question mark"] = chat(
        [(asked.lower().rstrip("?"), right) for asked, right in first]
    )
    groups["other names of countries"] = chat(
        [(data.question(data.PHRASINGS[0], name), data.answer(name)) for name in data.ALIASES]
    )
    groups["small talk"] = chat(
        [(asked, reply) for reply, texts in data.SMALL_TALK.items() for asked in texts]
    )
    sentences = [data.raw_sentence(name) for name in data.CAPITALS]
    groups["The capital of {c} is, without the chat template"] = [
        (given, end.removesuffix(data.END_OF_TEXT)) for given, end in sentences
    ]
    return groups


def evaluate(model: xj.Model) -> dict[str, tuple[int, int]]:
    """For each group of `questions`: how many greedy answers are exactly right and end there, and how many
    there are.
    """
    tokenizer = model.tokenizer
    found = {}
    options = xj.GenerateOptions(max_new_tokens=32, eos_token_ids=tokenizer.eos_token_ids)
    for group, pairs in questions(tokenizer).items():
        out = xj.generate(
            model.params,
            model.config,
            [tokenizer.encode(text, add_special_tokens=False) for text, _ in pairs],
            options,
        )
        answers = [
            tokenizer.decode(ids) if reason == "eos" else None
            for ids, reason in zip(out.tokens, out.finish_reason, strict=True)
        ]
        wrong = [
            f"    {right!r}: {given!r}"
            for (_, right), given in zip(pairs, answers, strict=True)
            if given != right
        ]
        found[group] = (len(pairs) - len(wrong), len(pairs))
        print(f"{found[group][0]:4} of {len(pairs):3} right  {group}", *wrong[:5], sep="\n", flush=True)
    return found


def model_card(params: Params, seconds: float, found: dict[str, tuple[int, int]]) -> str:
    """README.md of the checkpoint."""
    options = " ".join(f"--{flag.name}={flag.value}" for flag in (_SEED, _STEPS, _BATCH, _LEARNING_RATE))
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "optax", "tokenizers"))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = "\n".join(f"| {group} | {right} of {asked} |" for group, (right, asked) in found.items())
    return f"""---
license: apache-2.0
---
# A tiny chat model for xinfer_jax

Qwen2 architecture, {size:,} parameters in bfloat16. It knows the capitals of countries, a little small talk
and nothing else. Texts of {max(LENGTHS)} tokens at most were trained: what it writes beyond that length
means nothing.

All its data comes from the tables in `scripts/train_tiny_data.py`. Trained by

    python scripts/train_tiny.py {options}

in {seconds / 60:.0f} minutes of CPU time on {os.cpu_count()} cores ({packages}).
Greedy answers that are right to the last character, in float32:

| questions | right |
|---|---|
{rows}

Licence: Apache-2.0."""


def main(argv: list[str]) -> None:
    output = Path(_OUTPUT.value).absolute()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="train_tiny_") as name:
        directory = Path(name)
        start = time.process_time()
        tokenizer = data.train_tokenizer(directory)
        settings = hf_config(tokenizer)
        stream = batches(tokenizer, _SEED.value, _BATCH.value)
        params = train(from_hf(settings), stream, _STEPS.value, _LEARNING_RATE.value, _SEED.value)
        seconds = time.process_time() - start
        write_checkpoint(directory, settings, params)
        found = evaluate(xj.load_model(directory, dtype=jnp.float32))
        if low := {
            group: f"{right} of {asked}"
            for group, (right, asked) in found.items()
            if right < _LEAST.value * asked
        }:
            sys.exit(f"nothing written, below {_LEAST.value:.0%}: {low}; train with more --steps")
        (directory / "README.md").write_text(model_card(params, seconds, found), encoding="utf-8")
        for file in sorted(directory.iterdir()):
            whole = shutil.copyfile(file, output / f".{file.name}.new")
            os.replace(whole, output / file.name)
        print(f"{sum(file.stat().st_size for file in output.iterdir()) / 1e6:.2f} MB in {output}")


if __name__ == "__main__":
    start(main)
