"""Data for the bundled tiny chat model: questions about capitals, small talk, a chat template and a
byte-level BPE tokenizer.

Everything is built from the tables in this file, so the data needs no download and is the same on every run.
"""

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Message = dict[str, str]
Turn = tuple[str, str]  # what the user writes, what the assistant answers

# fmt: off
# Names are written as inside a sentence, with their article. Where a state has several seats, the
# constitutional capital is given (Bolivia, Benin, the Netherlands) or the one commonly listed (South Africa,
# Eswatini). Yaren and Ramallah are seats of government.
_COUNTRIES = """
Afghanistan=Kabul|Albania=Tirana|Algeria=Algiers|Andorra=Andorra la Vella|Angola=Luanda
Antigua and Barbuda=St. John's|Argentina=Buenos Aires|Armenia=Yerevan|Australia=Canberra|Austria=Vienna
Azerbaijan=Baku|the Bahamas=Nassau|Bahrain=Manama|Bangladesh=Dhaka|Barbados=Bridgetown|Belarus=Minsk
Belgium=Brussels|Belize=Belmopan|Benin=Porto-Novo|Bhutan=Thimphu|Bolivia=Sucre|Bosnia and Herzegovina=Sarajevo
Botswana=Gaborone|Brazil=Brasília|Brunei=Bandar Seri Begawan|Bulgaria=Sofia|Burkina Faso=Ouagadougou
Burundi=Gitega|Cambodia=Phnom Penh|Cameroon=Yaoundé|Canada=Ottawa|Cape Verde=Praia
the Central African Republic=Bangui|Chad=N'Djamena|Chile=Santiago|China=Beijing|Colombia=Bogotá
the Comoros=Moroni|the Republic of the Congo=Brazzaville|Costa Rica=San José|Croatia=Zagreb
the Democratic Republic of the Congo=Kinshasa|Cuba=Havana|Cyprus=Nicosia|the Czech Republic=Prague
Denmark=Copenhagen|Djibouti=Djibouti|Dominica=Roseau|the Dominican Republic=Santo Domingo|East Timor=Dili
Ecuador=Quito|Egypt=Cairo|El Salvador=San Salvador|Equatorial Guinea=Malabo|Eritrea=Asmara|Estonia=Tallinn
Eswatini=Mbabane|Ethiopia=Addis Ababa|Fiji=Suva|Finland=Helsinki|France=Paris|Gabon=Libreville
the Gambia=Banjul|Georgia=Tbilisi|Germany=Berlin|Ghana=Accra|Greece=Athens|Grenada=St. George's
Guatemala=Guatemala City|Guinea=Conakry|Guinea-Bissau=Bissau|Guyana=Georgetown|Haiti=Port-au-Prince
Honduras=Tegucigalpa|Hungary=Budapest|Iceland=Reykjavík|India=New Delhi|Indonesia=Jakarta|Iran=Tehran
Iraq=Baghdad|Ireland=Dublin|Israel=Jerusalem|Italy=Rome|Ivory Coast=Yamoussoukro|Jamaica=Kingston|Japan=Tokyo
Jordan=Amman|Kazakhstan=Astana|Kenya=Nairobi|Kiribati=South Tarawa|Kosovo=Pristina|Kuwait=Kuwait City
Kyrgyzstan=Bishkek|Laos=Vientiane|Latvia=Riga|Lebanon=Beirut|Lesotho=Maseru|Liberia=Monrovia|Libya=Tripoli
Liechtenstein=Vaduz|Lithuania=Vilnius|Luxembourg=Luxembourg|Madagascar=Antananarivo|Malawi=Lilongwe
Malaysia=Kuala Lumpur|the Maldives=Malé|Mali=Bamako|Malta=Valletta|the Marshall Islands=Majuro
Mauritania=Nouakchott|Mauritius=Port Louis|Mexico=Mexico City|Micronesia=Palikir|Moldova=Chișinău
Monaco=Monaco|Mongolia=Ulaanbaatar|Montenegro=Podgorica|Morocco=Rabat|Mozambique=Maputo|Myanmar=Naypyidaw
Namibia=Windhoek|Nauru=Yaren|Nepal=Kathmandu|the Netherlands=Amsterdam|New Zealand=Wellington
Nicaragua=Managua|Niger=Niamey|Nigeria=Abuja|North Korea=Pyongyang|North Macedonia=Skopje|Norway=Oslo
Oman=Muscat|Pakistan=Islamabad|Palau=Ngerulmud|Palestine=Ramallah|Panama=Panama City
Papua New Guinea=Port Moresby|Paraguay=Asunción|Peru=Lima|the Philippines=Manila|Poland=Warsaw|Portugal=Lisbon
Qatar=Doha|Romania=Bucharest|Russia=Moscow|Rwanda=Kigali|Saint Kitts and Nevis=Basseterre|Saint Lucia=Castries
Saint Vincent and the Grenadines=Kingstown|Samoa=Apia|San Marino=San Marino|São Tomé and Príncipe=São Tomé
Saudi Arabia=Riyadh|Senegal=Dakar|Serbia=Belgrade|Seychelles=Victoria|Sierra Leone=Freetown
Singapore=Singapore|Slovakia=Bratislava|Slovenia=Ljubljana|the Solomon Islands=Honiara|Somalia=Mogadishu
South Africa=Pretoria|South Korea=Seoul|South Sudan=Juba|Spain=Madrid|Sri Lanka=Sri Jayawardenepura Kotte
Sudan=Khartoum|Suriname=Paramaribo|Sweden=Stockholm|Switzerland=Bern|Syria=Damascus|Taiwan=Taipei
Tajikistan=Dushanbe|Tanzania=Dodoma|Thailand=Bangkok|Togo=Lomé|Tonga=Nuku'alofa
Trinidad and Tobago=Port of Spain|Tunisia=Tunis|Turkey=Ankara|Turkmenistan=Ashgabat|Tuvalu=Funafuti
Uganda=Kampala|Ukraine=Kyiv|the United Arab Emirates=Abu Dhabi|the United Kingdom=London
the United States=Washington, DC|Uruguay=Montevideo|Uzbekistan=Tashkent|Vanuatu=Port Vila
Vatican City=Vatican City|Venezuela=Caracas|Vietnam=Hanoi|Yemen=Sanaa|Zambia=Lusaka|Zimbabwe=Harare
"""
_ALIASES = """
the USA=the United States|the US=the United States|the United States of America=the United States
America=the United States|the UK=the United Kingdom|Great Britain=the United Kingdom
Britain=the United Kingdom|the UAE=the United Arab Emirates|Czechia=the Czech Republic
Côte d'Ivoire=Ivory Coast|the Ivory Coast=Ivory Coast|Holland=the Netherlands|Türkiye=Turkey|Burma=Myanmar
Swaziland=Eswatini|Cabo Verde=Cape Verde|Timor-Leste=East Timor|Macedonia=North Macedonia
the DRC=the Democratic Republic of the Congo|DR Congo=the Democratic Republic of the Congo
Congo-Brazzaville=the Republic of the Congo|the Vatican=Vatican City
the Federated States of Micronesia=Micronesia|St. Kitts and Nevis=Saint Kitts and Nevis|St. Lucia=Saint Lucia
St. Vincent and the Grenadines=Saint Vincent and the Grenadines|the Republic of Ireland=Ireland
the Russian Federation=Russia|the People's Republic of China=China|Viet Nam=Vietnam|Brunei Darussalam=Brunei
the Republic of Korea=South Korea|the Seychelles=Seychelles|Guinea Bissau=Guinea-Bissau
Bosnia=Bosnia and Herzegovina|the Kyrgyz Republic=Kyrgyzstan|Lao PDR=Laos|Trinidad=Trinidad and Tobago
"""


