"""The vocabulary of the embedded model's problems: plain word lists, and invented names built from syllables.

Everything is drawn from a `random.Random` the caller seeds; nothing here reads the clock or the global generator.
"""

# ruff: noqa: SIM905, E501  (word lists are easier to read as text)
from __future__ import annotations

from random import Random

NAMES = (
    "Mira Tom Anna Ben Clara David Ella Felix Greta Hugo Ida Jonas Karla Leo Maya Nils Olga Paul Rosa Sam "
    "Tina Uwe Vera Will Yara Zoe Alex Bella Carl Dora Emil Finn Gina Hans Iris Jack Kim Lena Max Nora "
    "Oscar Petra Quinn Ruth Simon Theo Ursula Victor Wendy Xaver Yusuf Zelda Amir Bianca Chen Diego Esra "
    "Farid Goran Hana"
).split()
CITIES = (
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Quito Dublin Berlin Madrid Vienna Prague Athens Lisbon Geneva "
    "Boston Dallas Denver Seattle Toronto Havana Bogota Nairobi Accra Tunis Dakar Hanoi Seoul Osaka "
    "Sydney Perth Auckland Zagreb Warsaw Riga Tallinn Helsinki Bergen Malmo"
).split()
JOBS = "baker teacher doctor farmer pilot painter singer nurse driver cook tailor writer gardener lawyer judge miner".split()
FOODS = "apples plums bread cheese soup rice beans carrots pears grapes nuts pasta honey cake fish eggs".split()
COLORS = "red green blue yellow black white brown purple orange pink gray gold silver".split()
PETS = "cat dog parrot rabbit horse turtle hamster goat duck snake fox owl".split()
SPORTS = "tennis chess football hockey golf rugby cricket handball badminton volleyball".split()
VEHICLES = "bus train bike car tram boat taxi scooter".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ITEMS = (
    "lamp chair table book cup spoon ball hat coat shoe clock phone pen bag key plate rope bell box knife brush "
    "candle basket mirror ladder hammer ticket stamp button bottle"
).split()
THINGS = (
    "river stone cloud tree house bridge garden window door road field tower island forest valley harbor "
    "market school castle mountain desert ocean planet engine letter story song picture shadow candle winter summer "
    "morning evening thunder feather pepper lemon copper marble velvet ribbon pillow kettle saddle anchor meadow"
).split()
LANGUAGES = "French Spanish German Italian Dutch Greek Polish Swedish".split()
ROOMS = "kitchen bedroom bathroom hall office cellar garage attic".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

_ONSETS = "b d f g h k l m n p r s t v z br dr gr kr pl st tr sh ch".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = ["", "", "n", "r", "l", "s", "m", "k", "x", "nd", "rt"]


def invented(rng: Random) -> str:
    """An invented name of two or three syllables, which must be copied and cannot be guessed."""
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((2, 2, 3)))]
    return "".join(syllables).capitalize()


def person(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.25 else rng.choice(NAMES)


def people(rng: Random, count: int) -> list[str]:
    """`count` different names."""
    people: dict[str, None] = {}
    while len(people) < count:
        people[invented(rng) if len(people) > 40 else person(rng)] = None
    return list(people)


def city(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.15 else rng.choice(CITIES)


def digits(rng: Random, low: int, high: int) -> str:
    """A code of `low` to `high` digits that does not begin with zero."""
    return str(rng.randint(1, 9)) + "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high) - 1))


def a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
