"""Hostile inputs: each ends the command with exit code 2 and one line on standard error.

A case changes files of a valid checkpoint, the flags, or standard input, and has a pattern of the line.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tiny
from safetensors.numpy import save

BASE_CONFIG, BASE_WEIGHTS = tiny.answering_model(tiny.ANSWER)
NORM = "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIRECTORY = object()  # instead of a file


@dataclasses.dataclass(frozen=True)
class Case:
    """One hostile input."""

    pattern: str  # a regular expression that the line matches
    args: Sequence[str] = ()
    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # contents; None: absent
    stdin: str | bytes | None = None  # None: the prompt is a flag


def config(**changes: Any) -> dict[str, Any]:
    return {"config.json": BASE_CONFIG | changes}


def weights(change: Callable[[bytes], bytes]) -> dict[str, Any]:
    return {WEIGHTS: change(save(BASE_WEIGHTS, metadata={"format": "pt"}))}


def tensors(**changes: Any) -> dict[str, Any]:
    """Returns weights with tensors changed. Two underscores stand for a dot, None removes a tensor."""
    changes = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in (BASE_WEIGHTS | changes).items() if tensor is not None}
    return {WEIGHTS: save(kept)}


def header(entries: Any, data: bytes = b"", length: int | None = None) -> dict[str, Any]:
    """Returns a safetensors file with this header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return {WEIGHTS: (len(text) if length is None else length).to_bytes(8, "little") + text + data}


def _as_float8() -> bytes:
    """Returns weights whose norm is stored as bytes and declared as float8."""
    data = save(BASE_WEIGHTS | {NORM: np.ones(288, np.uint8)})
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def entry(shape: Sequence[int] = (2,), begin: int = 0, end: int = 8, dtype: str = "F32") -> dict[str, Any]:
    return dict(dtype=dtype, shape=list(shape), data_offsets=[begin, end])


def quantized(**settings: Any) -> dict[str, Any]:
    return config(quantization_config=settings)


def tokenizer(**changes: Any) -> dict[str, Any]:
    return {"tokenizer.json": json.loads(tiny.tokenizer().to_str()) | changes}


