"""The structure of the code: imports point one way, public names are documented, words are the field's."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from paths import ROOT

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

# A module imports only modules that come before it. A new module is added here, after all that it imports.
PACKAGES = {
    "": (
        "errors", "modes", "signing", "formatting", "checks", "caller_functions", "memory", "device_defaults",
        "host", "stats", "plugins",
    ),
    "sharding": (),
    "ops": ("operation", "largest", "product", "forms", "row_groups"),
    "ops.cpu": ("cpu_features", "product_table", "cpu_products", "cpu_sampler"),
    "ops.tpu": ("tpu_products", "tpu_embedding"),
    "config": ("rope", "layer_spec", "model_config", "unsupported"),
    "weights": (
        "weight_leaf", "param_specs", "linear_attention_specs", "params", "hadamard", "stacking", "layout",
        "quantized_weight", "adapted_weight", "padded_weight", "ternary", "mxfp4", "rotated_weight",
        "int8_weight", "grouped_weight", "fp8_weight", "dequantization", "quantization",
        "device_quantization", "resharding", "params_like",
    ),
    "families": (
        "family", "values", "layer_fields", "rope_settings", "llama", "qwen", "olmo", "gemma", "gemma4",
        "phi3", "bitnet", "mixtral", "exaone4", "granite", "gpt_oss", "hybrids", "naming", "wrappers",
        "reading", "writing", "skipped_tensors", "conversion",
    ),
    "cache": (
        "stored_kv", "layer_cache", "contiguous", "ring", "kv_cache", "quantized_kv", "gear", "float8_kv",
        "side_by_side", "page_size", "paged", "recurrent", "fingerprint", "prefix", "prefix_files",
    ),
    "model": (
        "layers", "rope_scaling", "key_bias", "attention", "rope_append", "linear_attention", "experts",
        "decoder_layer", "stacked_layers", "packing", "routes", "taps", "decoder", "attention_maps",
    ),
    "sampling": (
        "processors", "biases", "sampling_config", "batched_settings", "context",
        "random_keys", "xtc_dry", "sampler", "logprobs", "caller_processors",
    ),
    "ops.mesh": (),
    "ops.auto_axes": (),
    "tool_calls": (
        "call_parser", "json_scanner", "json_values", "parameter_types", "json_call", "gemma_call",
        "xml_call", "tool_call_parser", "reasoning", "harmony", "tool_messages", "answer_parser",
        "call_grammar",
    ),
    "grammar": (
        "vocabulary", "regex_parser", "byte_automaton", "token_automaton", "automaton", "token_masks",
        "compiler", "matcher", "schema_unions", "served_schemas", "grammars", "worker", "turns", "pool",
    ),
    "compress": ("gptq", "awq"),
    "generation": (
        "state", "executor", "strategies", "loop", "executor_choice", "speculation", "beam_steps",
        "functional", "rollouts", "options", "validation", "output_checks", "batch_arrays", "batch_matchers",
        "drafting", "score_masks", "scoring", "beams", "batch_generator", "entrypoints",
    ),
    "ops.gpu": ("cudnn_attention", "top_k", "reductions", "gpu_sampler"),
    "ops.expert_tiles": (),
    "ops.cpu.layer_forms": (),
    "ops.kernels": (
        "attention_kernels", "product_kernels", "append_kernels", "expert_kernels", "delta_kernels", "head",
    ),
    "ops.gpu.verify": (),
    "generation.kernels": (),
    "layerwise": ("precompile", "layer_programs", "layerwise_executor"),
    "checkpoint": (
        "other_formats", "files", "template_files", "template_budget", "chat_template", "template_tools",
        "token_coverage", "template_content", "response_template", "template_splitter", "tokenizer_limits",
        "tokenizer_classes", "tokenizer", "escaping", "conversation", "tool_choice", "detokenizer",
        "answer_detokenizer",
        "tensors", "text_tensors", "tensor_files", "own_format", "bitnet_format",
        "scaled_tensor", "kept_leaves", "awq_gptq_format", "awq_gptq_settings", "bitsandbytes_format",
        "mxfp4_format", "fp8_format", "nvfp4_format", "mlx_format",
        "compressed_tensors_packing", "compressed_tensors_format", "quantized_formats",
        "gguf_file", "gguf_format", "sharded_leaves", "leaf_loader", "embedding_modules", "directory",
        "gguf_tensors", "gguf_tokenizer", "gguf_keys", "gguf_checkpoint", "loading", "saving",
    ),
    "adapters": ("adapter", "fitted_adapter", "adapted_params", "peft_config", "peft_modules", "peft_files"),
    "text": (),
    "embedding": (),
    "reranking": (),
    "testing": (),
    "engine": (
        "clients", "pages", "row", "host_tier", "prefix_cache", "scheduler", "pacing", "shape",
        "device_programs", "held_processors", "held_vectors", "host_pages", "adapter_stack", "device",
        "layerwise_device", "warm_up", "messages", "page_transfer", "controller", "requests",
        "statistics", "page_files", "page_tiers",
        "weight_switch", "core", "pausing", "async_sampling", "weight_updates", "held_adapters",
        "replay", "routing", "endpoint", "dispatcher", "submission", "engine_loop", "engine", "engines",
    ),
    "api": (
        "other_servers", "fields", "sampling_fields", "grammar_fields", "tool_fields", "prompts", "bodies",
        "responses", "score_body", "embedding_body", "rerank_body",
    ),
    "batch": ("input_lines", "resumable_output", "line_request", "run_settings", "run_batch", "dataset"),
    "cli": (
        "terminal", "process", "flag_parser", "process_group", "channel", "coordinator", "supervisor",
        "startup", "answer", "chat", "answer_flags", "batch", "chat_flags", "batch_flags",
    ),
    "serve": (
        "server_settings", "http_responses", "metrics", "page", "ip_addresses", "framing", "connections",
        "http_server", "arrivals", "admission", "request_body", "worker_pool", "json_encoding", "chunks",
        "peer_messages", "peer_worker", "peer_front", "served_request", "service",
        "text_endpoints", "adapter_endpoints", "app", "command",
    ),
}  # fmt: skip
ORDER = [
    ".".join(filter(None, (package, name))) for package, names in PACKAGES.items() for name in names or ("",)
]
LIBRARY = ROOT / "xinfer_jax"
FOLDERS = sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
MODULES = sorted(
    ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
    for path in LIBRARY.rglob("*.py")
    if path.name != "__init__.py"
)
PROGRAMS = sorted(
    path for folder in ("xinfer_jax", "kernels_pallas", "scripts") for path in (ROOT / folder).rglob("*.py")
)


def imported(path: Path, package: str) -> set[str]:
    """Returns the dotted names that a file imports, also inside functions; relative names made absolute."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def imported_modules(name: str) -> set[str]:
    """Returns the modules of xinfer_jax that a module of xinfer_jax imports, other than for annotations."""
    path = LIBRARY.joinpath(*name.split(".")).with_suffix(".py")
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if getattr(getattr(node, "test", None), "id", "") != "TYPE_CHECKING"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*name.split(".")[: -node.level], *(node.module or "").split(".")]
            names |= {".".join(filter(None, (*base, alias.name))) for alias in node.names}
            names.add(".".join(filter(None, base)))
    return names & {*MODULES}


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) == {*ORDER, "__main__"}


