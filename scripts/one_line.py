"""What is wrong with a program's input: one line on standard error that begins with the program's name, and
exit code 2.
"""

import sys
from pathlib import Path
from typing import NoReturn

from absl import flags


def refuse(error: Exception) -> NoReturn:
    print(f"{Path(sys.argv[0]).stem}:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse)`, which would print a page of usage instead. These programs take
    flags alone.
    """
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        refuse(error)
    if len(rest) > 1:
        refuse(ValueError(f"unexpected argument {rest[1]!r}: everything is a flag"))
    return rest
