"""Fields of other servers that would change an answer. Each is an error that names this server's way, unless
its value asks for nothing.

Sources (November 2026): the request models of vLLM, SGLang and llama.cpp's server, the OpenAPI description of
TGI, the documentation of LM Studio, Ollama, KoboldCpp and the OpenAI API, and `GenerationConfig` of
transformers.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import format_value

# This server's way, and the fields; each with the values that ask for nothing.
_INSTEAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "give structured_outputs, with json, regex, or a grammar in llguidance's Lark syntax": dict(
        grammar=("",), ebnf=("",), grammar_string=("",), grammar_lazy=(False,), grammar_triggers=([],),
        grammar_type=("",), regex=("",),
    ),
    "give response_format": dict(
        json_schema=(), format=("",), text=({},), response_schema=({},), output_format=(),
        output_config=({},), json_mode=(False,), response_mime_type=("text/plain",),
    ),
    "give stop or stop_token_ids": dict(
        stop_regex=("", []), stop_sequences=([],), stop_sequence=([],), stop_words=([],), stop_strings=([],),
        stopping_strings=([],), custom_stopping_strings=("", []), eos_token_id=(), end_id=(),
    ),
    "give include_stop_str_in_output": dict(no_stop_trim=(False,)),
    "give max_tokens": dict(
        n_predict=(-1,), num_predict=(-1,), max_new_tokens=(), max_output_tokens=(), max_length=(),
        max_tokens_to_sample=(), max_gen_len=(), max_gen_toks=(),
    ),
    "give seed": dict(random_seed=(), sampling_seed=()),
    "give min_tokens": dict(min_new_tokens=(0,), min_length=(0,)),
    "give n": dict(n_cmpl=(1,), num_return_sequences=(1,)),
    "give logprobs": dict(
        n_probs=(0,), top_n_tokens=(0,), post_sampling_probs=(False,), logprob_start_len=(-1,)
    ),
    "give echo to /v1/completions": dict(return_full_text=(False,)),
    "give repetition_penalty, which counts all tokens": dict(
        repeat_penalty=(1,), rep_pen=(1,), encoder_repetition_penalty=(1,)
    ),
    "give typical_p": dict(typ_p=(1,), typical=(1,)),
    "give temperature (0: greedy)": dict(
        do_sample=(), mirostat=(0,), mirostat_mode=(0,), dynatemp_range=(0,), dynamic_temperature=(False,),
        smoothing_factor=(0,), temperature_last=(False,), adaptive_target=(-1,),
    ),
    "give top_p, min_p, typical_p, top_k or xtc_probability": dict(
        top_n_sigma=(0, -1), nsigma=(0, -1), top_a=(0,), top_h=(), tfs=(1,), tfs_z=(1,), epsilon_cutoff=(0,),
        eta_cutoff=(0,), penalty_alpha=(0,), min_keep=(0, 1),
    ),
    "the order of the filters is fixed, leave it out": dict(samplers=(), sampler_order=()),
    "give ignore_eos": dict(ban_eos_token=(False,), bypass_eos=(False,)),
    "give bad_words, logit_bias or allowed_token_ids": dict(
        banned_tokens=([],), banned_strings=([],), custom_token_bans=("",), logit_biases=([],),
        suppress_tokens=([],), begin_suppress_tokens=([],), bad_words_ids=([],), sequence_bias=([], {}),
        force_words_ids=([],), exponential_decay_length_penalty=(), forced_eos_token_id=(),
    ),
    "leave it out, one answer is sampled at a time": dict(
        num_beams=(1,), num_beam_groups=(1,), guidance_scale=(1,), negative_prompt=("",),
        custom_logit_processor=(), custom_params=({},),
    ),
    "leave it out, an answer has a limit of tokens, not of time": dict(
        t_max_predict_ms=(0, -1), max_time=(), n_indent=(0,),
    ),
    "name the adapter as the model": dict(lora=([],), lora_path=(), adapter_id=(), adapters=("",)),
    "give chat_template_kwargs, such as enable_thinking, or reasoning_effort": dict(
        enable_thinking=(), thinking=(), think=(), thinking_budget=(-1,), reasoning_budget=(-1,),
        reasoning_budget_tokens=(-1,), thinking_budget_tokens=(-1,), reasoning_control=(False,),
    ),
    "give include_reasoning": dict(
        reasoning_format=("auto", "deepseek"), separate_reasoning=(True,), stream_reasoning=(True,)
    ),
    "give tool_choice none": dict(parse_tool_calls=(True,)),
    "give a system message": dict(
        instructions=("",), system_prompt=("",), guideline=("",), tool_prompt=("",)
    ),
    "give messages or prompt": dict(
        input_ids=(), input=(), inputs=(), task=(), generation_prompt=("",), session_params=({},),
        role_mapping=({},),
        previous_response_id=(), preserved_tokens=([],), template=("",),
    ),
    "give truncate_prompt_tokens": dict(truncate=(), truncation=("disabled",)),
    "give cache_salt": dict(extra_key=("",)),
    "give return_token_ids": dict(return_tokens=(False,), return_prompt_token_ids=(False,)),
    "leave it out": dict(
        return_hidden_states=(False,), watermark=(False,),
        response_fields=([],), return_meta_info=(False,), return_cached_tokens_details=(False,),
    ),
    "give routed_experts_prompt_start": dict(routed_experts_start_len=(0,)),
    "put the fields in it into the body itself": dict(
        extra_body=({},), options=({},), parameters=({},), sampling_params=({},), generation_config=({},),
    ),
}  # fmt: skip
_LONGEST = 100  # characters of a name that are looked at
_WAYS = {name: (way, values) for way, fields in _INSTEAD.items() for name, values in fields.items()}
# Further settings of what is an error above, or of how an answer is computed, sent and kept.
_WITHOUT_EFFECT = {
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "smoothing_curve", "adaptive_decay", "n_keep",
    "n_discard", "n_cache_reuse", "cache_prompt", "id_slot", "timings_per_token", "return_progress",
    "sse_ping_interval", "verbose", "backend_sampling", "rid", "custom_labels", "routed_dp_rank",
    "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "ngram_corpus_id", "images_config", "max_dynamic_patch", "min_dynamic_patch",
    "use_audio_in_video", "decoder_input_details", "details", "ttl", "draft_model", "keep_alive",
}  # fmt: skip
# They limit the tokens that penalties count, and do nothing if these have the values at which they are off.
_OF_PENALTIES = {
    "repeat_last_n", "penalize_nl", "rep_pen_range", "repetition_context_size", "presence_context_size",
    "frequency_context_size",
}  # fmt: skip
_PENALTIES = dict(repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
# A field with a word that begins so would constrain an answer, whatever it is.
_CONSTRAINS = re.compile(
    r"\b(grammar|gbnf|ebnf|lark|guid(ed|ance)|outlines|structur|schema|regex|json|choices?\b|pattern|sampl"
    r"|mirostat|dynatemp|temp(erature)?s?\b|penal|stop|bias|logit|ban(s|ned)?\b|dry\b|xtc|beam|constrain"
    r"|greedy)"
)


def why_not_served(body: Mapping[str, Any], name: str, known: Collection[str]) -> str | None:
    """Returns the reason why a field that this server does not have is an error. "": the field asks for
    nothing. None: nobody knows the field.

    Args:
        body: the fields that are not null.
        name: the name of the field.
        known: the names of this server's fields.
    """
    if name in _WITHOUT_EFFECT:
        return ""
    if name in _OF_PENALTIES:
        penalties = [one for one, off in _PENALTIES.items() if body.get(one, off) != off]
        return f"{name} does not go with {penalties[0]}, which counts all tokens" if penalties else ""
    if name in _WAYS:
        way, nothing = _WAYS[name]
        return "" if body[name] in nothing else f"{name} is not served here: {way}"
    words = re.findall("[a-z]+", re.sub("(?<=[a-z])([A-Z])", r" \1", name[:_LONGEST]).lower())
    if spelled := next((one for one in known if one.replace("_", "") == "".join(words)), None):
        return f"{format_value(name)} is not a field, {spelled} is: give that"
    if not _CONSTRAINS.search(" ".join(words)):
        return None
    if body[name] is False or body[name] in ("", [], {}):
        return ""
    said = "is not served here, and would constrain the answer"
    return f"{format_value(name)} {said}: leave it out, or give structured_outputs"
