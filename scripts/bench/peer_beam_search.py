"""Runs the beam searches that bench_beam.py compares: one process per engine, the job as JSON in argv, the
answer as the last line.

Needs only numpy and the engine, like peer_engines.py, which defines the engines. Loading returns a function
`search(prompts, new_tokens) -> (token ids of the best sequence, scores) per prompt`: no sampling, EOS
ignored.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from peer_engines import ENGINES, Engine, PeakMemory, Prompts, main, our_model, transformers_model

Search = Callable[[Prompts, int], tuple[list[list[int]], list[float]]]


def measure(engine: Engine, job: dict, watch: PeakMemory) -> dict:
    """Loads the engine; for every case, the median seconds of the calls after the first."""
    search = engine.load(job)
    result = {"warmup_s": 0.0}
    new = job["new_tokens"]
    draw = np.random.RandomState(job["seed"])
    for length, rows in job["cases"]:
        seconds = []
        # Every call has different prompts, because an engine may cache them. The first call warms up.
        for call in range(1 + job["calls"]):
            prompts = draw.randint(0, job["vocab_size"], (rows, length)).tolist()
            start = time.perf_counter()
            tokens, scores = search(prompts, new)
            seconds.append(time.perf_counter() - start)
            if [len(row) for row in tokens] != [new] * rows:
                raise RuntimeError(f"asked for {rows} x {new} tokens, got {[len(row) for row in tokens]}")
            if call == 1:
                result.setdefault("tokens", tokens[0])
                result.setdefault("score", scores[0])
        result["warmup_s"] += seconds[0]
        result[f"{length} x{rows}"] = statistics.median(seconds[1:])
    result["anon_mib"], result["resident_mib"] = watch.peaks()
    return result


def load_ours(job: dict) -> Search:
    import xinfer_jax as xj

    model = our_model(job)

    def search(prompts: Prompts, new: int) -> tuple[list[list[int]], list[float]]:
        out = xj.beam_search(
            model.params,
            model.config,
            prompts,
            num_beams=job["num_beams"],
            num_return_sequences=1,
            max_new_tokens=new,
            eos_token_ids=(),
        )
        return [row[0] for row in out.sequences], [row[0] for row in out.scores]

    return search


def load_transformers(job: dict) -> Search:
    import torch

    model = transformers_model(job)

    def search(prompts: Prompts, new: int) -> tuple[list[list[int]], list[float]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            num_beams=job["num_beams"], output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return out.sequences[:, ids.shape[1] :].tolist(), out.sequences_scores.tolist()

    return search


def load_ctranslate2(job: dict) -> Search:
    import ctranslate2

    model = ctranslate2.Generator(
        job["converted"], device="cpu", compute_type=job["precision"], intra_threads=job["threads"]
    )

    def search(prompts: Prompts, new: int) -> tuple[list[list[int]], list[float]]:
        words = [[f"<{i}>" for i in prompt] for prompt in prompts]
        out = model.generate_batch(
            words,
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
            beam_size=job["num_beams"],
            return_scores=True,
        )
        return [row.sequences_ids[0] for row in out], [row.scores[0] for row in out]

    return search


_LOADS = {"ours": load_ours, "transformers": load_transformers, "ctranslate2": load_ctranslate2}
BEAM_ENGINES = {name: dataclasses.replace(ENGINES[name], load=load) for name, load in _LOADS.items()}

if __name__ == "__main__":
    answer = json.dumps(main(json.loads(sys.argv[1]), BEAM_ENGINES, measure))
    print(f"\n{answer}", flush=True)
