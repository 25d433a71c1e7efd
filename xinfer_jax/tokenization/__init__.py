"""From text to ids and back: tokenizers, chat templates and detokenizers.

- `template_files`, `template_budget` and `chat_template` find, limit and render chat templates, and
  `template_tools` finds what a template does with tools.
- `response_template`, `template_content` and `template_splitter` read how answers are written.
- `token_coverage` bounds the number of ids of a text, and `tokenizer_limits` the work of a tokenizer.
- `tokenizer_classes` and `tokenizer` convert text to ids and back. `gguf_tokenizer` makes one of a GGUF file.
- `escaping` keeps control tokens out of users' text, and `conversation` returns the ids of a prompt.
- `tool_choice` has the grammar of answers that call a tool.
- `detokenizer` and `answer_detokenizer` decode ids as they arrive.

A file is not trusted: the time and memory of a template are counted before they are spent.
"""
