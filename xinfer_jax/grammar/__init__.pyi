from .automaton import Dfa as Dfa, compile_dfa as compile_dfa
from .grammars import (
    Grammar as Grammar,
    choice as choice,
    json_object as json_object,
    json_schema as json_schema,
    lark as lark,
    regex as regex,
)
