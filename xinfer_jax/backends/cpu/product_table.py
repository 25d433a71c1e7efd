"""The table that chooses the form of a CPU's matrix product by the format of the matrix, the number of rows,
and the CPU.

`scripts/bench_products.py` measures the entries of the table. The README of the benchmarks has the figures.
"""

import jax

from .cpu_features import CPU_VARIABLE, fast_matmul_types

X_FIRST = "x first"  # x is the left operand
MATRIX_FIRST = "matrix first"  # the matrix is
TILES = "float32 tiles"  # the matrix is converted some outputs at a time
ROWS = "row by row"  # packed numbers are not unpacked
INT8 = "int8"  # they are unpacked to int8

# Each with the most rows that it serves. Of a pair the second is for fewer outputs than inputs.
_Forms = tuple[tuple[int, str | tuple[str, str]], ...]
_MANY = 1 << 62
# By format, by what the CPU has ("amx"; "fast": it multiplies the type fast; else no word), and from which
# version of jax. Measured with AVX-512 VNNI; but "amx" and int8 without a word (AVX2): these are of other
# machines with jax 0.10. Arm takes the rows of its features, which were not measured there.
_TABLE: dict[tuple[str, ...], _Forms] = {
    ("float32",): ((1, X_FIRST), (64, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("bfloat16",): ((8, X_FIRST), (64, MATRIX_FIRST), (_MANY, TILES)),
    ("bfloat16", "0.12"): ((16, X_FIRST), (64, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("bfloat16", "amx"): ((64, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("int8",): ((1, X_FIRST), (6, MATRIX_FIRST), (_MANY, TILES)),
    ("int8", "fast"): (
        (1, (X_FIRST, MATRIX_FIRST)),
        (16, MATRIX_FIRST),
        (64, (TILES, MATRIX_FIRST)),
        (_MANY, TILES),
    ),
    ("int8", "fast", "0.12"): ((_MANY, X_FIRST),),
    ("int8", "amx"): ((8, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("int8 activations",): ((1, X_FIRST), (64, MATRIX_FIRST), (_MANY, TILES)),
    ("int8 activations", "fast"): ((1, (X_FIRST, MATRIX_FIRST)), (64, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("int8 activations", "fast", "0.12"): ((_MANY, X_FIRST),),
    ("int8 activations", "amx"): ((8, MATRIX_FIRST), (_MANY, X_FIRST)),
    ("int4",): ((8, ROWS), (_MANY, TILES)),
    ("int4 activations",): ((3, ROWS), (_MANY, INT8)),
    ("int4 activations", "fast"): ((4, ROWS), (_MANY, INT8)),
    ("mxfp4",): ((6, ROWS), (_MANY, TILES)),
    ("ternary",): ((32, ROWS), (_MANY, TILES)),  # its tiles are int8
    ("ternary", "0.12"): ((8, ROWS), (_MANY, TILES)),
}


def fastest_form(kind: str, rows: int, outputs: int, inputs: int) -> str:
    """Returns the name of a form. kind: a format of the table, or another float type. rows: the number of
    rows of x.
    """
    types = fast_matmul_types()
    is_fast = ("bfloat16" if kind == "bfloat16" else "int8") in types
    unit = ("amx",) if "amx" in types else ("fast",) if is_fast else ()
    new = jax.__version_info__ >= (0, 12)
    keys = [(kind, *unit, "0.12"), (kind, *unit), (kind, "0.12")] if new else [(kind, *unit)]
    forms = next((_TABLE[key] for key in (*keys, (kind,)) if key in _TABLE), ((_MANY, TILES),))
    form = next(form for most, form in forms if rows <= most)
    return form if isinstance(form, str) else form[outputs < inputs]


def describe_cpu() -> str:
    """Describes in one line, for the user, which types the CPU multiplies fast."""
    has = [name for name in ("int8", "bfloat16", "amx") if name in fast_matmul_types()]
    is_converted = fastest_form("int8", 512, 1, 1) == TILES
    conversion = "; prompts in int8 are converted to float32" if is_converted else ""
    return f"CPU: multiplies {', '.join(has) or 'float32 only'}{conversion} ({CPU_VARIABLE} overrides)"
