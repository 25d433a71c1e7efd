"""An engine as the rollout worker of tunix (`tunix.rl.rollout.base_rollout.BaseRollout`, google-tunix 0.1.7):

    rollout_engine=functools.partial(EngineRollout, model=xj.load_model(path), convert=from_tunix_qwen3)

in its ClusterConfig, with a conversion of trees_of_others.py. Weights are replaced between two steps, without
compiling. If tunix is not installed, the class stands alone, as the program shows.

    python scripts/examples/tunix_rollout.py
"""

from checkout import start

# isort: split
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj

try:
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutOutput
except ImportError:
    BaseRollout = object
    RolloutOutput = SimpleNamespace


class EngineRollout(BaseRollout):
    """Rollouts by an `xj.Engine`, with log-probabilities of the distribution that was sampled from.

    Args:
        model: an `xj.Model`.
        convert: (tunix's parameters as a pure dict, config) -> a tree of this library. None: they are one.
        rollout_actor, tokenizer, mesh, rollout_config: the arguments that tunix gives. The model has its own.
        engine: further arguments of `xj.Engine`, for example rows and capacity.
    """

    def __init__(
        self,
        model,
        convert=None,
        rollout_actor=None,
        tokenizer=None,
        mesh=None,
        rollout_config=None,
        **engine,
    ):
        self.engine = xj.Engine(model, **engine)
        self._convert = convert and jax.jit(partial(convert, config=model.config))
        self._calls = 0

    def generate(self, prompts, rollout_config, **kwargs):
        """Generates answers. Prompts are texts. Tokens of answers have the EOS id."""
        model = self.model()
        ids = [model.tokenizer.encode(prompt) for prompt in prompts]
        width = rollout_config.max_prompt_length
        if max(map(len, ids)) > width:
            raise xj.InputError(f"a prompt of {max(map(len, ids))} tokens: raise max_prompt_length={width}")
        top = rollout_config.top_k or 0
        sampling = dict(temperature=rollout_config.temperature, top_p=rollout_config.top_p or 1.0)
        options = xj.GenerateOptions(
            max_tokens=rollout_config.max_tokens_to_generate,
            sampling=xj.SamplingConfig(**sampling, top_k=max(top, 0)),
            eos_token_ids=rollout_config.eos_tokens,
            logprobs=1,
        )
        self._calls += 1
        seed = rollout_config.seed
        key = jax.random.key(self._calls) if seed is None else jnp.asarray(seed)
        outs = self.engine.generate(ids, options, key=key)
        sampled = [out.alternatives[0] for out in outs]
        tokens = [np.array([token.id for token in row], np.int32) for row in sampled]
        return RolloutOutput(
            text=[model.tokenizer.decode(out.tokens[0]) for out in outs],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=np.array([[self.pad_id()] * (width - len(row)) + row for row in ids]),
            logprobs=[np.array([token.processed_logprob for token in row], np.float32) for row in sampled],
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        """Returns log-probabilities at temperature 1, float32 [B, completion]. They are 0 after EOS. Prompts
        are padded on the left.
        """
        ends = self.pad_id(), self.eos_id()
        model = self.model()
        return _logprobs(model.params, model.config, *ends, prompt_tokens, completion_tokens)

    def update_params(self, params, filter_types=None):
        """Replaces all parameters. A part of them, such as LoRA's, lacks leaves, which the conversion
        names.
        """
        params = params.to_pure_dict() if hasattr(params, "to_pure_dict") else params
        self.engine.update(self._convert(params) if self._convert else params)

    def pad_id(self):
        return self.eos_id()

    def eos_id(self):
        return self.model().config.eos_token_ids[0]

    def model(self):
        return self.engine.model


@partial(jax.jit, static_argnums=(1, 2, 3))
def _logprobs(params, config, pad, eos, prompt_BP, completion_BC):
    C = completion_BC.shape[1]
    padding_B = jnp.argmax(prompt_BP != pad, axis=1)
    is_eos_BC = completion_BC == eos
    answer_B = jnp.where(is_eos_BC.any(1), is_eos_BC.argmax(1) + 1, C)
    prompt_B = prompt_BP.shape[1] - padding_B
    tokens_BT = jnp.concatenate([prompt_BP, completion_BC], axis=1)
    tokens_BT = jax.vmap(jnp.roll)(tokens_BT, -padding_B)
    logprobs_BT = xj.score(params, config, tokens_BT, prompt_B + answer_B).logprobs_BT
    at_BC = jnp.minimum(prompt_B[:, None] - 1 + jnp.arange(C), logprobs_BT.shape[1] - 1)
    return jnp.where(jnp.arange(C) < answer_B[:, None], jnp.take_along_axis(logprobs_BT, at_BC, 1), 0)


# The fields of tunix's RolloutConfig that are used.
CONFIG = SimpleNamespace(
    max_tokens_to_generate=12, max_prompt_length=8, temperature=1.0, top_p=1.0, top_k=None, seed=None,
    eos_tokens=None,
)  # fmt: skip


def main(argv):
    rollout = EngineRollout(xj.load_model(dtype="float32"), rows=2, capacity=64)
    prompts = ["The capital of Spain is", "The capital of"]
    out = rollout.generate(prompts, CONFIG)
    for prompt, text in zip(prompts, out.text, strict=True):
        print(prompt + text)
    longest = max(map(len, out.tokens))
    completion_BC = np.array([[*row] + [rollout.pad_id()] * (longest - len(row)) for row in out.tokens])
    scores_BC = rollout.get_per_token_logps(out.left_padded_prompt_tokens, completion_BC)
    apart = max(np.abs(row - s[: len(row)]).max() for row, s in zip(out.logprobs, scores_BC, strict=True))
    print(f"log-probabilities apart by {apart:.1e}")
    rollout.update_params(jax.tree.map(lambda x: 0.9 * x, rollout.model().params))
    again = rollout.get_per_token_logps(out.left_padded_prompt_tokens, completion_BC)
    print(f"after an update {float(again.sum()):.2f}, before {float(scores_BC.sum()):.2f}")
    rollout.engine.close()


if __name__ == "__main__":
    start(main)
