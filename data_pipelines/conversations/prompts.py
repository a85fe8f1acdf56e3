"""The built-in prompts: five domains, thousands of questions without repetition, deterministic by seed.

They are there so that a run needs no data set: short questions that a small instruct model answers in a few dozen
tokens. `train` and `eval` are disjoint by content: the split of a prompt is a function of the hash of its text, so that
no seed and no number of prompts can bring a held-out question into training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

from ..errors import UserError

SPLITS = ("train", "eval")

PEOPLE = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Kate", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
]  # fmt: skip
GOODS = [
    "apples", "books", "pencils", "stamps", "marbles", "coins", "stickers", "oranges", "eggs", "cookies",
    "balloons", "candles", "cards", "shells",
]  # fmt: skip
PLACES = [
    "garden", "kitchen", "library", "park", "market", "station", "school", "museum", "village", "harbour", "office",
    "forest",
]  # fmt: skip
ANIMALS = ["dog", "cat", "horse", "rabbit", "parrot", "goat", "duck", "sheep", "turtle", "pony"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
JOBS = ["teacher", "doctor", "baker", "farmer", "nurse", "pilot", "gardener", "painter", "lawyer", "tailor"]
CITIES = ["Paris", "London", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Dublin", "Oslo", "Prague"]
WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "cloudy", "foggy"]
NUMBERS = {3: "three", 4: "four", 5: "five"}

# Verbs as (base, third person); each with objects that make sense with it.
DEEDS = [
    (("clean", "cleans"), ["the window", "the kitchen table", "the old car", "the blue bowl"]),
    (("paint", "paints"), ["the fence", "a small boat", "the front door", "a picture of the sea"]),
    (("write", "writes"), ["a long letter", "a short story", "a report", "an email to the manager"]),
    (("buy", "buys"), ["fresh bread", "a new lamp", "two tickets", "a pair of shoes"]),
    (("cook", "cooks"), ["vegetable soup", "dinner for the family", "rice and beans", "a big breakfast"]),
    (("read", "reads"), ["the newspaper", "a book about birds", "the instructions", "an old poem"]),
    (("carry", "carries"), ["a heavy bag", "the boxes upstairs", "a basket of fruit", "the chairs outside"]),
    (("repair", "repairs"), ["the broken clock", "the bicycle", "the roof", "a wooden chair"]),
    (("visit", "visits"), ["the old castle", "a friend", "the dentist", "the science museum"]),
    (("draw", "draws"), ["a map of the town", "a tall tree", "a sleeping cat", "the mountains"]),
    (("sell", "sells"), ["flowers", "old coins", "fresh fish", "handmade candles"]),
    (("find", "finds"), ["a lost key", "a quiet place", "an old photograph", "the right answer"]),
]
TIMES = ["every morning", "on Sundays", "after lunch", "in the evening", "before work", "in the summer", "twice a week"]

CASUAL = [
    "hey, can you send me the {thing} {when}?",
    "sorry, I can't make it to the {event} {when}.",
    "thanks a lot for the {thing}, it's really cool!",
    "gimme a call {when} about the {event}.",
    "what's up with the {thing}? I need it {when}.",
    "I wanna change the date of the {event}, ok?",
    "we're gonna be late for the {event} {when}.",
]
THINGS = ["report", "invoice", "photos", "contract", "keys", "tickets", "schedule", "address", "plan", "receipt"]
EVENTS = ["meeting", "party", "interview", "lesson", "dinner", "conference", "trip", "concert"]
WHENS = ["tomorrow", "today", "next week", "tonight", "on Friday", "on Monday", "this afternoon"]

# Kinds of things for lists, each with what may be said of them.
KINDS = {
    "fruits": [
        "that are sweet", "that are red", "for a fruit salad", "that children like", "that grow in warm countries",
    ],
    "vegetables": ["for a soup", "that are green", "that grow underground", "for a salad", "that are rich in vitamins"],
    "animals": [
        "that live in the sea", "that live on a farm", "that can fly", "that live in the forest", "with four legs",
    ],
    "sports": ["for two players", "with a ball", "for the winter", "that are played in teams", "for children"],
    "drinks": ["that are served hot", "for a summer day", "for breakfast", "for a party", "for children"],
    "hobbies": ["for a rainy day", "that cost little", "for older people", "that train the body", "for friends"],
    "tools": [
        "for a garden", "for working with wood", "for the kitchen",
        "for repairing a bicycle", "for a camping trip",
    ],
    "jobs": ["in a hospital", "in a school", "in a restaurant", "that are done outdoors", "in an office"],
    "countries": ["in Europe", "in Asia", "in Africa", "in South America", "with a long coast"],
    "cities": ["in France", "in Italy", "in Japan", "in Germany", "in the United States"],
    "foods": ["for a picnic", "that are easy to cook", "for a party", "for a cold day", "for a long walk"],
    "ways": ["to save water", "to stay healthy", "to save money", "to sleep better", "to learn a language"],
    "musical instruments": [
        "with strings", "for beginners", "in an orchestra", "that are easy to carry", "made of wood",
    ],
    "clothes": ["for cold weather", "for the beach", "for a wedding", "for running", "for a rainy day"],
    "materials": ["for building a house", "for making toys", "that can be recycled", "for art class", "that are soft"],
    "flowers": ["for a garden", "for a wedding", "that are red", "that grow in spring", "that smell good"],
    "birds": [
        "that can swim", "that live in cities", "that eat fish", "that live in the forest", "with bright colours",
    ],
    "rooms": ["in a house", "in a school", "in a hotel", "in a hospital", "in a museum"],
    "vehicles": ["with two wheels", "that travel on water", "for many people", "that can fly", "for a farm"],
    "pieces of furniture": ["for a bedroom", "for a kitchen", "for an office", "made of wood", "for a garden"],
    "school subjects": [
        "about numbers", "for future doctors", "that need a lot of reading", "about nature", "about people",
    ],
}  # fmt: skip
LIST_FORMS = [
    "List {number} {kind} {quality}.",
    "Name {number} {kind} {quality}. Answer with a list and nothing else.",
    "Write a short list of {number} {kind} {quality}.",
    "Please list {number} {kind} {quality}. Just the list.",
    "Make a list of {number} {kind} {quality}. Keep it short.",
]

# What a short function does, with the places that are filled in.
TASKS = [
    "adds {a} to a number",
    "multiplies a number by {a}",
    "checks if a number is greater than {a}",
    "checks if a number is divisible by {a}",
    "returns the first {a} items of a list",
    "returns the last {a} items of a list",
    "returns the numbers of a list that are smaller than {a}",
    "counts how often {a} occurs in a list",
    "prints the numbers from 1 to {a}",
    "returns the sum of the numbers from 1 to {a}",
    "repeats a string {a} times",
    "checks if a string is longer than {a} characters",
    "checks if a string starts with the letter {letter}",
    "counts the letter {letter} in a string",
    "replaces every {letter} in a string with {other}",
    "removes the letter {letter} from a string",
    "converts {unit} to {other_unit}",
    "returns the price after a discount of {a} percent",
]
UNITS = [
    ("minutes", "seconds"), ("hours", "minutes"), ("days", "hours"), ("weeks", "days"),
    ("metres", "centimetres"), ("kilometres", "metres"), ("kilograms", "grams"), ("litres", "millilitres"),
    ("euros", "cents"), ("years", "months"),
]  # fmt: skip
CODE_FORMS = [
    "Write a Python function that {task}. Only the code.",
    "Write a short Python function that {task}. Do not explain it.",
    "Give me a Python function which {task}. Code only, please.",
]


def _arithmetic(r: Random) -> str:
    name, goods = r.choice(PEOPLE), r.choice(GOODS)
    a, b = r.randint(3, 60), r.randint(2, 30)
    few, each = r.randint(2, 9), r.randint(2, 9)
    story = r.choice(
        [
            f"{name} has {a} {goods} and buys {b} more. How many {goods} does {name} have now?",
            f"{name} has {a + b} {goods} and gives away {b}. How many {goods} are left?",
            f"There are {few} boxes with {each} {goods} each. How many {goods} are there in all?",
            f"{name} shares {few * each} {goods} equally among {few} friends. How many does each friend get?",
            f"{name} finds {a} {goods} on {r.choice(DAYS)} and {b} on the next day. How many {goods} is that?",
            f"One box of {goods} costs {each} dollars. How much do {few} boxes cost?",
        ]
    )
    return f"{story} {r.choice(['Answer in one sentence.', 'Give a short answer.', 'Answer briefly.'])}"


def _rewriting(r: Random) -> str:
    if r.random() < 0.3:
        message = r.choice(CASUAL).format(thing=r.choice(THINGS), event=r.choice(EVENTS), when=r.choice(WHENS))
        return f"{r.choice(['Make this sentence formal', 'Rewrite this in a polite way'])}: {message}"
    name = r.choice(PEOPLE)
    correct, wrong = [], []
    for (base, third), objects in r.sample(DEEDS, 2):
        rest = f"{r.choice(objects)} {r.choice(TIMES)}."
        correct.append(f"{name} {third} {rest}")
        wrong.append(f"{name} {base} {rest}")
    now = " ".join(correct)
    return r.choice(
        [
            f"Rewrite these sentences in the past tense: {now}",
            f"Join these sentences with the word 'and': {now}",
            f"Write these sentences with the correct capital letters: {now.lower()}",
            f"Correct the grammar of these sentences: {' '.join(wrong)}",
        ]
    )


def _lists(r: Random) -> str:
    kind = r.choice(list(KINDS))
    return r.choice(LIST_FORMS).format(
        number=r.choice(list(NUMBERS.values())), kind=kind, quality=r.choice(KINDS[kind])
    )


def _code(r: Random) -> str:
    letter, other = r.sample("abcdefghiklmnoprstuw", 2)
    unit, other_unit = r.choice(UNITS)
    task = r.choice(TASKS).format(
        a=r.randint(2, 60), letter=f"'{letter}'", other=f"'{other}'", unit=unit, other_unit=other_unit
    )
    return r.choice(CODE_FORMS).format(task=task)


def _reading(r: Random) -> str:
    name, friend = r.sample(PEOPLE, 2)
    job, city, place, day = r.choice(JOBS), r.choice(CITIES), r.choice(PLACES), r.choice(DAYS)
    animal, colour, goods, count = r.choice(ANIMALS), r.choice(COLOURS), r.choice(GOODS), r.randint(3, 40)
    weather = r.choice(WEATHER)
    text, questions = r.choice(
        [
            (
                f"{name} is a {job} from {city}. On {day} {name} went to the {place} with {friend}. It was {weather}.",
                [f"What is {name}'s job?", f"Where is {name} from?", f"Who went with {name}?", "How was the weather?"],
            ),
            (
                f"{name} has a {colour} {animal}. The {animal} sleeps in the {place}. Every {day} {friend} feeds it.",
                [f"What colour is the {animal}?", f"Where does the {animal} sleep?", f"Who feeds the {animal}?"],
            ),
            (
                f"The {place} in {city} opens on {day}. "
                f"{name} works there as a {job} and sold {count} {goods} last week.",
                [f"When does the {place} open?", f"What did {name} sell?", f"In which city is the {place}?"],
            ),
            (
                f"{friend} bought {count} {goods} at the market in {city}. {name} carried them home in a {colour} bag.",
                [f"How many {goods} were bought?", f"Who bought the {goods}?", "What colour was the bag?"],
            ),
        ]
    )
    asked, also = r.choice(questions), r.choice(questions)
    return r.choice(
        [
            f"Read the text and answer the question in one sentence.\n\nText: {text}\n\nQuestion: {asked}",
            f"{text}\n\nSay in one sentence what this text is about.",
            f"{text}\n\nTell this again in your own words.",
            f"{text}\n\n{also} Answer with a full sentence.",
        ]
    )


DOMAINS: dict[str, Callable[[Random], str]] = {
    "arithmetic": _arithmetic,
    "rewriting": _rewriting,
    "lists": _lists,
    "code": _code,
    "reading": _reading,
}


def split_of(text: str) -> str:
    """`eval` for one prompt in eight, by the hash of its text; `train` for the others."""
    return "eval" if hashlib.sha256(text.encode()).digest()[0] % 8 == 0 else "train"


def generate_prompts(n: int, seed: int, split: str = "train") -> list[dict]:
    """n different prompts, the domains in turn: rows {"id", "domain", "messages": [one user turn]}.

    The first m of n prompts are the m prompts of the same seed and split. The id names the content, so that answers
    can be matched to prompts whatever the order.
    Raises UserError when more prompts are asked for than the templates can make.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    random = {name: Random(f"{seed}/{split}/{name}") for name in DOMAINS}
    rows, seen = [], set()
    for index in range(n):
        domain = list(DOMAINS)[index % len(DOMAINS)]
        for _ in range(10_000):
            text = DOMAINS[domain](random[domain])
            if text not in seen and split_of(text) == split:
                break
        else:
            made = f"only {index} different {split} prompts can be generated, {n} were asked for"
            raise UserError(made, fix=f"lower data.max_rows to {index}, or use data of your own (data=jsonl)")
        seen.add(text)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        rows.append({"id": f"{domain}-{name}", "domain": domain, "messages": [{"role": "user", "content": text}]})
    return rows
