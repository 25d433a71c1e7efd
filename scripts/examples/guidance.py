"""Three ways to guide an answer: classifier-free guidance, contrastive decoding, biases of sequences.

python scripts/examples/guidance.py
"""

from checkout import start

# isort: split
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj


def guide(scale_B, logits_BV, context):
    """Applies classifier-free guidance (Sanchez et al. 2023): both rows of a pair get the log-probabilities
    of the second row, plus a scale times the difference of the first row from them.
    """
    logprobs_BV = jax.nn.log_softmax(logits_BV)
    from_BV = logprobs_BV[1::2]
    return jnp.repeat(from_BV + scale_B[::2, None] * (logprobs_BV[::2] - from_BV), 2, 0)


def draw_for_pairs(key_B, logits_BV, context):
    """Returns one draw for each pair: with their own positions the two rows would draw different tokens."""
    return jnp.repeat(jax.vmap(jax.random.categorical)(key_B[::2], logits_BV[::2]), 2)


def contrast(expert_BV, amateur_BV, least=0.1):
    """Returns how much likelier each token is to an expert than to an amateur (Li et al. 2022). Tokens with
    less than this part of the expert's largest probability are excluded.
    """
    expert_BV = jax.nn.log_softmax(expert_BV)
    plausible_BV = expert_BV >= expert_BV.max(-1, keepdims=True) + jnp.log(least)
    return jnp.where(plausible_BV, expert_BV - jax.nn.log_softmax(amateur_BV), -jnp.inf)


@functools.partial(jax.jit, static_argnames=("configs", "size"))
def contrastive_tokens(trees, configs, tokens_BT, num_tokens_B, eos_ids, size):
    """Returns, int32 [B, size], greedy answers of an expert less an amateur. They are -1 after all rows have
    ended.
    """
    B, T = tokens_BT.shape

    def prefill(params, config):
        cache = xj.init_cache(config, B, T + size)
        return xj.prefill(params, config, tokens_BT, num_tokens_B, cache)

    def step(carry):
        i, out_BN, after = carry
        token_B = contrast(*(logits_BV for logits_BV, _ in after)).argmax(-1)
        models = zip(trees, configs, after, strict=True)
        after = [xj.decode_step(params, config, token_B, cache) for params, config, (_, cache) in models]
        return i + 1, out_BN.at[:, i].set(token_B), after

    def continues(carry):
        return (carry[0] < size) & ~jnp.isin(carry[1], eos_ids).any(-1).all()

    begun = 0, jnp.full((B, size), -1), [*map(prefill, trees, configs)]
    return jax.lax.while_loop(continues, step, begun)[1]


def sequence_biases(bias_by_sequence, rows):
    """Returns arguments of `sequence_bias`, for rows alike."""
    longest = max(map(len, bias_by_sequence))
    ids_WL = np.array([[-1] * (longest - len(ids)) + [*ids] for ids in bias_by_sequence])
    bias_W = np.array([*bias_by_sequence.values()], np.float32)
    return dict(ids=np.tile(ids_WL, (rows, 1, 1)), bias=np.tile(bias_W, (rows, 1)))


def sequence_bias(given, logits_BV, context):
    """Adds a bias to the last token of each sequence if the text ends in the other tokens."""
    ids_BWL = given["ids"]
    B, _, L = ids_BWL.shape
    index_BL = context.position_B[:, None] - jnp.arange(L - 1, 0, -1)
    last_BL = jnp.take_along_axis(context.history_BS, jnp.maximum(index_BL, 0), 1)
    last_BL = jnp.where(index_BL < 0, -2, last_BL)
    same_BWL = (ids_BWL[:, :, :-1] == last_BL[:, None]) | (ids_BWL[:, :, :-1] < 0)
    bias_BW = jnp.where(same_BWL.all(-1), given["bias"], 0)
    return logits_BV.at[jnp.arange(B)[:, None], ids_BWL[:, :, -1]].add(bias_BW)


def main(argv):
    model = xj.load_model()
    params = model.params
    config = model.config
    tok = model.tokenizer
    eos_ids = np.array(config.eos_token_ids)
    texts = ["The capital of Spain is", "The capital of Cuba is"]
    ids = [tok.encode(text) for text in texts]
    num_tokens_B = np.array([*map(len, ids)])
    history_BS = np.array([row + [0] * (32 - len(row)) for row in ids])
    tokens_BT = history_BS[:, : num_tokens_B.max()]

    def decode(temperature=0.0, **how):
        cache = xj.init_cache(config, len(ids), 32)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
        settings = jax.random.key(0), xj.SamplingConfig(temperature=temperature), eos_ids, 16
        done = xj.decode_loop(params, config, logits_BV, cache, *settings, history_BS=history_BS, **how)
        return words(done.tokens_BT)

    def words(tokens_BN):
        rows = np.asarray(tokens_BN).tolist()
        return [tok.decode([*itertools.takewhile(lambda token: token not in eos_ids, row)]) for row in rows]

    for scale in (0.0, 1.0, 2.0):
        print(f"scale {scale}:", decode(processors=[(xj.LogitsProcessor(None, guide), scale)]))
    print("drawn:", decode(1.0, processors=[(xj.LogitsProcessor(None, guide), 0.5)], sample=draw_for_pairs))
    few = config.num_hidden_layers // 2  # the amateur: half of the expert
    amateur = dataclasses.replace(config, num_hidden_layers=few, layers=config.layers[:few])
    trees = params, params | dict(layers=params["layers"][:few])
    tokens_BN = contrastive_tokens(trees, (config, amateur), tokens_BT, num_tokens_B, eos_ids, 16)
    print("contrastive:", words(tokens_BN))
    unlikely = sequence_biases({tuple(tok.encode(" Madrid")): -20.0}, len(ids))
    print("another city:", decode(processors=[(xj.LogitsProcessor(None, sequence_bias), unlikely)]))


if __name__ == "__main__":
    start(main)
