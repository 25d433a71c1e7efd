"""Trains the bundled tiny chat model on train/tiny_data.py and writes it as a Hugging Face checkpoint.

`pip install -e '.[train]'`, then `python scripts/train_tiny.py`: some minutes on two CPU cores. The files are
copied to --output only if the model that is loaded from them answers correctly. The same seed gives the same
weights on one machine with the same versions. Train its draft head again after it, by train_head.py.
"""

from launcher import start

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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from safetensors.numpy import save_file
from train import tiny_data

import xinfer_jax as xj
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf
from xinfer_jax.formats.files import BUNDLED
from xinfer_jax.model.decoder import unembed
from xinfer_jax.model.forward_parts import hidden_states
from xinfer_jax.weights.params import Params

_OUTPUT = flags.DEFINE_string("output", str(BUNDLED), "Directory to write to.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the initial weights and of the conversations.")
_STEPS = flags.DEFINE_integer("steps", 1300, "Training steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 32, "Conversations per step.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Highest learning rate of AdamW.", lower_bound=0)
LEAST = 0.95  # nothing is written if the accuracy of a group of questions is below this

LENGTHS = (48, 72)  # conversations are padded to one of these; the rare longer ones are dropped
TARGETS = 32  # largest number of tokens of a conversation that count for the loss
# Tokens [B, T]; positions whose next token counts [B, W]; 1 for used entries, else 0 [B, W].
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def hf_config(tokenizer) -> dict:
    """Returns the contents of config.json."""
    stop = tokenizer.token_to_id(tiny_data.END)
    pad = tokenizer.token_to_id(tiny_data.END_OF_TEXT)
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
    """Yields an endless stream of batches. Each has conversations of similar length."""
    pending: dict[int, list] = {length: [] for length in LENGTHS}
    for ids, is_target in tiny_data.examples(tokenizer, random.Random(seed)):
        at = np.flatnonzero(is_target) - 1
        length = next((length for length in LENGTHS if len(ids) <= length), None)
        if length is None or len(at) > TARGETS:
            continue
        pending[length].append((ids, at))
        if len(pending[length]) == rows:
            tokens_BT = np.zeros((rows, length), np.int32)
            (at_BW, counts_BW) = np.zeros((2, rows, TARGETS), np.int32)
            for row, (ids, at) in enumerate(pending[length]):
                tokens_BT[row, : len(ids)] = ids
                at_BW[row, : len(at)] = at
                counts_BW[row, : len(at)] = 1
            pending[length] = []
            yield tokens_BT, at_BW, counts_BW


def mean_loss(params: Params, config: xj.ModelConfig, tokens_BT, at_BW, counts_BW) -> jax.Array:
    """Returns the mean cross-entropy of the assistant's tokens. Logits are computed only for them."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT)
    logits_BWV = unembed(params, config, jnp.take_along_axis(hidden_BTD, at_BW[..., None], 1))
    target_BW = jnp.take_along_axis(tokens_BT, at_BW + 1, 1)
    loss_BW = optax.softmax_cross_entropy_with_integer_labels(logits_BWV, target_BW)
    return jnp.sum(loss_BW * counts_BW) / counts_BW.sum()


def train(
    config: xj.ModelConfig, stream: Iterator[Batch], steps: int, learning_rate: float, seed: int
) -> Params:
    """Trains with AdamW, warm-up and cosine decay to 1% of the learning rate. Prints the loss."""
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
            loss = np.mean(jax.device_get(losses))
            print(f"step {step:5}  loss {loss:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
            losses = []
    return params


def write_checkpoint(directory: Path, settings: dict, params: Params) -> None:
    """Writes config.json, generation_config.json and the weights, rounded to bfloat16."""
    specs = file_specs(from_hf(settings))
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
    """Returns the questions of the evaluation: name of the group -> rendered prompts with their right
    answers.
    """

    def render(turns: list[tiny_data.Turn], system: str | None = None) -> list[tuple[str, str]]:
        prefix = [] if system is None else [{"role": "system", "content": system}]
        return [
            (tokenizer.apply_chat_template([*prefix, {"role": "user", "content": question}]), right)
            for question, right in turns
        ]

    groups = {}
    first = tiny_data.evaluation_set(tiny_data.PHRASINGS[0])
    for phrasing in tiny_data.EVALUATION_PHRASINGS:
        turns = tiny_data.evaluation_set(phrasing)
        group = phrasing + (" (phrasing never trained)" if phrasing == tiny_data.HELD_OUT else "")
        groups[group] = render(turns)
        groups[group + ", other system message"] = render(turns, tiny_data.OTHER_SYSTEMS[0])
    groups["system message never trained"] = render(first, tiny_data.HELD_OUT_SYSTEM)
    lower = [(question.lower().rstrip("?"), right) for question, right in first]
    groups["lower case, no question mark"] = render(lower)
    asked = {name: tiny_data.question(tiny_data.PHRASINGS[0], name) for name in tiny_data.ALIASES}
    aliases = [(question, tiny_data.answer(name)) for name, question in asked.items()]
    groups["other names of countries"] = render(aliases)
    talk = tiny_data.SMALL_TALK.items()
    groups["small talk"] = render([(question, reply) for reply, asked in talk for question in asked])
    sentences = [tiny_data.raw_sentence(name) for name in tiny_data.CAPITALS]
    groups["The capital of {c} is, without the chat template"] = [
        (start, end.removesuffix(tiny_data.END_OF_TEXT)) for start, end in sentences
    ]
    return groups


def evaluate(model: xj.Model) -> dict[str, tuple[int, int]]:
    """Returns, for each group of `questions`, the number of greedy answers that are exactly right and end
    with EOS, and the number of questions.
    """
    tokenizer = model.tokenizer
    results = {}
    options = xj.GenerateOptions(max_tokens=32, eos_token_ids=tokenizer.eos_token_ids)
    for group, pairs in questions(tokenizer).items():
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pairs]
        out = xj.generate(model.params, model.config, prompts, options)
        wrong = []
        for (_, right), ids, reason in zip(pairs, out.tokens, out.finish_reason, strict=True):
            answer = tokenizer.decode(ids) if reason == "stop" else None
            if answer != right:
                wrong.append(f"    {right!r}: {answer!r}")
        results[group] = (len(pairs) - len(wrong), len(pairs))
        print(f"{results[group][0]:4} of {len(pairs):3} right  {group}", *wrong[:5], sep="\n", flush=True)
    return results


def main(argv: list[str]) -> None:
    output = Path(_OUTPUT.value).absolute()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="train_tiny_") as name:
        directory = Path(name)
        start = time.process_time()
        tokenizer = tiny_data.train_tokenizer(directory)
        settings = hf_config(tokenizer)
        stream = batches(tokenizer, _SEED.value, _BATCH.value)
        params = train(from_hf(settings), stream, _STEPS.value, _LEARNING_RATE.value, _SEED.value)
        seconds = time.process_time() - start
        write_checkpoint(directory, settings, params)
        results = evaluate(xj.load_model(directory, dtype=jnp.float32))
        if low := {group: f"{n} of {total}" for group, (n, total) in results.items() if n < LEAST * total}:
            sys.exit(f"nothing written, below {LEAST:.0%}: {low}; train with more --steps")
        for file in sorted(directory.iterdir()):
            complete = shutil.copyfile(file, output / f".{file.name}.new")
            os.replace(complete, output / file.name)
        print(f"trained in {seconds / 60:.0f} minutes of CPU time; README.md in {output} has such figures")


if __name__ == "__main__":
    start(main)
