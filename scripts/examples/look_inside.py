"""Looks into a model and changes what it does: a logit lens, a probe, a steering vector found by gradient.

python scripts/examples/look_inside.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from xinfer_jax.model.forward_parts import final_norm

CAPITALS = {"Spain": " Madrid", "Cuba": " Havana", "Yemen": " Sana", "Iraq": " Baghdad"}


def lens(model, text):
    """The token that each layer's state would give, as a table: a line for each layer."""
    params = model.params
    config = model.config
    tok = model.tokenizer
    ids = tok.encode(text)
    taps = {layer: xj.Tap(read=True) for layer in range(config.num_hidden_layers)}
    reads = xj.run_model(params, config, np.array([ids]), taps=taps).reads
    print("     " + " ".join(f"{tok.decode([i])!r:12.12}" for i in ids))
    for layer, hidden_BTD in reads.items():
        logits_TV = xj.unembed(params, config, final_norm(params, config, hidden_BTD)[0])
        tokens = np.asarray(logits_TV.argmax(-1)).tolist()
        print(f"{layer:4} " + " ".join(f"{tok.decode([i])!r:12.12}" for i in tokens))


def steer(model, text, target, layer, steps=31, rate=2.0):
    """A vector that, added after a layer, makes the text continue with a token; and what that then costs."""
    params = model.params
    config = model.config
    tok = model.tokenizer
    tokens_BT = np.array([tok.encode(text + target)])

    @jax.jit
    @jax.value_and_grad
    def loss(vector_D):
        taps = {layer: xj.Tap(vector_D, lambda hidden_BTD, vector_D: hidden_BTD + vector_D)}
        return -xj.score(params, config, tokens_BT, taps=taps).logprobs_BT[0, len(tok.encode(text)) - 1]

    vector_D = jnp.zeros(config.hidden_size)
    for step in range(steps):
        nats, gradient_D = loss(vector_D)
        if step % 10 == 0:
            print(f"step {step}: {target!r} costs {nats:.2f} nats")
        vector_D -= rate * gradient_D / jnp.linalg.norm(gradient_D)
    return vector_D, float(loss(vector_D)[0])


def probe(model, layer):
    """Whether a linear probe tells from a layer's state at the end of a sentence that it names a capital."""
    tok = model.tokenizer
    texts = [
        f"The capital of {land} is{city if named else ''}"
        for land, city in CAPITALS.items()
        for named in (0, 1)
    ]
    states = []
    for text in texts:
        tokens_BT = np.array([tok.encode(text)])
        out = xj.run_model(model.params, model.config, tokens_BT, taps={layer: xj.Tap(read=True)})
        states.append(out.reads[layer][0, -1])
    x_ND = np.array(states)
    y_N = np.tile([-1.0, 1.0], len(CAPITALS))
    weights_D = np.linalg.lstsq(x_ND[:-2], y_N[:-2], rcond=None)[0]
    return np.sign(x_ND[-2:] @ weights_D) == y_N[-2:]


def main(argv):
    model = xj.load_model()
    lens(model, "The capital of Spain is Madrid")
    layer = model.config.num_hidden_layers // 2
    _, nats = steer(model, "The capital of Spain is", " Havana", layer)
    print(f"steered: {nats:.2f} nats")
    print(f"the probe is right about {probe(model, layer).sum()} of 2 sentences that it was not fitted to")


if __name__ == "__main__":
    start(main)