def _table(text: str) -> dict[str, str]:
    """Parses lines `key=value|key=value`."""
    return dict(entry.split("=") for line in text.strip().splitlines() for entry in line.split("|"))


# The 193 members of the United Nations, Kosovo, Palestine, Taiwan and Vatican City: name as inside a sentence
# -> capital.
CAPITALS: dict[str, str] = _table(_COUNTRIES)
ALIASES: dict[str, str] = _table(_ALIASES)  # other name -> name in CAPITALS
_NOT_STATES = {"England": "London", "Scotland": "Edinburgh", "Wales": "Cardiff",
    "Northern Ireland": "Belfast", "Greenland": "Nuuk"}
NAMED_CAPITALS: dict[str, str] = (
    CAPITALS | {alias: CAPITALS[name] for alias, name in ALIASES.items()} | _NOT_STATES
)

PHRASINGS: tuple[str, ...] = (  # trained; {c} is the name, {possessive} the name with 's
    "What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?",
    "Tell me the capital city of {c}.",
    "{possessive} capital?", "Name the capital of {c}.", "Capital of {c}",
    "What is the capital city of {c}?", "{c} capital",
    "Please tell me the capital of {c}.", "Do you know what the capital of {c} is?",
    "Can you tell me the capital of {c}?",
    "What is {possessive} capital?", "Hi! What is the capital of {c}?",
)
HELD_OUT = "Please tell me what the capital of {c} is."  # never trained
EVALUATION_PHRASINGS: tuple[str, ...] = (PHRASINGS[0], PHRASINGS[3], HELD_OUT)
# Only after a first answer.
FOLLOW_UPS = ("And {c}?", "And of {c}?", "What about {c}?", "How about {c}?", "And the capital of {c}?")
REVERSE_PHRASINGS = ("Which country has the capital {capital}?", "{capital} is the capital of which country?",
    "What country is {capital} the capital of?")

