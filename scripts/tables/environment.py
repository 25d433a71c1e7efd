"""The table of environment variables. test_tables.py compares it with the code."""

from .markdown import code, table

# Name, values, meaning. First the variables of this library, then those of jax and of the hub.
VARIABLES = (
    (
        "XINFER_JAX_API_KEY", "keys, one on each line",
        "`xinfer-jax serve` takes its keys from it if you do not pass `--api_key_file`.",
    ),
    (
        "XINFER_JAX_SECRET_FILE", "path of a file of mode 0600",
        "Names the file with the secret that signs messages between processes. The flag `--secret_file` has"
        " priority. The library reads the variable too.",
    ),
    (
        "XINFER_JAX_CPU", "`int8`, `bfloat16`, `amx` with commas between, or `none`",
        "Replaces the detected features of the CPU, which decide how matrices are multiplied. Set it if you"
        " compare forms of products, or if several machines must compute the same bits.",
    ),
    (
        "XINFER_JAX_CHILD", "JSON",
        "A process of this library passes it to the processes that it starts. Do not set it.",
    ),
    (
        "XDG_CACHE_HOME", "a directory; default `~/.cache`",
        "Compiled programs and the user's own secret are in `xinfer_jax` below this directory.",
    ),
    (
        "JAX_COMPILATION_CACHE_DIR", "a directory",
        "The directory of compiled programs. Commands use `~/.cache/xinfer_jax` if it is not set and you do"
        " not pass `--compilation_cache`. Programs of your own have no such cache unless you set it.",
    ),
    (
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "seconds; jax's default is 1",
        "jax keeps only programs that took longer to compile. Set it to 0 for programs of your own.",
    ),
    (
        "JAX_PLATFORMS", "`cpu`, `cuda` or `tpu`",
        "The kind of device that jax uses. For example, the front process of `--peers` needs no GPU.",
    ),
    (
        "JAX_ENABLE_X64", "`1` or `0`",
        "The library works with jax's 64-bit mode, and its own arrays keep 32 bits.",
    ),
    (
        "XLA_FLAGS", "XLA's flags",
        "`--xla_force_host_platform_device_count=8` makes eight virtual devices of a CPU, to try a mesh."
        " Pages in files are found again only by engines with equal flags.",
    ),
    (
        "XLA_PYTHON_CLIENT_MEM_FRACTION", "a number up to 1; jax's default is 0.75",
        "The part of a GPU's memory that jax allocates. `xinfer-jax plan` and the tables of cards count with"
        " 0.75.",
    ),
    (
        "HF_TOKEN", "an access token", "The access token for private and gated repositories of the hub.",
    ),
    (
        "HF_HUB_OFFLINE", "`1`", "Nothing is downloaded. If a file is missing, `InputError` says so.",
    ),
    (
        "HF_HOME", "a directory; default `~/.cache/huggingface`",
        "huggingface_hub keeps downloaded files and the token of `hf auth login` there.",
    ),
)  # fmt: skip


def variables() -> list[str]:
    """Returns the environment variables that the library and its commands read."""
    return table(["variable", "value", "meaning"], [[code(name), *rest] for name, *rest in VARIABLES])
