"""Functions by which the core asks for an entry of `plugins.TABLE`, which it does not import."""

from importlib import import_module


def plugin(kind, name):  # without annotations: what it returns may be anything
    """Returns the entry of `plugins.TABLE` of this kind and name, or None if there is none."""
    return import_module(".plugins", __package__).load(kind, name)
