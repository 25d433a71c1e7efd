"""Loads a model from a checkpoint: opening it finds all shapes, then its leaves are read one by one."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..annotations import Dtype
from ..backends.cpu import cpu_features
from ..config.model_config import ModelConfig
from ..device import run_in_blocks
from ..errors import InputError, format_names
from ..families.conversion import check_leaves
from ..families.draft_heads import LOAD_WITHOUT_HEAD
from ..families.naming import TIED, FileSpec, file_specs
from ..families.skipped_tensors import unused_names
from ..formats.hub import HUB_DEFAULTS, HubOptions, checkpoint_path, is_gguf, split_revision
from ..formats.quantized_formats import KEPT_IF_ASKED, not_kept
from ..formats.scaled_tensor import MatrixFormat, quantized_shapes
from ..formats.tensors import Shape, Tensors, TensorSpec
from ..formats.text_tensors import other_tensors, warn_of_other_tensors
from ..memory_plan import format_mib
from ..ops.operation import without_mesh_context
from ..sampling.sampling_config import SamplingConfig
from ..sampling.typed_settings import SamplingSettings
from ..sharding import MODEL, check_mesh, memory_fraction
from ..tokenization.tokenizer import Tokenizer
from ..weights.layout import shardings
from ..weights.params import Params, activation_dtype, check_weights, resolve_dtype, tree_bytes
from ..weights.quantization import check_activations, check_quantize_method
from ..weights.quantized_weight import is_quantized
from ..weights.resharding import with_repeated_kv_heads
from .directory import open_directory
from .embedding_modules import EmbeddingModules
from .gguf_checkpoint import open_gguf_checkpoint
from .leaf_loader import LeafLoader

FLOATS = {"F32", "F16", "BF16"}


@dataclasses.dataclass
class LoadStats:
    """The time and the memory that one call of `load_model` took.

    Attributes:
        seconds: wall time of opening and reading files, in seconds. Pauses between the two are not counted.
        weight_bytes: bytes of the parameter tree in memory.
        dtype: "float32", "bfloat16" or "float16", or the kind of quantized weights, for example "int8".
        skipped: names of the skipped tensors, for example of an image encoder. Each entry is a pattern with
            the number of tensors that match it.
    """

    seconds: float
    weight_bytes: int
    dtype: str
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A model: parameters, config, tokenizer and defaults.

    `load_model` returns a `Model`. You can also make one from your arrays with `Model(params, config)`. The
    constructor raises `InputError` if leaves are missing, unknown or of a wrong shape, and the message names
    all of them.

    Attributes:
        params: the parameter tree: nested dicts and tuples of arrays or quantized leaves.
        config: the model's shape and settings, with the checkpoint's EOS ids. It is static under `jit`.
        tokenizer: converts text to ids and back. If it is None, functions of text raise `InputError`.
        generation_config: the contents of generation_config.json, or an empty dict. `sampling_config` reads
            it.
        load_stats: the time and the bytes of loading.
        name: the directory or the hub name of the checkpoint, without its revision. It is "bundled" for the
            bundled checkpoint, and "" for a model that you made from arrays.
        embedding: the way in which the checkpoint makes vectors of texts, for `embed_texts`. None: the
            checkpoint does not say.
    """

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_stats: LoadStats = None  # type: ignore[assignment]
    name: str = ""
    embedding: EmbeddingModules | None = None

    def __post_init__(self) -> None:
        check_leaves(self.params, self.config)
        if self.load_stats is None:
            dtype = jnp.dtype(activation_dtype(self.params)).name
            object.__setattr__(self, "load_stats", LoadStats(0.0, tree_bytes(self.params), dtype))

    def sampling_config(self, **settings: Unpack[SamplingSettings]) -> SamplingConfig:
        """Returns the sampling settings of generation_config.json, with your settings in their place.

        Functions of a `Model`, the commands and the server use these settings if a caller gives no others.
        For example, `model.sampling_config(temperature=0.5)` keeps the checkpoint's `top_p`.

        Args:
            settings: fields of `SamplingConfig`. They replace the fields of the file.

        Raises:
            InputError: a name is not a field of `SamplingConfig`, a value is out of range, or the file has a
                setting that is not supported.
        """
        fields = [field.name for field in dataclasses.fields(SamplingConfig)]
        if unknown := [name for name in settings if name not in fields]:
            raise InputError(f"{unknown[0]!r} is no sampling setting: give {', '.join(fields)}")
        defaults = SamplingConfig.from_hf(self.generation_config)
        return dataclasses.replace(defaults, **settings).validate()

    def __repr__(self) -> str:
        tokenizer = "tokenizer" if self.tokenizer else "no tokenizer"
        return f"Model({self.about}, {tokenizer})"

    @property
    def about(self) -> str:
        """One line with the model's type, parameters, bytes, vocabulary and context."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_quantized)
        millions = sum(math.prod(leaf.shape) for leaf in leaves) / 1e6
        stats = self.load_stats
        config = self.config
        parameters = f"{millions:.4g} M parameters in {stats.dtype}, {format_mib(stats.weight_bytes)}"
        sizes = f"vocabulary {config.vocab_size}, context {config.context_length}"
        return f"{config.model_type}, {parameters}, {sizes}"


@dataclasses.dataclass(frozen=True, repr=False)
class Checkpoint:
    """The result of `open_checkpoint`: every shape is known, and the weights are not read yet."""

    model: Model  # as `read` returns it, but the leaves of `params` are `jax.ShapeDtypeStruct`
    _read: Callable[[], Params]

    def read(self) -> Model:
        """Reads the weights. Raises InputError: invalid values, or a file that can no longer be read."""
        start = time.perf_counter()
        params = self._read()
        stats = self.model.load_stats
        stats = dataclasses.replace(stats, seconds=stats.seconds + time.perf_counter() - start)
        return dataclasses.replace(self.model, params=params, load_stats=stats)

    def with_params(self, function: Callable[[Params], Params]) -> "Checkpoint":
        """Returns the checkpoint with the parameters, and their shapes, that a function makes of its
        parameters.
        """
        model = dataclasses.replace(self.model, params=function(self.model.params))
        return Checkpoint(model, lambda: function(self._read()))


@without_mesh_context
def load_model(  # noqa: PLR0913  a public function
    path_or_repo_id: str | Path | None = None,
    dtype: Dtype | None = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    activations: str | None = None,
    *,
    dequantize: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
    draft_head: bool = False,
) -> Model:
    """Loads a Hugging Face checkpoint or a GGUF file, and returns it as a `Model`.

    Without arguments it loads the small bundled checkpoint, so you can try the library offline.

    Quantized matrices keep their stored format if this library has a leaf for it: GGUF, AWQ, GPTQ, AutoRound,
    BitNet, MLX, MXFP4, and the integers of compressed-tensors and bitsandbytes. Matrices in FP8, NVFP4, NF4
    and FP4 become floats on every device, unless you pass `quantize="fp8"` for FP8.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()  # or xj.load_model("Qwen/Qwen2.5-0.5B-Instruct")
        >>> model.config.num_hidden_layers, model.config.vocab_size
        (4, 1920)

    Args:
        path_or_repo_id: a directory with config.json and safetensors files, a name on the hub such as
            ``"owner/name"`` or ``"owner/name@revision"``, or a GGUF file. Functions of text also need
            tokenizer.json in the directory. None loads the bundled checkpoint.
        dtype: the dtype of floats: float32, bfloat16 or float16, whatever the checkpoint has. None chooses
            float32 on a CPU and bfloat16 on other devices. If it is None, matrices in FP8, NVFP4, NF4 and FP4
            become bfloat16.
        quantize: "int8" or "int4" quantizes the matrices while they are loaded, by rounding to nearest. With
            "fp8" the matrices of an FP8 checkpoint stay as they are stored (E4M3, with a scale for each
            matrix, output, or 128 × 128 numbers). "fp8" does not change other matrices, nor matrices whose
            blocks a mesh cuts. None quantizes nothing.
        mesh: a mesh with an axis "model". The parameters, and arrays computed from them, are sharded over
            this axis (see `xj.params.shardings`). Each process reads only the part that its devices hold. If
            the mesh has more devices than the model has key/value heads, the heads are repeated, also in the
            config. None puts all parameters on the default device.
        activations: "int8" also quantizes activations on a CPU, with one scale per token. It needs
            `quantize`. With "int4" matrices, activations are quantized if a call has more than 3 or 4 tokens.
            Prefill and batches are then faster and less accurate. To limit outliers, inputs of weights are
            rotated in blocks (QuaRot, Ashkboos et al. 2024), and products rotate their activations. None
            keeps activations in floats.
        dequantize: True converts the stored quantized matrices to floats, or quantizes them again as
            `quantize` says. Matrices of GGUF files are quantized again without this option too.
        revision: a branch, a tag or a commit of a repository on the hub. Pass a commit to pin the files. None
            takes the default branch.
        token: an access token of the hub. True takes the token of `hf auth login`, and False sends no token.
            None takes the token of `hf auth login` or of the environment variable HF_TOKEN, if there is one.
        subfolder: the folder of the repository, or of the directory, that has the files. "" is its root.
        local_files_only: True takes only files that were downloaded before, and does not ask the hub.
        draft_head: True also reads the head for multi-token prediction (MTP) in the files, for speculative
            decoding. It is then `params["draft_head"]`, and `config.draft_head` describes it. Files of
            Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4.5 have one. A file mtp.safetensors in the directory is
            read too. False leaves the head out.

    Returns:
        A `Model` with parameters, config, tokenizer and the settings of generation_config.json.

    Raises:
        InputError: files are missing, are unreadable or do not fit the config. The message names every such
            tensor.
        InputError: you gave a revision for a directory or a file.
        InputError: `draft_head` is True, and the files have no head, or a head that is not supported.
        InputError: a checkpoint cannot be downloaded.
    """
    hub = HubOptions(revision, token, subfolder, local_files_only)
    checkpoint = open_checkpoint(
        path_or_repo_id,
        dtype,
        quantize,
        mesh,
        activations,
        dequantize=dequantize,
        hub=hub,
        draft_head=draft_head,
    )
    return checkpoint.read()


def open_checkpoint(
    path_or_repo_id: str | Path | None = None,
    dtype: Dtype | None = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    activations: str | None = None,
    *,
    dequantize: bool = False,
    hub: HubOptions = HUB_DEFAULTS,
    draft_head: bool = False,
) -> Checkpoint:
    """Does everything that `load_model` does, except reading the weights. It has the same arguments and
    errors.
    """
    settings = dtype, quantize, mesh, activations
    options: dict[str, Any] = dict(dequantize=dequantize, hub=hub, draft_head=draft_head)
    model, leaves = open_leaves(path_or_repo_id, *settings, **options)
    check_weights(tree_bytes(model.params), memory_fraction(mesh))
    tree = jax.tree.structure(model.params, is_leaf=is_quantized)
    return Checkpoint(model, lambda: jax.tree.unflatten(tree, [leaf for _, leaf in leaves()]))


def open_leaves(
    path_or_repo_id: str | Path | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    activations: str | None = None,
    *,
    dequantize: bool = False,
    hub: HubOptions = HUB_DEFAULTS,
    draft_head: bool = False,
) -> tuple[Model, Callable[[], Iterator[tuple[str, Any]]]]:
    """Returns the model of `open_checkpoint`, and a function that reads the weights one by one. It yields the
    path and the array of each leaf, in the order of the tree. It takes the arguments of `load_model`, and
    raises its errors, but memory for all leaves together is not checked.
    """
    start = time.perf_counter()
    given_dtype = dtype
    dtype = resolve_dtype(dtype)
    asked = quantize if quantize in KEPT_IF_ASKED else None
    check_quantize_method(None if asked else quantize)
    check_activations(activations, quantize)
    path = checkpoint_path(path_or_repo_id, hub=hub)
    if is_gguf(path):
        if draft_head:
            raise InputError(f"{path}: draft heads of GGUF files are not supported: {LOAD_WITHOUT_HEAD}")
        opened = open_gguf_checkpoint(path, quantize, dequantize)
    else:
        opened = open_directory(path, quantize, dequantize, draft_head)
    config = opened.config
    tensors = opened.tensors
    quant_format = opened.quant_format
    matrix_format = opened.matrix_format
    to_floats = matrix_format.find(tensors) if matrix_format and not matrix_format.stays_quantized else {}
    if to_floats and given_dtype is None and quantize in (None, asked):
        dtype = jnp.bfloat16  # as float32 a number of 8 bits would take four times its bytes
    eos_token_ids = tuple(i for i in opened.eos_token_ids if 0 <= i < config.vocab_size)
    cpu_features.fast_matmul_types()  # raises for a wrong environment variable
    config = dataclasses.replace(config, eos_token_ids=eos_token_ids)
    config_of_files = config
    if mesh is not None:
        mesh = check_mesh(mesh)
        config = with_repeated_kv_heads(config, mesh.shape[MODEL])
        shardings(config, mesh)  # raises where the devices do not divide a size
    if config.tie_word_embeddings and TIED[0] not in tensors and TIED[1] in tensors:
        tensors[TIED[0]] = tensors.pop(TIED[1])  # a tied matrix may be stored under either name
    if opened.embedding is not None and TIED[1] not in tensors:  # its head is not saved, and not used
        config = dataclasses.replace(config, tie_word_embeddings=True)
        config_of_files = dataclasses.replace(config_of_files, tie_word_embeddings=True)
    method = None if asked else quantize, quant_format, bool(opened.kept), asked
    loader = LeafLoader(tensors, dtype, *method, mesh, bool(activations))
    structs, read_leaves = _open_params(path, config_of_files, loader, matrix_format)
    leaves = jax.tree.leaves(structs, is_leaf=is_quantized)
    if asked and not any(getattr(leaf, "kept_as", None) == asked for leaf in leaves):
        raise not_kept(asked, path)
    dtype_name = opened.kept or quantize or jnp.dtype(dtype).name
    stats = LoadStats(time.perf_counter() - start, tree_bytes(structs), dtype_name, opened.skipped)
    name = "bundled" if path_or_repo_id is None else split_revision(str(path_or_repo_id))[0]
    texts = opened.tokenizer, opened.generation_config
    return Model(structs, config, *texts, stats, name, opened.embedding), read_leaves


def _open_params(
    path: Path, config: ModelConfig, loader: LeafLoader, matrix_format: MatrixFormat | None
) -> tuple[Params, Callable[[], Iterator[tuple[str, Any]]]]:
    """Returns the parameter tree of a directory's tensors as shapes, and a function that reads its leaves."""
    files = loader.tensors
    quant_format = loader.quant_format
    tensors: Any = matrix_format.with_matrices(files) if matrix_format else files
    specs, tree = _checked_specs(path, config, tensors)
    quantized: list[dict[str, TensorSpec]] = []  # of each leaf, its tensors if the files have it quantized
    expected: dict[str, TensorSpec] = {}
    matrices: dict[str, Shape] = {}  # quantized ones that are read as tensors of floats
    for spec in specs:
        found = quant_format.tensor_specs(spec.hf_name, spec.shape, files) if quant_format else {}
        quantized.append(found)
        shapes = {} if found else spec.tensor_shapes(tensors)
        own = quantized_shapes(shapes, tensors)
        matrices |= own
        expected |= found | {name: (shape, FLOATS) for name, shape in shapes.items() if name not in own}
        for name, shape in own.items():
            expected |= matrix_format.tensor_specs(name, shape, files) if matrix_format else {}
    known = quant_format or matrix_format
    unused = unused_names(config, files)
    unused |= {name for name in files if known and known.is_unused(name, files)}
    others = other_tensors(files.keys() - expected.keys() - unused)
    check_tensors(path, files, expected, unused | others)
    warn_of_other_tensors(path, others)
    if matrix_format:
        tensors |= {name: matrix_format.open(name, shape, files) for name, shape in matrices.items()}
    loader = dataclasses.replace(loader, tensors=tensors)
    structs = list(map(loader.struct, specs, quantized))

    def read_leaves() -> Iterator[tuple[str, Any]]:
        _check_tied(path, config, tensors)
        for spec, found, struct in zip(specs, quantized, structs, strict=True):
            yield spec.name, loader.load(spec, found, struct)

    return jax.tree.unflatten(tree, structs), read_leaves


