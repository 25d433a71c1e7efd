"""Your own logits processors in one compiled loop: seven of them, a few lines each.

The rows share a program. The arguments are numbers of each row, traced: others compile nothing.

    python scripts/examples/logits_processors.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj


def keep(kept_BV, logits_BV):
    """Returns the logits of these tokens and of the most likely one."""
    return jnp.where(kept_BV | (logits_BV == logits_BV.max(-1, keepdims=True)), logits_BV, -jnp.inf)


def epsilon(epsilon_B, logits_BV, context):
    """Allows no token below a probability (Hewitt et al. 2022)."""
    return keep(jax.nn.softmax(logits_BV) >= epsilon_B[:, None], logits_BV)


def eta(epsilon_B, logits_BV, context):
    """Uses a smaller least probability if the distribution is flat (Hewitt et al. 2022)."""
    probability_BV = jax.nn.softmax(logits_BV)
    entropy_B = -jnp.sum(jax.scipy.special.xlogy(probability_BV, probability_BV), -1)
    least_B = jnp.minimum(epsilon_B, jnp.sqrt(epsilon_B) * jnp.exp(-entropy_B))
    return keep(probability_BV >= least_B[:, None], logits_BV)


def top_n_sigma(n_B, logits_BV, context):
    """Allows no token more than n standard deviations below the best (Tang et al. 2024)."""
    finite_BV = logits_BV > -jnp.inf
    sigma_B = jnp.std(logits_BV, -1, where=finite_BV)
    return keep(logits_BV >= (logits_BV.max(-1) - n_B * sigma_B)[:, None], logits_BV)


def xtc(settings, logits_BV, context):
    """Sometimes keeps only the least likely of the tokens above a threshold, and the tokens below it."""
    probability_BV = jax.nn.softmax(logits_BV)
    above_BV = probability_BV > settings["threshold"][:, None]
    least_B1 = jnp.where(above_BV, probability_BV, 2).min(-1, keepdims=True)
    happens_B = jax.vmap(jax.random.uniform)(context.key_B) < settings["probability"]
    return jnp.where((probability_BV > least_B1) & happens_B[:, None], -jnp.inf, logits_BV)


def longer_ends(settings, logits_BV, context):
    """Makes EOS tokens likelier with each token after a number of them."""
    over_B = jnp.maximum(context.num_generated_B - settings["start"], 0)
    ends_BV = jnp.any(context.eos_BE[:, :, None] == jnp.arange(logits_BV.shape[1]), 1)
    more_BV = jnp.abs(logits_BV) * (settings["factor"] ** over_B - 1)[:, None]
    return logits_BV + jnp.where(ends_BV & jnp.isfinite(logits_BV), more_BV, 0)


def dry(settings, logits_BV, context):
    """Lowers the token that would repeat a long sequence of tokens. `decode_loop` needs `history_BS`."""
    history_BS = context.history_BS
    B, S = history_BS.shape
    same_BS = (jnp.arange(S) > 0) & (jnp.arange(S) < context.position_B[:, None])
    length_BS = jnp.zeros((B, S), int)  # of what stands before each token and at the end

    def compare(k, carry):
        same_BS, length_BS = carry
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(context.position_B - k, 0)[:, None], 1)
        same_BS &= (jnp.roll(history_BS, k, 1) == last_B1) & (jnp.arange(S) >= k)
        return same_BS, length_BS + same_BS

    _, length_BS = jax.lax.fori_loop(1, S, compare, (same_BS, length_BS))
    length_BV = jnp.zeros(logits_BV.shape, int).at[jnp.arange(B)[:, None], history_BS].max(length_BS)
    allowed_B1 = settings["allowed_length"][:, None]
    penalty_BV = settings["multiplier"][:, None] * settings["base"][:, None] ** (length_BV - allowed_B1)
    return logits_BV - jnp.where(length_BV >= allowed_B1, penalty_BV, 0)


def green_tokens(secret, token_B, vocab_size):
    """Returns bool [B, V]: the half of the vocabulary that a token makes likelier after it."""
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(secret), token_B)
    return jax.vmap(lambda key: jax.random.bernoulli(key, shape=(vocab_size,)))(keys_B)


SECRET = 42
watermark = xj.LogitsProcessor(
    lambda strength_B, context: dict(strength=strength_B, last=jnp.zeros_like(context.position_B)),
    lambda state, logits_BV, context: (
        logits_BV + state["strength"][:, None] * green_tokens(SECRET, state["last"], logits_BV.shape[1])
    ),
    lambda state, token_B, context: state | dict(last=token_B),
)


def watermark_score(tokens, vocab_size):
    """Returns standard deviations by which an answer has more green tokens than chance (Kirchenbauer et al.
    2023).
    """
    green_TV = green_tokens(SECRET, jnp.array([0, *tokens[:-1]]), vocab_size)
    found = np.asarray(green_TV)[np.arange(len(tokens)), tokens].sum()
    return (found - len(tokens) / 2) / np.sqrt(len(tokens) / 4)


FEW_REPEATS = dict(multiplier=0.8, base=1.75, allowed_length=2)
PROCESSORS = {
    "epsilon": (xj.LogitsProcessor(None, epsilon, last=True), 0.05),
    "eta": (xj.LogitsProcessor(None, eta, last=True), 0.05),
    "top-n-sigma": (xj.LogitsProcessor(None, top_n_sigma), 1.0),
    "XTC": (xj.LogitsProcessor(None, xtc, last=True), dict(probability=0.5, threshold=0.1)),
    "ends early": (xj.LogitsProcessor(None, longer_ends), dict(start=4, factor=1.5)),
    "DRY": (xj.LogitsProcessor(None, dry), FEW_REPEATS),
    "watermark": (watermark, 4.0),
}


def main(argv):
    model = xj.load_model()
    tok = model.tokenizer
    ids = tok.encode("Once upon a time")
    for name, processor in PROCESSORS.items():
        cache = xj.init_cache(model.config, 1, 64)
        history_BS = np.zeros((1, 64), np.int32)
        history_BS[0, : len(ids)] = ids
        prompt = np.array([ids]), np.array([len(ids)])
        logits_BV, cache = xj.prefill(model.params, model.config, *prompt, cache)
        settings = (
            jax.random.key(0),
            xj.SamplingConfig(temperature=1.0),
            np.array(model.config.eos_token_ids),
            48,
        )
        how = dict(history_BS=history_BS, processors=[processor])
        done = xj.decode_loop(model.params, model.config, logits_BV, cache, *settings, **how)
        tokens = np.asarray(done.tokens_BT)[0, : done.length_B[0]].tolist()
        score = watermark_score(tokens, model.config.vocab_size)
        print(f"{name}: {tok.decode(tokens)!r} (watermark: {score:.1f})")


if __name__ == "__main__":
    start(main)