SMALL_TALK: dict[str, tuple[str, ...]] = {  # answer -> what the user may write
    "Hello! How can I help you?": ("Hello", "Hi", "Hey", "Hello!", "Hi there!", "Good morning!",
        "Good evening!", "Hello there"),
    "I am fine, thank you. How can I help you?": ("How are you?", "How are you doing?",
        "Hello, how are you?", "How is it going?"),
    "I am a tiny language model trained to show xinfer_jax at work.": (
        "Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.",
        "Are you a language model?", "Are you an AI?"),
    "I have no name. I am just a tiny language model.": (
        "What is your name?", "What's your name?", "Do you have a name?", "What are you called?"),
    "I can tell you the capitals of countries.": (
        "What can you do?", "What do you know?", "Help", "How can you help me?", "What can I ask you?",
        "Can you help me?"),
    "You are welcome!": ("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thank you very much."),
    "Goodbye!": ("Bye", "Goodbye", "Bye!", "See you later.", "Good night!"),
    "What did zero say to eight? Nice belt!": ("Tell me a joke.", "Do you know a joke?", "Make me laugh.",
        "Another joke, please."),
    "I am very small. I fit in a few megabytes.": ("How big are you?", "How many parameters do you have?",
        "Are you small?"),
    "I was trained on a list of capitals and some small talk.": ("How were you trained?",
        "What were you trained on?", "Who made you?"),
    "No, I am a computer program.": ("Are you human?", "Are you a person?", "Are you a robot?",
        "Are you alive?"),
    "xinfer_jax is a library for running language models in JAX.": (
        "What is xinfer_jax?", "Tell me about xinfer_jax.", "What does xinfer_jax do?"),
    "Great!": ("Good", "Nice!", "Cool", "Great job!", "Well done!", "OK"),
    "I only know the capitals of countries and a little small talk.": (
        "What is the weather like today?", "Write a poem.", "Who won the world cup?", "What time is it?",
        "Write a Python function.",
        "What is the meaning of life?", "Tell me a story.", "What is the population of France?",
        "Who is the president of France?",
        "What is JAX?", "How do I cook rice?", "Explain quantum physics.", "What is the largest country?",
        "Translate this into French."),
}
_NO_COUNTRY = ("Atlantis", "Narnia", "Wakanda", "Mordor", "Mars", "the Moon", "the sun", "my house",
    "the world", "everything", "love")
NO_COUNTRY_ANSWER = "I only know the capitals of real countries."
NOISE_ANSWER = "Sorry, I did not understand that."

