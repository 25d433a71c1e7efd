"""The one exception for what a caller can mend: bad input, named with its value and the remedy."""


class InputError(ValueError):
    """Bad input (arguments, files, settings), raised on the host before any tracing. The command line exits
    with 2 on it.
    """
