"""Settings of Sphinx. `build_site.py` collects the texts and calls it."""

import inspect
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "xinfer_jax"
author = "the authors of xinfer_jax"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = [
    "myst_nb",  # Markdown, and the tutorials as notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["files"]
# Absolute, since autosummary begins in the folder of the texts, and Sphinx in this one.
templates_path = [str(ROOT / ".docs/templates")]
highlight_language = "none"  # unless a block names its language
smartquotes = False
default_role = "py:obj"  # `name` in a docstring is code, and a link if it is a public name

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # the anchors that GitHub makes
nb_execution_timeout = 1800
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "inherited-members": "object, tuple, dict, BaseException",  # except those of these classes
}
autodoc_typehints = "none"  # signatures have them; `Args:` says what they mean
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # the fields of a dataclass as one list

html_theme = "furo"
html_title = f"xinfer_jax {release}"
html_show_sphinx = False
html_show_copyright = False


def engine_signature(app, what, name, found, options, signature, returns):
    """Shows the signature of `Engine.__init__`, since `Engine.__new__` only chooses a class."""
    if name != "xinfer_jax.Engine":
        return None
    parameters = list(inspect.signature(found.__init__).parameters.values())[1:]
    return str(inspect.Signature([x.replace(annotation=x.empty) for x in parameters])), returns


# Members of public classes that only other modules of the library call.
INTERNAL = set(
    """
    record_version ids_with_keys append end count_passes progress apply continue_from has_begun move_to
    recorded answered new_detokenizer fail notify single_answer check_call usable check fits kv_layers
    with_masks count checked rotated_width mixers feed_forward mixer_specs cached_mixers shares_kv
    head_widths layer_rope ropes files fewest_ids harmony_marks writes_harmony answer_template
    automata_of_rows missing last_step_time check_local check_open create_parts enqueue forget_prompts
    make_requests
    """.split()
)


def skip_member(app, what, name, found, skip, options):
    """Leaves out internal members, and the fields of named tuples, which `Attributes:` explains."""
    is_field = str(getattr(found, "__doc__", "")).startswith("Alias for field number")
    return True if what == "class" and (name in INTERNAL or is_field) else None


def setup(app):
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", engine_signature)