@pytest.mark.parametrize("package", FOLDERS)
def test_every_package_says_what_it_is_for(package):
    text = ast.get_docstring(ast.parse((LIBRARY / package / "__init__.py").read_text(encoding="utf-8")))
    assert len(text or "") > 200
    assert len((text or "").splitlines()) <= 25
    assert not [name for name in PACKAGES[package] if f"`{name}`" not in text]
    # Importing a package loads none of its modules.
    assert not imported(LIBRARY / package / "__init__.py", "")


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name):
    assert imported_modules(name) <= set(ORDER[: ORDER.index(name)])
    outside = imported(LIBRARY.joinpath(*name.split(".")).with_suffix(".py"), "")
    assert "xinfer_jax" not in outside  # only by relative names, module by module
    if name != "testing":
        assert not {"torch", "transformers", "optax"} & {name.split(".")[0] for name in outside}


def test_no_module_has_the_name_of_a_public_function():
    """Or `xinfer_jax.name` would be one or the other, as what was imported first decides."""
    assert not {name.split(".")[-1] for name in MODULES} & set(xj.__all__)


@pytest.mark.parametrize("name", ORDER)
def test_private_attributes_are_used_where_they_are_defined(name):
    """`x._name` is of the object itself, or `_name` is defined in this module."""
    tree = ast.parse(LIBRARY.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    known = {"_replace", "_asdict", "_fields", "_exit"}  # public, in spite of their names
    known |= {node.name for node in nodes if isinstance(node, DEFINED)}
    used = []
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            known.add(node.attr)
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            used.append((ast.unparse(node.value), node.attr))
    assert not [x for x in used if x[0] not in ("self", "cls", "super()") and x[1] not in known]


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_pallas").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_stand_alone(path):
    assert not {name for name in imported(path, "kernels_pallas") if name.split(".")[0] == "xinfer_jax"}


def test_programs_start_in_one_way():
    """A program with flags imports scripts/launcher.py first: it finds the package, and handles Ctrl-C and
    wrong flags. The examples import it by checkout.py.
    """
    trees, examples = (
        {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "scripts").glob(pattern)}
        for pattern in ("*.py", "examples/*.py")
    )
    del examples["checkout"]
    flagged = {name for name, tree in trees.items() if "flags.DEFINE_" in ast.unparse(tree)}
    # check_gpu and check_tpu check for packages first, and print a table at Ctrl-C.
    assert {"bench", "compare_programs", "perplexity", "quantize", "train_tiny"} <= flagged
    for name in flagged | {"chat", "generate"}:
        first = next(node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom))
        assert "launcher" in ast.unparse(first), name
    for name, tree in examples.items():
        assert ast.unparse(tree.body[1]) == "from checkout import start", name
        assert ast.unparse(tree.body[-1].body) == "start(main)", name
    for name in flagged:
        assert ast.unparse(trees[name].body[-1].body) == "start(main)", name
        names = {node.id for node in ast.walk(trees[name]) if isinstance(node, ast.Name)}
        assert not {"app", "exit_with_error"} & names, f"{name}: raise InputError: launcher.start prints it"