DEFAULT_SYSTEM = "You are a helpful assistant."
_KINDS = ("friendly", "helpful", "polite", "good", "cheerful", "serious", "clever")
_ROLES = ("assistant", "teacher", "guide", "chatbot", "librarian", "robot", "computer", "friend")
OTHER_SYSTEMS: tuple[str, ...] = (
    "You are a friendly assistant.", "Be concise.", "You answer questions about geography.",
    "Answer in one short sentence.", "",
    *(f"{start} a {kind} {role}." for start in ("You are", "Act as", "Answer like", "Be")
      for kind in _KINDS for role in _ROLES),
)
HELD_OUT_SYSTEM = "Reply as a patient tutor would, in English."  # never trained
END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
VOCABULARY_SIZE = 1920  # with the three special tokens; a multiple of 128
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# fmt: on


def question(phrasing: str, name: str) -> str:
    """The question about the country `name`. If the phrasing begins with the name, its first letter is upper
    case.
    """
    text = phrasing.format(c=name, possessive=name + ("'" if name.endswith("s") else "'s"))
    return text[0].upper() + text[1:] if phrasing.startswith("{") else text


def answer(name: str) -> str:
    """The right answer about the country `name` (a key of `NAMED_CAPITALS`)."""
    return f"The capital of {name} is {NAMED_CAPITALS[name]}."


def raw_sentence(name: str) -> tuple[str, str]:
    """The start and the end of a sentence about a country, for use without the chat template."""
    return f"The capital of {name} is", f" {NAMED_CAPITALS[name]}.{END_OF_TEXT}"


def evaluation_set(phrasing: str) -> list[Turn]:
    """Question and right answer for every country of `CAPITALS`, in its order."""
    return [(question(phrasing, name), answer(name)) for name in CAPITALS]


def _plain(text: str) -> str:
    """`text` without accents, as typed on an English keyboard."""
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def _typed(text: str, rng: random.Random) -> str:
    """`text` as a user may type it: sometimes without the final mark, in lower case or without accents."""
    if rng.random() < 0.25:
        text = text.rstrip("?.!") or text
    if rng.random() < 0.2:
        text = text.lower()
    return _plain(text) if rng.random() < 0.3 else text


def _capital_turn(rng: random.Random, phrasings: tuple[str, ...] = PHRASINGS) -> Turn:
    name = rng.choice(list(CAPITALS) if rng.random() < 0.8 else list(NAMED_CAPITALS))
    phrasing = phrasings[0] if rng.random() < 0.2 else rng.choice(phrasings)
    bare = name.removeprefix("the ")
    asked_name = bare if bare not in NAMED_CAPITALS and rng.random() < 0.2 else name
    return _typed(question(phrasing, asked_name), rng), answer(name)


def _reverse_turn(rng: random.Random) -> Turn:
    name, capital = rng.choice(list(CAPITALS.items()))
    return (
        _typed(rng.choice(REVERSE_PHRASINGS).format(capital=capital), rng),
        f"{capital} is the capital of {name}.",
    )


def _small_talk_turn(rng: random.Random) -> Turn:
    reply = rng.choice(list(SMALL_TALK))
    return _typed(rng.choice(SMALL_TALK[reply]), rng), reply


def _addition_turn(rng: random.Random) -> Turn:
    a = rng.randrange(10)
    b = rng.randrange(10)
    phrasing = rng.choice(
        (
            "What is {} plus {}?",
            "What is {} + {}?",
            "{} + {}",
            "{} plus {}",
            "{}+{}",
            "How much is {} plus {}?",
        )
    )
    return _typed(phrasing.format(a, b), rng), f"{a} plus {b} is {a + b}."


def _no_country_turn(rng: random.Random) -> Turn:
    return _typed(question(rng.choice(PHRASINGS), rng.choice(_NO_COUNTRY)), rng), NO_COUNTRY_ANSWER


def _noise_turn(rng: random.Random) -> Turn:
    """Meaningless input, so that the model has seen nearly every byte and has an answer to it."""
    unusual = (*range(33, 127), *rng.sample(range(160, 0xD800), 30), *rng.sample(range(0x1F300, 0x1FB00), 10))
    letters = "abcdefghijklmnopqrstuvwxyz" if rng.random() < 0.6 else "".join(map(chr, unusual))
    words = ("".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(rng.randint(1, 4)))
    return " ".join(words), NOISE_ANSWER