def _checked_specs(path: Path, config: ModelConfig, tensors: Tensors) -> tuple[list[FileSpec], Any]:
    """Returns all specs, and their tree. Raises InputError if the config has far more tensors than the
    files.
    """
    if config.num_hidden_layers > len(tensors):
        raise InputError(
            f"{path}: num_hidden_layers is {config.num_hidden_layers} in config.json, and the files hold only"
            f" {len(tensors)} tensors: these weights are not of this config"
        )
    specs, tree = jax.tree.flatten(file_specs(config))
    expected = sum(spec.shape[0] for spec in specs if "{}" in spec.hf_name and spec.fused_name not in tensors)
    if expected > 2 * len(tensors):
        raise InputError(
            f"{path}: config.json asks for {expected} tensors of experts, and the files hold only"
            f" {len(tensors)} tensors: these weights are not of this config"
        )
    return specs, tree


def check_tensors(path: Path, tensors: Tensors, expected: dict[str, TensorSpec], unused: set[str]) -> None:
    """Raises one InputError for all missing, unexpected or unfitting tensors."""
    faults = [f"missing {name} {list(shape)}" for name, (shape, _) in expected.items() if name not in tensors]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys() - unused)]
    for name in tensors.keys() & expected.keys():
        tensor = tensors[name]
        (shape, types) = expected[name]
        if tensor.shape != shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        elif tensor.type not in types:
            are_supported = f"{', '.join(sorted(types))} {'are' if len(types) > 1 else 'is'} supported"
            faults.append(f"{name} has type {tensor.type}, only {are_supported}")
    if faults:
        raise InputError(f"{path}: the weights do not fit config.json: {format_names(sorted(faults), 2)}")


def _check_tied(path: Path, config: ModelConfig, tensors: Tensors) -> None:
    """Raises InputError if a tied model's matrix is stored twice with different values."""
    if not config.tie_word_embeddings or not all(name in tensors for name in TIED):
        return
    embedding, head = (tensors[name] for name in TIED)
    same = [embedding.shape == head.shape and getattr(head, "type", None) in FLOATS]
    if all(same):
        rows, width = head.shape
        run_in_blocks(lambda at: same.append(np.array_equal(embedding[at], head[at])), rows, 4 * width)
    if not all(same):
        raise InputError(
            f"{path}: the weights do not fit config.json: tie_word_embeddings is true, but {TIED[1]}"
            f" differs from {TIED[0]}: set tie_word_embeddings to false there to use both, or remove"
            f" {TIED[1]}"
        )
