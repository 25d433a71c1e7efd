"""The table of the metrics that a server reports."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from .markdown import code, table

# The meaning of each metric, by its name in Prometheus's text without the end of its kind.
MEANINGS = {
    "vllm:time_to_first_token_seconds": "Seconds from the arrival of a request to its first token (TTFT).",
    "vllm:time_per_output_token_seconds": "Mean seconds for each token after the first one of a request"
    " (TPOT).",
    "vllm:e2e_request_latency_seconds": "Seconds from the arrival of a request to the end of its answers.",
    "vllm:request_queue_time_seconds": "Seconds that a request waited before its prefill started.",
    "vllm:request_prompt_tokens": "Tokens of the prompt of each request.",
    "vllm:request_generation_tokens": "Tokens of all answers of each request.",
    "vllm:request_success": "Answers that have ended, by `finished_reason`: `stop`, `length`, `abort` or"
    " `error`.",
    "vllm:num_requests_running": "Answers that have a slot now: they are prefilled or decoded.",
    "vllm:num_requests_waiting": "Answers that wait for a slot now.",
    "vllm:kv_cache_usage_perc": "The part of the pages that rows use now, from 0 to 1. Pages that only the"
    " prefix cache holds do not count.",
    "vllm:weight_version": "The version of the engine's weights.",
    "vllm:prompt_tokens": "Tokens of prompts, with those that the prefix cache had.",
    "vllm:generation_tokens": "Tokens that were generated.",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens of prompts that the prefix cache had.",
    "vllm:prefix_cache_host_hits": "Tokens of prompts whose pages came from host memory.",
    "vllm:prefix_cache_file_hits": "Tokens of prompts whose pages came from files.",
    "vllm:num_preemptions": "Times that an answer lost its slot to another one, and continued later.",
    "vllm:spec_decode_num_drafts": "Forward passes of rows that verified draft tokens. A pass of four rows"
    " counts four times.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens in these passes.",
    "vllm:spec_decode_num_draft_tokens_per_pos": "Draft tokens at each place of a pass. `position` 0 is the"
    " first draft token.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that the model accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Accepted draft tokens at each place of a pass."
    " `position` 0 is the first draft token.",
}


def metrics() -> list[str]:
    """Returns the metrics of /metrics: names as a query of Prometheus needs them, types and meanings.

    Raises:
        KeyError: a metric has no meaning here.
    """
    rows = []
    for family in reported():
        ends = {"counter": "_total", "histogram": "_bucket`, `_sum`, `_count"}
        labels = ", ".join(code(name) for name in labels_of(family))
        name = code(family.name + ends.get(family.type, ""))
        rows.append([name, family.type, labels, MEANINGS[family.name]])
    return table(["name", "type", "labels", "meaning"], rows)


def reported() -> list[Any]:
    """Returns the metric families of a server whose engine has answered nothing."""
    from xinfer_jax.engine.statistics import EngineStats
    from xinfer_jax.serve.metrics import Metrics

    found = Metrics("model")
    found._success.labels(model_name="model", finished_reason="stop")
    fields = dataclasses.fields(EngineStats)
    stats = EngineStats(**{field.name: [0] if "list[int]" in str(field.type) else 0 for field in fields})
    found.watch(SimpleNamespace(stats=stats, version=0))
    return list(found._registry.collect())


def labels_of(family: Any) -> list[str]:
    """Returns the labels of a metric family, without the labels of histograms."""
    names = {name for sample in family.samples for name in sample.labels}
    return sorted(names - {"le"})
