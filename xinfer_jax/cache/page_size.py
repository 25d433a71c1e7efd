"""The size of a page. It is separate from `paged`, so that the scheduler needs no jax."""

PAGE_SIZE = 64  # tokens of a page; vLLM's block size
