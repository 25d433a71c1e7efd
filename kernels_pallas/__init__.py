"""Pallas GPU kernels for attention and the greedy token, each beside a plain jnp oracle of the same name in
`reference.py`.

`select(kernel, impl, …)` says which implementation serves a call, `run(impl, kernel, …)` runs it. This
package knows nothing of the library that uses it.
"""

from . import reference
from .dispatch import IMPLS, KERNELS, Selection, device_impl, run, select, unavailable, varying_as

__all__ = [
    "IMPLS",
    "KERNELS",
    "Selection",
    "device_impl",
    "reference",
    "run",
    "select",
    "unavailable",
    "varying_as",
]