@pytest.mark.parametrize("name", xj.__all__)
def test_public_name_is_documented(name):
    """The signature that a dataclass gets for a docstring is not enough."""
    text = inspect.getdoc(getattr(xj, name)) or ""
    assert text.strip() and not text.startswith(f"{name}(")


def test_public_names_are_sorted_and_complete():
    assert xj.__all__ == sorted(xj.__all__)
    tree = ast.parse((ROOT / "xinfer_jax" / "__init__.pyi").read_text(encoding="utf-8"))
    relative = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in xj._EXPORTS)
    assert {node.module: tuple(alias.name for alias in node.names) for node in relative} == xj._EXPORTS


def test_importing_the_package_loads_no_jax():
    program = "import sys, xinfer_jax; assert 'jax' not in sys.modules; xinfer_jax.generate"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --- names --------------------------------------------------------------------------------------------------

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def repeated(words: Iterable[str]) -> list[str]:
    return sorted(word for word, count in Counter(words).items() if count > 1)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstring_and_assignments_of_a_file(path):
    """It has a docstring, and values that are assigned one by one: `a, b = x, y` is for values that are
    exchanged, where a target is read on the right.
    """
    nodes = [*ast.walk(tree := ast.parse(path.read_text(encoding="utf-8")))]
    assert (ast.get_docstring(tree) or "").strip()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            read = {ast.unparse(part) for part in ast.walk(node.value)}
            for target in node.targets:
                parts = {ast.unparse(part) for part in getattr(target, "elts", ())}
                assert not parts or parts & read or "*" in ast.unparse(node), ast.unparse(node)


def test_a_public_name_is_defined_once():
    """Among the functions and classes of modules; but for `main`, and for overloads of one module."""
    names = []
    for name in MODULES:
        tree = ast.parse(LIBRARY.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        names += {node.name for node in tree.body if isinstance(node, DEFINED)} - {"main"}
    assert not [name for name in repeated(names) if not name.startswith("_")]


def test_a_module_name_is_used_once():
    assert not repeated(name.split(".")[-1] for name in MODULES)


def test_only_the_registry_names_quantized_formats():
    """So a new one is a file and a line there. GGUF is a kind of file with a format of its own."""
    formats = {name for name in MODULES if name.endswith("_format")}
    others = {name.split(".")[-1] for name in {*MODULES} - formats if imported_modules(name) & formats}
    assert others == {"quantized_formats", "awq_gptq_settings", "gguf_checkpoint"}
