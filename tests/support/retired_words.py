"""Words of the code's own for what the field names otherwise. They were replaced, and may not come back."""

MODULES = """
batch.ledger brief cache.kinds cache.quantized checkpoint.spread checkpoint.template_work cli.group
cli.program cli.watch compress.rounding engine.lockstep generation.batches generation.doors
generation.faults generation.programs generation.roads generation.streaming sampling.choice
scripts.bench_beam_runners scripts.bench_engine_runners scripts.bench_peer_runners
scripts.bench_start_runners scripts.cards scripts.check_gpu_child scripts.guess_ahead scripts.one_line
scripts.plan_figures scripts.soak_serve_attackers scripts.soak_serve_sending serve.body_scan serve.offload
serve.thoughts serve.under_way weights.processor
""".split()

# Names of functions, classes, variables or attributes.
NAMES = """
Ahead ailing answers_of Asked asked_B askForKey became_ready before_leaving beside_peers beside_the_first
by_blocks by_slot _carry_out catch_interrupts check_guesser _check_least check_room checked_mesh
choose_and_note choose_behind chosen_B chosen_capacity compensated_matrix _Counted cut_of _DEEP_TESTS
digest_of Do drop_shared echoed encoded_object engine_of Entrance experts_asked fewest_of first_choice
first_state found_in from_the_first fuses_head _give_back give_back_memory Guesser Guessing hand_over
hash_of held_against _ids_of_texts in_fields in_front inner_block is_of is_there job_of
keep_compiled_programs kept_prefix Layered Ledger _LEFT_OUT let_go lies_over look_up _make_share _make_way
mesh_named MOST_EOS MOST_GUESSES MOST_LOGPROBS MOST_STOPS multiplies_int8_fast names_of no_alternatives
note_alternatives NOW Offload over_heads own_part pages_for part_of pass_over PATIENCE planned
prompts_of_rows put_pages READ_AGAIN read_and_compile read_next read_ropes read_texts rehearsal rehearse
remembered request_of requests_of Road _Road rounded_matrix rounded_params rounded_product rounding_once
rows_of_tokens Said said_of sampling_of say_seldom seated secret_of _send_out shown_logprobs shown_scores
slots_of split_thoughts stats_of stop_reading stops_of take_pages take_row _take_turn takes_likeliest Texts
THOUGHT Thoughts through_layer through_layers Ticket tile_by_tile to_check to_head tokens_of TokenTexts Told
told_first turns_by_position turns_weights _undecoded under_way UnderWay undivided until_ended varying_as
wakers what_fits what_takes_time Whole whole_form WholeResponse why_not_finite widened_product widens_int8
with_heads_for zero_less_one
""".split()

# Names of functions and classes alone: a variable may have them.
DEFINITIONS = """
advance behind enter held leave note Place place turned whole
""".split()

# Of docstrings, comments and documents, in lower case.
PHRASES = (
    "a fault of ours",
    "a token as a reader sees it",
    "any company",
    "as keys are made that are kept rounded",
    "as long as it is there",
    "as they are kept",
    "asks too much",
    "begun a thought",
    "belongs together beyond a part",
    "broke down",
    "come again",
    "costs no bits",
    "does not silence",
    "given up later",
    "goes along them",
    "goes away frees",
    "going down",
    "guess tokens ahead",
    "how likely given texts are",
    "in any company",
    "in company",
    "in front · behind",
    "in turns with",
    "inputs in an order of their own, and bitnet",
    "is as good as",
    "is at fault",
    "is not read again",
    "its company",
    "kept rounded",
    "lie turned",
    "lies over",
    "lies turned",
    "made way",
    "make way",
    "makes way",
    "nobody forges a turn",
    "nobody wants",
    "nothing is faster than",
    "numbers that are no bias",
    "of its own will",
    "on its company",
    "on its road",
    "or its bits would hang on its company",
    "parts come last in what they leave",
    "read along",
    "reads along",
    "set aside what ended",
    "so its size costs no bits",
    "so many times larger",
    "stand behind others",
    "start with alike",
    "tells where what is made of them will lie",
    "that hold nothing",
    "that make no sense",
    "that nobody knows",
    "the room's",
    "the two roads",
    "turned while running are only what enters",
    "under way",
    "what can be said now",
    "what is said about",
    "what it is the end of",
    "what it thinks",
    "what its rows start with alike is not read again",
    "what stands behind",
    "what they are the end of as logits",
    "which hold the others' probability",
    "who goes away frees the row at once",
    "who guesses",
    "whoever passes a loop or a macro pays",
    "whoever reads us",
    "widened a tile",
    "window of decoding",
    "windows of decoding",
    "with room for",
    "with the blank that it may begin with",
    "without company",
)
