"""Writes AWQ and GPTQ checkpoints, packed bit by bit from known numbers."""

import numpy as np
import tiny

AWQ = dict(
    quant_method="awq", version="gemm", bits=4, group_size=16, zero_point=True, modules_to_not_convert=None
)


GPTQ = dict(quant_method="gptq", bits=4, group_size=16, desc_act=False, sym=False, checkpoint_format="gptq")


V2 = GPTQ | dict(checkpoint_format="gptq_v2")


def pack_words(numbers, bits: int, axis: int, order=range(8)) -> np.ndarray:
    """Packs small unsigned numbers in 32-bit words along an axis. order[i]: the index of the number in the
    i-th lowest bits.
    """
    numbers = np.moveaxis(np.asarray(numbers), axis, -1)
    each = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // each), np.uint32)
    for place in np.ndindex(*words.shape):
        for i in range(each):
            number = int(numbers[place[:-1]][place[-1] * each + list(order)[i]])
            assert 0 <= number < 2**bits
            for bit in range(bits):
                words[place] |= np.uint32(((number >> bit) & 1) << (bits * i + bit))
    return np.moveaxis(words.view(np.int32), -1, axis).copy()


def pack_matrix(settings, random, N, K, g_idx=None, zeros=None, scale_type=np.float16):
    """Returns the tensors of a matrix X without the prefix "X.", and scale * (q - zero), float32 [N, K]."""
    bits = settings["bits"]
    J = settings["group_size"] if settings["group_size"] > 0 else K
    G = -(-K // J)
    q_KN = random.integers(0, 2**bits, (K, N))
    scale_GN = random.uniform(0.5, 1.5, (G, N)).astype(scale_type) / scale_type(2 ** (bits - 1) * np.sqrt(K))
    awq = settings["quant_method"] == "awq"
    v1 = settings.get("checkpoint_format") == "gptq"
    zero_GN = random.integers(0, 2**bits, (G, N)) if zeros is None else np.full((G, N), zeros)
    group_K = np.arange(K) // J if g_idx is None else g_idx
    if awq:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = dict(
            qweight=pack_words(q_KN, 4, 1, order), qzeros=pack_words(zero_GN, 4, 1, order), scales=scale_GN
        )
    else:
        tensors = dict(
            qweight=pack_words(q_KN, bits, 0),
            qzeros=pack_words((zero_GN - v1) % 2**bits, bits, 1),
            scales=scale_GN,
        )
        if g_idx is not None:
            tensors["g_idx"] = np.asarray(g_idx, np.int32)
    exact_KN = scale_GN.astype(np.float32)[group_K] * (q_KN - zero_GN[group_K]).astype(np.float32)
    return tensors, np.ascontiguousarray(exact_KN.T)


def convert(settings, hf=tiny.UNTIED, act_order=False, head=False, **how):
    """Packs all matrices of the layers (and the head). Returns the tensors of the checkpoint, and those of
    the equal float checkpoint.
    """
    random = np.random.default_rng(0)
    stored = {}
    equal = tiny.tensors(hf)
    for name, tensor in equal.items():
        if tensor.ndim == 1 or not ("layers" in name or head and name == tiny.HEAD):
            stored[name] = tensor
            continue
        N, K = tensor.shape
        J = settings["group_size"] if settings["group_size"] > 0 else K
        g_idx = random.permutation(np.arange(K) // J) if act_order else None
        parts, equal[name] = pack_matrix(settings, random, N, K, g_idx, **how)
        stored |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
    return stored, equal


def write(path, settings, hf=tiny.UNTIED, weights=None, **how):
    stored, equal = convert(settings, hf, **how)
    return (
        tiny.write(
            path, hf | dict(quantization_config=settings), weights=stored if weights is None else weights
        ),
        equal,
    )


CASES = {
    "awq": (AWQ, {}),
    "awq-head": (AWQ, dict(head=True)),
    "awq-whole": (AWQ | dict(group_size=-1), {}),
    "awq-last-group-short": (AWQ | dict(group_size=20), {}),
    "awq-bfloat16-scales": (AWQ, dict(scale_type=tiny.DTYPES["bfloat16"])),
    "gptq": (GPTQ, {}),
    "gptq-v2": (V2, {}),
    "gptq-head": (GPTQ | dict(lm_head=True), dict(head=True)),
    "gptq-whole": (GPTQ | dict(group_size=-1), {}),
    "gptq-group-wider-than-the-matrix": (GPTQ | dict(group_size=128), {}),
    "gptq-act-order": (GPTQ | dict(desc_act=True), dict(act_order=True)),
    "gptq-act-order-last-group-short": (V2 | dict(desc_act=True, group_size=20), dict(act_order=True)),
    "gptq-zero-stored-as-15": (GPTQ, dict(zeros=0)),  # AutoGPTQ: (15 + 1) & 15
    "gptq-8": (GPTQ | dict(bits=8, sym=True), dict(zeros=128)),
    "gptq-8-v2-act-order": (V2 | dict(bits=8, sym=True, desc_act=True), dict(zeros=128, act_order=True)),
    "gptq-8-whole": (GPTQ | dict(bits=8, group_size=-1), dict(zeros=128)),
}
