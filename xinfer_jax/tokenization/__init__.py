"""Turns text into ids and back: tokenizers, chat templates and detokenizers.

Reading order:

- `template_files`, `template_budget` and `chat_template` find, limit and render chat templates.
  `template_tools` finds out how a template writes tools.
- `response_template`, `template_content` and `template_splitter` read the form in which answers are written.
- `token_coverage` bounds the number of ids of a text, and `tokenizer_limits` bounds the work of a tokenizer.
- `tokenizer_classes` and `tokenizer` convert text to ids and back. `gguf_tokenizer` makes a tokenizer of a
  GGUF file.
- `escaping` keeps control tokens out of users' text, and `conversation` returns the ids of a prompt.
- `tool_choice` has the grammar of answers that call a tool.
- `detokenizer` and `answer_detokenizer` decode ids as they arrive.

Decision: a file is not trusted. The time and memory of a template are counted before they are spent.
"""