def template(source: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": {"chat_template": source}}


NUMBERS = ("4", 10**30)
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip

_FIELDS = {
    "layer.types?": "layer_types",
    "rope.(scaling|type)": "rope_scaling",
    "architecture": "architectures",
}

CONFIGS = {
    f"{name}={value!r}"[:60]: Case(name, files=config(**{_FIELDS.get(name, name): value}))
    for name, values in {
        **dict.fromkeys(_SIZES, NUMBERS),
        "rms_norm_eps": (math.nan, math.inf, -1e-6, 0, 10**18, 1e300, "1e-6", [1e-6], None),
        "rope_theta": (math.nan, math.inf, 0, -1e4, 1e-9, 1e300, "1e4", True, {}),
        "max_window_layers": ("2", True, -1, None, 1.5),
        "layer.types?": ("full_attention", [], ["full_attention"] * 9, [None], [["full_attention"]], 1),
        "rope.(scaling|type)": ("linear", [1], dict(type="linear"), dict(type="su"), dict(type=["linear"])),
        "architecture": (["BertModel"], "T5Model", [None], 5),
        "hidden_act": ("relu", None, ["silu"], 1),
        "model_type": (None, 1, ["qwen2"], "gpt2", "x" * 10_000, "\x1b[2J"),
        "tie_word_embeddings": (None, 0, "false"),
        "use_sliding_window": (None, 1, "true"),
    }.items()
    for value in values
} | {
    "layers above the files": Case("num_hidden_layers is 9000", files=config(num_hidden_layers=9000)),
    "layers 10**9": Case("num_hidden_layers", files=config(num_hidden_layers=10**9)),
    "experts above the files": Case(
        "tensors of experts",
        files=config(model_type="qwen3_moe", architectures=None, num_experts=60_000, sliding_window=None),
    ),
    "window 0": Case("sliding_window", files=config(use_sliding_window=True, sliding_window=0)),
    "factor 0": Case("factor", files=config(rope_scaling=dict(type="linear", factor=0))),
    "factor 1e300": Case("factor", files=config(rope_scaling=dict(type="yarn", factor=1e300))),
    "stretched": Case(
        "context", files=config(rope_scaling=dict(type="linear", factor=1e6), max_position_embeddings=10**6)
    ),
    "odd heads": Case("odd", files=config(head_dim=7)),
    "heads that do not divide": Case("multiple", files=config(num_key_value_heads=3)),
    "another vocabulary": Case("has shape", files=config(vocab_size=289)),
    "one layer more": Case("missing model.layers.1", files=config(num_hidden_layers=2)),
    "config is a directory": Case("config.json", files={"config.json": DIRECTORY}),
    "no config": Case("no config.json", files={"config.json": None}),
    **{
        f"config {name}": Case("config.json|size", files={"config.json": content})
        for name, content in {
            "of 5,000 digits": b'{"model_type": "qwen2", "vocab_size": ' + b"9" * 5000 + b"}",
            "with 1e400": json.dumps(BASE_CONFIG).replace("288", "1e400").encode(),
            "empty": b"",
            "list": b"[]",
            "cut": b'{"model_type": "qwen2",',
            "latin-1": '{"model_type": "é"}'.encode("latin-1"),
            "deep": b'{"a":' * 100_000,
            "with NUL": b"\0" * 100,
            "of 10 MB": b"x" * 10**7,
        }.items()
    },
}

_ODD = (math.nan, "0.7", True, [0.7], 10**400)
GENERATION = {
    f"{name}={value!r}"[:60]: Case(name, files={"generation_config.json": {"do_sample": True, name: value}})
    for name, values in {
        "temperature": (*_ODD, -0.1),
        "top_k": (*_ODD, -1, 1.5, 2**31),
        "top_p": (*_ODD, 0, 1.5),
        "min_p": (math.nan, "0", -0.1, 2),
        "typical_p": (math.nan, "1", 0, 2),
        "repetition_penalty": (math.nan, math.inf, "1.1", 0, -1),
        "no_repeat_ngram_size": (math.nan, "2", 1.5, -1, [2]),
        "min_new_tokens": (math.nan, "2", 1.5, -1, 2**40),
        "do_sample": ("false", "true", [], 2),
        "suppress_tokens": ("abc", 5, [None], [1.7], [True], [[1]], ["1"], {}, [-1], [288], [10**30]),
        "eos_token_id": ("2", 1.5, True, [1.5], [[2]], [True], {}, ["a"]),
        "num_beams": (4, "1", 0, math.nan, []),
        "forced_bos_token_id": (0, 5),
        "forced_eos_token_id": (0, "x"),
        "guidance_scale": (0, 1.5, "1"),
        "penalty_alpha": (0.6, "a"),
        "bad_words_ids": (5, [5], [["1"]], [[-1]], [[288]], [[]], [[1] * 9]),
        "stop_strings": (["x"], 1),
        "begin_suppress_tokens": ([1], "a"),
        "sequence_bias": ([[[1], 2.0]], 5),
        "min_length": (5, "a"),
        "encoder_repetition_penalty": (0, 2.0),
        "encoder_no_repeat_ngram_size": (2,),
        "watermarking_config": ({"a": 1},),
        "exponential_decay_length_penalty": ([1, 1.1],),
    }.items()
    for value in values
} | {
    f"generation_config {name}": Case("generation_config.json", files={"generation_config.json": content})
    for name, content in dict(cut=b'{"a"', list=b"[]", latin=b'{"a": "\xff"}', deep=b"[" * 100_000).items()
}

FILES = {
    "no weights": Case("model.safetensors", files={WEIGHTS: None}),
    "weights are a directory": Case("model.safetensors", files={WEIGHTS: DIRECTORY}),
    "header empty": Case("only 0 tensors", files=header({})),
    **{
        name: Case("truncated or no", files=files)
        for name, files in {
            "weights empty": {WEIGHTS: b""},
            "weights of 8 bytes": {WEIGHTS: bytes(8)},
            "weights cut": weights(lambda data: data[:-1]),
            "weights with more": weights(lambda data: data + b"x"),
            "pickle": {WEIGHTS: b"\x80\x04\x95" + bytes(100)},
            "header cut": weights(lambda data: data[:40]),
            "header length 2**63": weights(lambda data: (2**63).to_bytes(8, "little") + data[8:]),
            "header length 2**40": header({}, length=2**40),
            "header not JSON": header(b"nonsense"),
            "header a list": header([]),
            "header deep": header(b'{"a":' * 50_000),
            "header latin-1": header(b'{"\xff": 1}'),
            "offsets overlap": header({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
            "offsets backwards": header({"a": entry(begin=8, end=0)}, bytes(8)),
            "offsets beyond": header({"a": entry(end=2**40)}, bytes(8)),
            "a hole": header({"a": entry(), "b": entry(begin=16, end=24)}, bytes(24)),
            "shape not the bytes": header({"a": entry((3,))}, bytes(8)),
            "shape overflows": header({"a": entry((2**40, 2**40))}, bytes(8)),
            "shape a text": header({"a": dict(entry(), shape="2")}, bytes(8)),
            "dtype unknown": header({"a": entry(dtype="Q4")}, bytes(8)),
        }.items()
    },
    "zero-size tensors": Case("has shape", files=header({name: entry((0,), end=0) for name in BASE_WEIGHTS})),
    "integers": Case("has type I32", files=tensors(model__norm__weight=np.ones(288, np.int32))),
    "float8": Case("has type F8_E4M3", files={WEIGHTS: _as_float8()}),
    "a tensor missing": Case("missing model.norm.weight", files=tensors(model__norm__weight=None)),
    "a tensor more": Case("unexpected", files=tensors(model__layers__0__extra=np.ones(1, np.float32))),
    "10,000 tensors more": Case(
        "and [0-9]+ more", files=header({f"model.layers.{i}.x": entry((0,), end=0) for i in range(10_000)})
    ),
    "a long name": Case(
        "unexpected model.layers.0.xxx",
        files=tensors(**{"model__layers__0__" + "x" * 5000: np.ones(1, np.float32)}),
    ),
    "a name that clears the screen": Case(
        "unexpected model.+x1b", files=tensors(**{"model__layers__0__\x1b[2J\n\r": np.ones(1, np.float32)})
    ),
    "another shape": Case("has shape", files=tensors(model__norm__weight=np.ones((288, 1), np.float32))),
    "beyond float16": Case(
        "beyond float16",
        args=["--dtype=float16"],
        files=tensors(model__norm__weight=np.full(288, 1e30, np.float32)),
    ),
    "two shards, one tensor": Case(
        "two shards hold",
        files={
            WEIGHTS: None,
            "a.safetensors": save(BASE_WEIGHTS),
            "b.safetensors": save({NORM: BASE_WEIGHTS[NORM]}),
            INDEX: dict(weight_map={NORM: "b.safetensors", UP: "a.safetensors"}),
        },
    ),
    "a shard that is a directory": Case(
        "x.safetensors",
        files={
            WEIGHTS: None,
            "x.safetensors": DIRECTORY,
            INDEX: dict(weight_map={NORM: "x.safetensors"}),
        },
    ),
    **{
        f"index {name}": Case("index|is not a file|cannot be opened", files={WEIGHTS: None, INDEX: content})
        for name, content in {
            "cut": b"{",
            "no map": {},
            "map a list": dict(weight_map=[]),
            "map of numbers": dict(weight_map={NORM: 1}),
            "absent shard": dict(weight_map={NORM: "x.safetensors"}),
            "a dot": dict(weight_map={NORM: "."}),
            "NUL": dict(weight_map={NORM: "a\0b"}),
            "a long name": dict(weight_map={NORM: "x" * 5000}),
            "a surrogate": dict(weight_map={NORM: "\ud800"}),
        }.items()
    },
    "a shard outside": Case(
        "outside", files={WEIGHTS: None, INDEX: dict(weight_map={NORM: "/etc/hostname"})}
    ),
    "a shard above": Case(
        "outside", files={WEIGHTS: None, INDEX: dict(weight_map={NORM: "../x/model.safetensors"})}
    ),
    "weights with NaN, quantized": Case(
        "lm_head.weight holds NaN",
        args=["--quantize=int8"],
        files=tensors(lm_head__weight=np.full((288, 288), np.nan, np.float32)),
    ),
    "weights with NaN": Case(
        "row 0, step 0.*NaN or inf", files=tensors(model__norm__weight=np.full(288, np.nan, np.float32))
    ),
}

_AWQ = dict(quant_method="awq", bits=4, group_size=32, version="gemm")
_GPTQ = dict(quant_method="gptq", bits=4, group_size=32)
QUANTIZED = {
    f"quantized {name}": Case(pattern, files=quantized(**settings))
    for name, (pattern, settings) in {
        **{f"bits {bits!r}": ("bits", _GPTQ | dict(bits=bits)) for bits in (3, -4, "4", True, None)},
        **{
            f"group {group!r}": ("group_size", _GPTQ | dict(group_size=group)) for group in (0, 7, "32", None)
        },
        **{
            f"method {method!r}": ("quant_method", dict(quant_method=method))
            for method in ("hqq", None, ["awq"], "x" * 5000)
        },
        **{
            f"blocks {block!r}": ("weight_block_size", dict(quant_method="fp8", weight_block_size=block))
            for block in ([0, 1], [128], "128", [1.5, 2])
        },
        **{
            f"groups {groups!r}": (
                "config_groups",
                dict(quant_method="compressed-tensors", config_groups=groups),
            )
            for groups in ("a", {"a": 1})
        },
        "ours of a later version": ("version", dict(quant_method="xinfer_jax", version=99)),
    }.items()
} | {
    "quantized by a list": Case("quant", files=config(quantization_config=[1])),
    "quantized twice": Case("already quantized", args=["--quantize=int8"], files=quantized(**_AWQ)),
    "quantize_config.json of 3 bits": Case(
        "bits", files={"quantize_config.json": dict(bits=3, group_size=32)}
    ),
    "quantize_config.json cut": Case("quantize_config.json", files={"quantize_config.json": b"{"}),
}

_ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
TOKENIZERS = {
    "no tokenizer": Case("no tokenizer.json", files={"tokenizer.json": None}),
    **{
        f"tokenizer {name}": Case("tokenizer", files={"tokenizer.json": content})
        for name, content in {
            "null": b"null",
            "object": b"{}",
            "latin-1": b"\xff\xfe",
            "deep": b"[" * 50_000,
            "directory": DIRECTORY,
        }.items()
    },
    **{
        f"tokenizer whose {name}": Case("tokenizer", files=tokenizer(**changes))
        for name, changes in {
            "model is unknown": dict(model={"type": "Nope"}),
            "model is a list": dict(model=[]),
            "vocabulary has a negative id": dict(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
            "merge is not there": dict(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
            "vocabulary is empty": dict(model={"type": "BPE", "vocab": {}, "merges": []}),
            "normalizer is unknown": dict(normalizer={"type": "Nope"}),
            "added token has no id": dict(added_tokens=[{"id": "x"}]),
        }.items()
    },
    "tokenizer that cannot encode": Case(
        "cannot encode",
        files=tokenizer(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
    ),
    "tokenizer of endless regex": Case(
        "cannot encode",
        args=["--prompt=" + "a" * 40 + "b"],
        files=tokenizer(pre_tokenizer=_ENDLESS),
    ),
    **{
        f"settings {name}": Case("tokenizer_config.json", files={"tokenizer_config.json": content})
        for name, content in {"a list": b"[]", "latin-1": b'{"\xff": 1}', "a directory": DIRECTORY}.items()
    },
    **{
        f"template {name}": Case("template", files=template(source))
        for name, source in {
            "number": 5,
            "list without default": [{"name": "a", "template": "b"}],
            "unclosed": "{% for m in messages %}",
            "unknown tag": "{% nonsense %}",
            "raises lines": "{{ raise_exception('a\nb\x1b[2J') }}",
            "raises at length": "{{ raise_exception('x' * 5000) }}",
            "divides by zero": "{{ 1 // 0 }}",
            "subclasses": "{{ messages.__class__.__subclasses__() }}",
            "undefined call": "{{ nope() }}",
            "include": "{% include '/etc/passwd' %}",
            "deep": "{{ " + "(" * 1000 + ")" * 1000 + " }}",
        }.items()
    },
    "template surrogate": Case("valid Unicode|template", files=template("{{ '\\ud800' }}")),
    "template empty text": Case("no tokens|empty", files=template("{{ '' }}")),
    "template file latin-1": Case("template", files={"chat_template.jinja": b"\xff"}),
    "template file broken": Case("template", files={"chat_template.jinja": b"{% if %}"}),
    "template bomb": Case("template", files=template("{{ 'a' * 10**10 }}")),
}

FLAGS = {
    " ".join(args)[:60]: Case(pattern, args=args)
    for pattern, *args in [
        ("nope", "--nope=1"),
        ("x1b", "--\x1b[2Jnope"),
        ("model", "--model=/no/such"),
        ("model", "--model=\x1b[2J"),
        ("model", "--model=" + "x" * 5000),
        ("model", "--model=a/b/c"),
        ("model", "--model=/etc/hostname"),
        ("config.json", "--model=/proc"),
        ("/no/such", "--draft=/no/such"),
        ("/dev/null", "--draft=/dev/null"),
    ]
}

PROMPTS = {
    "prompt blank": Case("prompt is empty", args=["--prompt= \n\t\r"]),
    "prompt half a surrogate": Case("valid Unicode", args=["--prompt=a\udcffb"]),
    "system half a surrogate": Case("valid Unicode", args=["--system=\udcff"]),
    "raw half a surrogate": Case("valid Unicode", args=["--raw", "--prompt=\udcff"]),
    "prompt of 1 MB": Case("context limit", args=["--prompt=" + "x" * 10**6]),
    "prompt of 1 MB of spaces and an x": Case("context limit", args=["--prompt=" + " " * 10**6 + "x"]),
    "system of 1 MB": Case("context limit", args=["--system=" + "x" * 10**6]),
    "standard input empty": Case("prompt is empty", stdin=""),
    "standard input latin-1": Case("standard input", stdin=b"caf\xe9"),
    "standard input cut": Case("standard input", stdin="🚀".encode()[:-1]),
    "standard input of 1 MB": Case("context limit", stdin="x" * 10**6),
    "ids outside the vocabulary": Case(
        "outside the vocabulary",
        files=config(vocab_size=200)
        | tensors(**{name: BASE_WEIGHTS[name][:200] for name in (tiny.EMBED, tiny.HEAD)}),
    ),
    **{
        f"a context of 10**9 {flag}": Case(
            "need [0-9,]+ bytes of memory",
            args=[f"--max_tokens={5 * 10**8}", flag],
            files=config(max_position_embeddings=10**9),
        )
        for flag in ("--nouse_cache", "--cache_dtype=int4", "--num_beams=4")
    },
    "10**7 beams": Case("num_beams", args=["--num_beams=10000000"]),
}

CASES = CONFIGS | GENERATION | FILES | QUANTIZED | TOKENIZERS | FLAGS | PROMPTS
