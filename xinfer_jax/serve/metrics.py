"""Metrics for Prometheus, with vLLM's names."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..engine.engines import Engine
from ..engine.requests import Request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The metrics of one model."""

    def __init__(self, name: str):
        self._labels = dict(model_name=name)
        self._registry = CollectorRegistry()
        kind: Any = ["model_name"]

        def histogram(name: str, about: str, buckets: Any) -> Any:
            metric = Histogram(f"vllm:{name}", about, kind, registry=self._registry, buckets=buckets)
            return metric.labels(**self._labels)

        self._ttft = histogram("time_to_first_token_seconds", "Time to the first token.", _SECONDS)
        self._tpot = histogram("time_per_output_token_seconds", "Time per token after the first.", _PER_TOKEN)
        self._latency = histogram("e2e_request_latency_seconds", "Time of a whole request.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time until prefill starts.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generation = histogram("request_generation_tokens", "Tokens of the answers.", _TOKENS)
        self._success = Counter(
            "vllm:request_success", "Answers that ended.", [*kind, "finished_reason"], registry=self._registry
        )

    def watch(self, engine: Engine) -> None:
        """Makes `collect` report this engine, or these engines."""
        self._engine = engine
        self._registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Any]:
        """Yields the engine's metrics, for prometheus_client."""
        stats = self._engine.stats
        labels = [self._labels["model_name"]]
        pages = max(1, stats.pages_used + stats.pages_cached + stats.pages_free)
        gauges = dict(
            num_requests_running=stats.running + stats.prefilling, num_requests_waiting=stats.waiting,
            kv_cache_usage_perc=stats.pages_used / pages, weight_version=self._engine.version,
        )  # fmt: skip
        counters = dict(
            prompt_tokens=stats.prefill_tokens + stats.hits, generation_tokens=stats.generated_tokens,
            prefix_cache_queries=stats.prefill_tokens + stats.hits, prefix_cache_hits=stats.hits,
            prefix_cache_host_hits=stats.host_hits, prefix_cache_file_hits=stats.file_hits,
            num_preemptions=stats.preemptions, spec_decode_num_drafts=stats.passes,
            spec_decode_num_draft_tokens=stats.drafted,
            spec_decode_num_accepted_tokens=sum(stats.accepted),
        )  # fmt: skip
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in values.items():
                metric = family(f"vllm:{name}", name.replace("_", " "), labels=["model_name"])
                metric.add_metric(labels, value)
                yield metric
        by_place = dict(accepted=stats.accepted, draft=stats.drafted_by_place)
        for kind, counts in by_place.items():
            name = f"spec_decode_num_{kind}_tokens_per_pos"
            names = ["model_name", "position"]
            metric = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=names)
            for position, count in enumerate(counts):
                metric.add_metric([*labels, str(position)], count)
            yield metric

    def observe(self, request: Request) -> None:
        """Counts a request that has ended."""
        times = request.times
        tokens = [len(answer.logprobs) for answer in request.answers]
        for answer in request.answers:
            reason = answer.finish_reason or "abort"
            self._success.labels(**self._labels, finished_reason=reason).inc()
        self._prompt.observe(len(request.ids))
        self._generation.observe(sum(tokens))
        if "prefill" in times:
            self._queue.observe(times["prefill"] - request.submitted)
        if "first" in times:
            self._ttft.observe(times["first"] - request.submitted)
        if "ended" in times:
            self._latency.observe(times["ended"] - request.submitted)
        if "first" in times and "ended" in times and tokens[0] > 1:
            self._tpot.observe((times["ended"] - times["first"]) / (tokens[0] - 1))

    def text(self) -> bytes:
        """Returns all metrics, in Prometheus's text format."""
        return generate_latest(self._registry)