_TURNS: dict[Callable[[random.Random], Turn], float] = {
    _capital_turn: 0.62, _reverse_turn: 0.12, _small_talk_turn: 0.13, _addition_turn: 0.06,
    _no_country_turn: 0.04, _noise_turn: 0.03,
}  # fmt: skip


def conversations(rng: random.Random) -> Iterator[list[Message]]:
    """Endless stream of training conversations; the same seed gives the same stream.

    The last message is the assistant's; a fifth of the conversations have a second question. The system
    message is the default one in half of them, absent in 30 % (which the template renders as the default one)
    and another one in the rest.
    """
    while True:
        system = rng.choices((DEFAULT_SYSTEM, None, rng.choice(OTHER_SYSTEMS)), (0.5, 0.3, 0.2))[0]
        turns = [
            make(rng)
            for make in rng.choices(list(_TURNS), list(_TURNS.values()), k=2 if rng.random() < 0.2 else 1)
        ]
        if len(turns) == 2 and turns[0][1].startswith("The capital of") and rng.random() < 0.5:
            turns[1] = _capital_turn(rng, FOLLOW_UPS)
        messages = [] if system is None else [{"role": "system", "content": system}]
        for text, reply in turns:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        yield messages


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation as `CHAT_TEMPLATE` renders it, and whether each is the assistant's (its
    text and <|im_end|>).

    Encoding in parts gives the ids of the full text, because no merge crosses a special token or the line end
    after a role.
    """
    ids = []
    is_target = []
    has_system = messages[0]["role"] == "system"
    for message in messages if has_system else [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]:
        parts = (f"{START}{message['role']}\n", message["content"] + END, "\n")
        for text, target in zip(parts, (False, message["role"] == "assistant", False), strict=True):
            part_ids = tokenizer.encode(text).ids
            ids += part_ids
            is_target += [target] * len(part_ids)
    return ids, is_target


def examples(tokenizer: Tokenizer, rng: random.Random) -> Iterator[tuple[list[int], list[bool]]]:
    """Endless stream of training examples: `encode` of conversations, and one time in twenty a sentence
    without the template.
    """
    for messages in conversations(rng):
        if rng.random() < 0.05:
            name = rng.choice(list(CAPITALS))
            start, end = (tokenizer.encode(text).ids for text in raw_sentence(name))
            yield start + end, [False] * len(start) + [True] * len(end)
        else:
            yield encode(tokenizer, messages)


def corpus() -> list[str]:
    """Texts for training the tokenizer: every name, capital, phrasing and answer, but not the held-out
    phrasing.
    """
    texts = [answer(name) for name in NAMED_CAPITALS] * 2 + [
        question(PHRASINGS[0], name) for name in (*NAMED_CAPITALS, *_NO_COUNTRY)
    ]
    texts += [question(phrasing, "Chad") for phrasing in (*PHRASINGS, *FOLLOW_UPS)] * 4
    texts += [REVERSE_PHRASINGS[1].format(capital=capital) for capital in CAPITALS.values()]
    texts += [text for reply, questions in SMALL_TALK.items() for text in (reply, *questions)] * 4
    fixed = (
        DEFAULT_SYSTEM,
        *OTHER_SYSTEMS[:4],
        *_ROLES,
        NO_COUNTRY_ANSWER,
        NOISE_ANSWER,
        "system",
        "user",
        "assistant",
        "How much is 1 plus 2?",
    )
    texts += fixed * 4
    texts += [_plain(text).lower() for text in texts]
    return texts + [answer(name) for name in CAPITALS] * 3  # so that the proper names take few tokens


def train_tokenizer(directory: Path) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of Qwen2.5's structure on `corpus()`; writes tokenizer.json and
    tokenizer_config.json.

    Ids 0-255 are the single bytes, so any text can be encoded. The three special tokens have the last ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False, special=True) for token in (END_OF_TEXT, START, END)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(specials)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} ids, not {VOCABULARY_SIZE}: lower"
            " VOCABULARY_SIZE"
        )
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": END, "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [START, END], "add_bos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return tokenizer
