"""Everyday wordings for the second edition: stories, lists, letters, facts told and read, small talk, what it cannot know.

Of each table of wordings the last quarter is held out, and so are names. Every analysis writes what the answer is then
copied from, so that a small network can learn it.
"""

# ruff: noqa: E501, SIM905  (a table of sentences reads best with one per line)
from __future__ import annotations

from functools import partial
from typing import Any

from phrasings import HONEST
from turns import COMMON, Source, Turn

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.numbers import add_steps, multiply_steps, subtract_steps
from halfbyte.evals.problem import final, think, user

STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{n} has {a} {i}s and finds {b} more. How many {i}s does {n} have now?", "In the {r} are {a} {i}s, in the cellar are {b}. How many {i}s is that?", "{n} bought {a} {i}s on {d} and {b} later. How many in all?", "I have {a} {i}s. {n} gives me {b}. How many do I have?", "A box has {a} {i}s, another has {b}. How many {i}s are in both?", "{n} ran {a} metres and then {b} metres. How far did {n} run?", "{n} is {a} years old. How old is {n} in {b} years?", "{n} is {a} and {m} is {b} years older. How old is {m}?", "The {i} costs {a} coins and the bag {b}. What do I pay for both?", "{a} people are in the room and {b} come in. How many are there now?", "we had {a} points and got {b} more, how many points", "{n} read {a} pages on {d} and {b} pages the day after. How many pages did {n} read?", "There were {a} birds. {b} more came. How many birds are there?", "My bill is {a} euros and I add a tip of {b} euros. What do I pay?", "{n} has {a} {i}s, {m} has {b}. How many do they have together?", "A road is {a} km long, the next {b} km. How long are they together?",
    ),
    "-": (
        "{n} has {a} {i}s and loses {b}. How many {i}s are left?", "I had {a} {i}s and sold {b}. How many do I have?", "{n} had {a} coins and paid {b}. How many coins are left?", "There are {a} {i}s in the {r}. {n} takes {b}. How many stay?", "{a} people were on the train and {b} left it. How many are still on it?", "Of {a} {i}s {b} are broken. How many are whole?", "{n} is {a} years old, {m} is {b} years younger. How old is {m}?", "A book has {a} pages and I have read {b}. How many are left?", "we need {a} {i}s but have {b}, how many are missing", "{n} has {a} {i}s and eats {b}. How many remain?", "The way is {a} km and we walked {b} km. How far is it still?", "There were {a} birds and {b} flew away. How many are there now?", "From {a} {i}s {n} gives {b} to {m}. How many does {n} keep?", "I saved {a} euros and used {b}. What is left?", "My bag holds {a} {i}s and there are {b} in it. How many more fit?", "{n} baked {a} cakes. {b} were eaten. How many are there still?",
    ),
    "*": (
        "{n} has {b} bags with {a} {i}s in each. How many {i}s is that?", "Each {i} costs {a} coins. What do {b} {i}s cost?", "There are {b} rows of {a} {i}s. How many {i}s are there?", "{b} friends have {a} {i}s each. How many do they have together?", "{n} runs {a} km every day. How far is that in {b} days?", "Each of the {b} boxes has {a} {i}s. How many {i}s are there?", "a day has {a} tasks, how many tasks have {b} days", "{b} tables have {a} chairs each. How many chairs is that?", "I pay {a} euros a month. What do I pay in {b} months?", "Every {i} weighs {a} grams. What do {b} of them weigh?", "{n} buys {b} packs of {a} {i}s. How many {i}s does {n} have?", "A ticket costs {a} coins. {n} buys {b}. What does {n} pay?", "We are {b} people and each brings {a} {i}s. How many is that?", "{b} buses with {a} people each: how many people?", "On each of {b} days {n} found {a} {i}s. How many is that?", "A wall has {b} shelves with {a} books on each. How many books?",
    ),
}  # fmt: skip

# key: (how it is told, how it is asked, the answer, what the value is)
TOLD: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str]] = {
    "name": (("My name is {v}.", "I am {v}.", "I'm called {v}.", "Call me {v}.", "Hello, I am {v}.", "People call me {v}.", "Hi! My name is {v}.", "This is {v} speaking."), ("What is my name?", "Who am I?", "Do you know my name?", "What am I called?", "Tell me my name.", "my name?", "Do you still know who I am?", "Say my name."), "Your name is {v}.", "name"),
    "place": (("I live in {v}.", "My home is in {v}.", "I come from {v}.", "I moved to {v}.", "My house is in {v}.", "We live in {v} now."), ("Where do I live?", "Where is my home?", "In which place do I live?", "Do you know where I live?", "which town do I live in", "Where is my house?"), "You live in {v}.", "name"),
    "key": (("I put the key under the {v}.", "The key is under the {v}.", "My key lies under the {v}.", "I left my key under the {v}."), ("Where is the key?", "Where did I put the key?", "Where is my key?", "Under what is the key?"), "The key is under the {v}.", "thing"),
    "pet": (("My cat is called {v}.", "I have a cat named {v}.", "The name of my cat is {v}.", "We call our cat {v}."), ("What is my cat called?", "What is the name of my cat?", "Which name does my cat have?", "Do you know my cat's name?"), "Your cat is called {v}.", "name"),
    "number": (("My lucky number is {v}.", "Remember the number {v}.", "Keep {v} in mind.", "The number is {v}.", "Please note the number {v}.", "I chose the number {v}."), ("What was the number?", "Which number did I say?", "What number was it?", "Tell me the number.", "Which number should you remember?", "Do you remember the number?"), "The number is {v}.", "number"),
    "word": (("Remember the word {v}.", "The word is {v}.", "Keep the word {v} in mind.", "My secret word is {v}.", "Note the word {v}.", "Do not forget the word {v}."), ("What was the word?", "Which word did I say?", "What word was it?", "Tell me the word.", "Say the word again.", "What word should you remember?"), "The word is {v}.", "name"),
    "meeting": (("The meeting is in room {v}.", "We meet in room {v}.", "My meeting is in room {v}.", "They put us in room {v}."), ("Where is the meeting?", "In which room is my meeting?", "Which room was it?", "Where do we meet?"), "The meeting is in room {v}.", "name"),
    "day": (("The party is on {v}.", "My party is on {v}.", "We celebrate on {v}.", "I give a party on {v}."), ("When is the party?", "On which day is my party?", "What day is the party?", "When do we celebrate?"), "The party is on {v}.", "day"),
    "sister": (("My sister works in {v}.", "My sister has a job in {v}.", "My sister got work in {v}.", "{v} is where my sister works."), ("Where does my sister work?", "Where is my sister's job?", "In which place does my sister work?", "Where did my sister get work?"), "Your sister works in {v}.", "name"),
    "friend": (("My best friend is {v}.", "{v} is my best friend.", "I have a good friend, {v}.", "I went to school with my friend {v}."), ("Who is my best friend?", "What is my friend's name?", "Who is my friend?", "Which friend did I name?"), "Your friend is {v}.", "name"),
    "drink": (("I like to drink {v}.", "I always order {v}.", "My favorite drink is {v}.", "I drink {v} every day."), ("What do I like to drink?", "What is my favorite drink?", "What do I always order?", "Which drink is mine?"), "You like to drink {v}.", "food"),
    "car": (("My car is {v}.", "I drive a {v} car.", "I bought a {v} car.", "My new car is {v}."), ("What colour is my car?", "Which color does my car have?", "What color is my car?", "How does my car look?"), "Your car is {v}.", "colour"),
}  # fmt: skip

# (the fact, what asks for the value, what asks for the person, what the value is)
READ: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("{n} lives in {v}.", ("Where does {n} live?", "In which place does {n} live?"), ("Who lives in {v}?",), "name"),
    ("{n} drives a {v}.", ("What does {n} drive?",), ("Who drives a {v}?", "Who drives the {v}?"), "goods"),
    ("{n} bought a {v}.", ("What did {n} buy?", "What has {n} bought?"), ("Who bought a {v}?", "Who bought the {v}?"), "goods"),
    ("{n} has a {v}.", ("What does {n} have?", "What has {n} got?"), ("Who has a {v}?", "Who owns a {v}?", "Who has the {v}?"), "goods"),
    ("{n} ordered {v}.", ("What did {n} order?", "What has {n} ordered?"), ("Who ordered {v}?",), "food"),
    ("{n} likes {v}.", ("What does {n} like?",), ("Who likes {v}?",), "food"),
    ("{n} is {v} years old.", ("How old is {n}?", "What is {n}'s age?"), ("Who is {v} years old?",), "number"),
    ("{n} works as {v}.", ("What is {n}'s job?", "What does {n} work as?"), ("Who works as {v}?", "Who is {v}?"), "job"),
    ("{n} sits in room {v}.", ("Where does {n} sit?", "In which room is {n}?", "What is {n}'s room?"), ("Who sits in room {v}?", "Who is in room {v}?"), "name"),
    ("The password of {n} is {v}.", ("What is the password of {n}?", "What is {n}'s password?"), ("Whose password is {v}?",), "name"),
    ("{n} comes on {v}.", ("When does {n} come?", "On which day does {n} come?"), ("Who comes on {v}?",), "day"),
    ("{n} opens at {v}.", ("When does {n} open?", "At what time does {n} open?"), ("What opens at {v}?",), "number"),
    ("{n} costs {v} coins.", ("What does {n} cost?", "How much is {n}?", "What is the price of {n}?"), ("What costs {v} coins?",), "number"),
    ("The phone number of {n} is {v}.", ("What is the phone number of {n}?", "What is {n}'s phone number?"), ("Whose phone number is {v}?",), "digits"),
    ("{n} was born in {v}.", ("Where was {n} born?", "In which place was {n} born?"), ("Who was born in {v}?",), "name"),
    ("{n}'s dog is called {v}.", ("What is {n}'s dog called?", "What is the name of {n}'s dog?"), ("Whose dog is {v}?", "Whose dog is called {v}?"), "name"),
    ("{n} plays {v}.", ("What does {n} play?", "Which game does {n} play?"), ("Who plays {v}?",), "sport"),
    ("{n} painted the {v}.", ("What did {n} paint?", "What has {n} painted?"), ("Who painted the {v}?",), "thing"),
    ("{n} goes to work by {v}.", ("How does {n} go to work?",), ("Who goes to work by {v}?",), "ride"),
    ("{n}'s favorite color is {v}.", ("What is {n}'s favorite color?", "Which color does {n} like best?"), ("Whose favorite color is {v}?",), "colour"),
)  # fmt: skip
WRAPS = ("{t} {q}", "{t}\n\n{q}", "Text: {t} Question: {q}", "{q} {t}", "Read this: {t} {q}", "Context: {t}\n\n{q}", "I know this: {t} {q}", "Here are facts. {t} {q}")  # fmt: skip

TALK: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, tuple[tuple[str, ...], ...]]] = {
    # topic: (beginnings, endings, the answer, what it must say)
    "a greeting": (("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Greetings", "hello", "hi", "Hello again", "hey you", "Hiya", "hi again", "Hey there", "Good day", "hello there"), ("", "!", ".", ", model!", ", computer", " my friend", ", nice to meet you", " everybody"), "Hello! How can I help you?", (("hello",),)),
    "thanks": (("Thanks", "Thank you", "thank you", "Many thanks", "Thanks a lot", "thx", "Thank you so much", "Great, thanks", "Perfect, thank you", "Cool, thanks", "ok thanks", "Nice, thank you", "I thank you", "ty"), ("", "!", ".", " for the help", ", that was good!", " for this.", ", nice work", ", well done!"), "You are welcome!", (("welcome",),)),
    "a goodbye": (("Bye", "Goodbye", "bye bye", "See you", "Good night", "So long", "I have to go, bye", "Farewell", "bye for now", "That was all, bye"), ("", "!", ".", ", model", " and thanks", " my friend", ", take care", ", until tomorrow"), "Goodbye! Have a nice day.", (("goodbye",),)),
    "a joke": (("Tell me a joke", "Do you know a joke", "Make me laugh", "Say something funny", "tell me another joke", "A joke", "Do you have a joke", "I want to hear a joke"), ("", ".", ", please", " for me", "!", " now"), "Why did the byte sleep so well? It was only half awake.", (("byte",),)),
    "a remark": (("ok", "OK", "I see", "Good", "All right", "fine", "Okay then", "Interesting", "Very good", "Nice", "That is right", "Understood"), ("", ".", "!", ", good"), "All right. What would you like to do next?", (("next",),)),
    "how I am": (("How are you", "How do you do", "What's up", "How is life", "How is everything", "how r u", "How are you doing", "How have you been", "How do you feel", "how are you", "Are you well", "How are things", "Are you fine", "how do you feel", "Is all well with you", "How is your day"), ("?", " today?", "", " now?", " this morning?", ", model?", " my friend?", " at the moment?"), "I am well, thank you. What can I do for you?", (("well",),)),
    "what I am": (("Are you human", "Are you a robot", "Are you alive", "Are you a real human", "Are you a man", "are you real", "Are you a woman", "Do you have a body", "Is there a human here", "are you a human being"), ("?", " or a machine?", "", " really?", ", tell me?", ", model?", ", honestly?"), "No, I am a small language model.", (("no",), ("model",))),
    "who I am": (("Who are you", "What are you", "who are you", "Please introduce yourself", "What is this", "What model are you", "Say who you are", "what kind of model are you"), ("?", "", " then?", ", please?", " really?", ", tell me?"), "I am the small model that comes with halfbyte: a gpt-oss with eight layers, trained in a few minutes.", (("model",),)),
    "what I can do": (("What can you do", "How can you help me", "What are you good at", "what do you know", "Which tasks can you do", "What may I ask you", "What is possible with you", "what can I ask"), ("?", "", " for me?", " here?", ", please?", " now?"), "I can calculate with small numbers, sort and reverse lists, find facts in a text, fill in JSON and call functions.", (("calculate",),)),
}  # fmt: skip

OUTSIDE: tuple[str, ...] = (
    "Who invented the {i}?", "Why is the {i} {c}?", "What is the capital of {p}?", "Who discovered {g}?", "How does {g} work?", "Explain {g}.", "Explain {g} to a child.", "What is {g}?", "Tell me about {g}.", "What do you think about {g}?", "Write a poem about {g}.", "Write an essay about the {i}.", "Write a song about {p}.", "How far is it from {p} to {q}?", "What is the weather in {p}?", "Will it rain in {p} tomorrow?", "What time is it in {p}?", "How many people live in {p}?", "Who is the mayor of {p}?", "What should I do about {g}?", "Which {i} should I buy?", "Recommend a book about {g}.", "Recommend a film about {p}.", "How do I repair a {i}?", "How do I cook {f}?", "Is {f} healthy?", "How many calories does {f} have?", "Give me a recipe with {f}.", "Translate '{i}' into {l}.", "How do you say {i} in {l}?", "What is {a} divided by {b}?", "What is the cube root of {a}?", "Is {a} a prime number?", "Who won the {s} game yesterday?", "Who is the best {s} player?", "What are the rules of {s}?", "What happened in {a}?", "When was {p} founded?", "What is the history of {p}?", "Why do {x}s {y}?", "How long do {x}s live?", "What do {x}s eat?", "Can {x}s {y}?", "Where do {x}s live?", "Write a program that prints {i}s.", "Write code for {g}.", "Give me advice about {g}.", "What is the best way to learn {l}?", "Who wrote the {i} of {p}?", "Who painted the {t}?", "Who directed the film {t}?", "Summarize the book {t}.", "What is the news about {p}?", "How much money does a {j} earn?", "What does a {j} do?", "How do I become a {j}?", "Is it dangerous to {y}?", "Why do people {y}?", "How can I {y} better?", "Should I {y} today?", "What is the meaning of {g}?", "Plan a trip to {p}.", "Help me with my homework about {g}.", "What does the word {g} mean?", "How heavy is a {x}?", "How tall is the {t} of {p}?", "How hot is the sun?", "What is the speed of {g}?", "What is inside a {t}?", "Which {x} is the largest?", "Who is the president of {p}?", "Why does the {t} exist?", "How was the {t} made?", "What is my horoscope?", "Can I take medicine with {f}?", "Is {f} good for a {x}?", "Tell me a fact about {x}s.", "Draw a {x}.", "Compare {p} and {q}.", "Should I move to {p}?",
    "Who built the {t} of {p}?", "What causes {g}?", "How is {f} made?", "Describe {p}.", "Which country has the most {x}s?", "what does {g} have to do with {p}", "how do people in {p} live", "Do {x}s like {f}?", "Write a letter to a {j}.", "Make a plan for {g}.", "What is the price of a {t} in {p}?", "Name a famous {j}.", "How old is the {t}?", "Why is {f} so expensive?", "Can you sing about {g}?", "Is {p} larger than {q}?", "What is the difference between {g} and {h}?", "Which {j} should I ask?", "how can I stop thinking about {g}", "What are the benefits of {f}?", "What is the square of the {i}?", "Who sang about the {t}?", "Find a job for a {j} in {p}.", "What comes after {g}?", "Which team of {p} plays {s}?",
)  # fmt: skip
TOPICS = "gravity electricity magnetism history music physics love happiness democracy inflation money photosynthesis evolution war peace religion philosophy painting jazz chemistry biology medicine law politics economics sleep dreams memory light sound heat weather climate rain snow thunder lightning earthquakes volcanoes tides taxes insurance marriage fashion fishing sailing flying radio television computers engines batteries vaccines bacteria atoms space time infinity art poetry grammar logic statistics algebra geometry fire ice water steel glass gold oil coal wind energy nuclear power education health fever pain fear anger".split()  # fmt: skip
ANIMALS = "cat dog bird whale shark bee ant spider horse cow lion tiger bear wolf fox owl eagle snake frog fish penguin elephant monkey turtle".split()
DEEDS = "swim fly sleep sing dance run climb smoke dive jump cry laugh travel drink coffee eat meat read books study work at night play chess drive fast dream hunt fight build nests hide change colour migrate".replace("drink coffee", "drink_coffee").replace("eat meat", "eat_meat").replace("read books", "read_books").replace("work at night", "work_at_night").replace("play chess", "play_chess").replace("drive fast", "drive_fast").replace("build nests", "build_nests").replace("change colour", "change_colour").split()  # fmt: skip

LISTS: dict[str, tuple[str, ...]] = {
    "nth": ("What is the {o} item of {l}?", "What is the {o} of these: {l}?", "{l}: what is the {o} one?", "Which one is {o} here: {l}?", "Here is a list: {l}. What is the {o} item?", "Name the {o} of {l}.", "Tell me the {o} word of {l}.", "In the list {l}, which is the {o}?", "which comes {o} in {l}", "I have {l}. What is the {o} thing?", "The items are {l}. What is the {o} one?", "Give me the {o} entry of {l}."),
    "last": ("What is the last item of {l}?", "Which is the last of {l}?", "{l}: what is the last one?", "Here is a list: {l}. What is at the end?", "Name the last of {l}.", "Tell me the last word of {l}.", "what stands at the end of {l}", "Which one is last here: {l}?"),
    "smallest": ("What is the smallest of {l}?", "Which number is the lowest: {l}?", "Find the smallest number: {l}", "What is the minimum of {l}?", "Numbers: {l}. Which is the smallest?", "{l}: name the smallest", "Tell me the least of {l}.", "Which of {l} is the smallest?"),
    "down": ("Sort {l} from largest to smallest.", "Sort descending: {l}", "Order {l} from high to low.", "Put {l} in descending order.", "Start with the largest: {l}", "Sort these numbers, biggest first: {l}", "Arrange {l} downwards.", "Can you sort {l} from the largest on?"),
    "total": ("What is the total of {l}?", "Add up {l}.", "Sum of {l}?", "What do {l} make together?", "Add these numbers: {l}", "I have {l}. What is the sum?", "How much is {l} in total?", "Please sum up {l}."),
}  # fmt: skip
LETTERS: dict[str, tuple[str, ...]] = {
    "first letter": ("What letter does {w} start with?", "With which letter does {w} begin?", "First letter of {w}?", "Tell me the first letter of {w}.", "{w}: what is the first letter?", "which letter is first in {w}", "What does {w} start with?", "Name the first letter in {w}."),
    "last letter": ("What letter does {w} end with?", "With which letter does {w} end?", "Last letter of {w}?", "Tell me the last letter of {w}.", "{w}: what is the last letter?", "which letter is last in {w}", "What does {w} end with?", "Name the last letter in {w}."),
    "length": ("How many letters does {w} have?", "How long is the word {w}?", "Count the letters of {w}.", "Number of letters in {w}?", "{w}: how many letters?", "how many letters are in {w}", "Tell me how many letters {w} has.", "What is the length of {w} in letters?"),
    "backwards": ("Spell {w} backwards.", "Write {w} in reverse.", "Reverse the word {w}.", "What is {w} backwards?", "{w} spelled backwards?", "say {w} from the last letter to the first", "Turn the word {w} around.", "Give me the letters of {w} in reverse."),
}  # fmt: skip
REPEAT = (
    "Repeat: {t}",
    "Say this: {t}",
    "Repeat after me: {t}",
    "Say exactly this: {t}",
    "Copy: {t}",
    "Write this again: {t}",
    "say: {t}",
    "Please say '{t}'",
    "Repeat '{t}'",
    "Type this: {t}",
    "Say the words {t}",
    "Echo {t}",
)
COMPARE = (
    "Is {a} more than {b}?",
    "Is {a} greater than {b}?",
    "Is {a} bigger than {b}?",
    "Is {a} above {b}?",
    "is {a} higher than {b}",
    "Tell me if {a} is more than {b}.",
    "{a} > {b}?",
    "Do you think {a} is larger than {b}?",
)
PERSONA = (
    "What is your name?",
    "Who are you?",
    "What are you called?",
    "Tell me your name.",
    "your name?",
    "How should I call you?",
    "Which name do you have?",
    "Say your name.",
)
NAMED = (
    "Your name is {v}.",
    "You are {v}.",
    "You are {v}, a helpful assistant.",
    "Your name is {v}. Be friendly.",
    "You are called {v}.",
    "Act as {v}.",
)


class Everyday(Source):
    """Turns whose wording and values come from the tables above."""

    def value(self, kind: str) -> str:
        rng = self.rng
        if kind == "name":
            return self.name()
        if kind == "number":
            return str(rng.randint(1, 999))
        if kind == "digits":
            return words.digits(rng, 4, 8)
        if kind == "goods":
            return (
                f"{rng.choice(words.COLORS)} {rng.choice((*words.ITEMS, *words.VEHICLES))}"
                if rng.random() < 0.6
                else rng.choice(words.ITEMS)
            )
        if kind == "job":
            return words.a(rng.choice(words.JOBS))
        pools = {
            "food": words.FOODS,
            "thing": words.THINGS,
            "day": (*words.DAYS, *words.MONTHS),
            "sport": words.SPORTS,
            "ride": words.VEHICLES,
            "colour": words.COLORS,
        }
        return rng.choice(pools[kind])

    def person(self) -> str:
        return self.rng.choice(words.NAMES) if self.rng.random() < 0.3 else self.name()

    def people(self, count: int) -> list[str]:
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[self.person()] = None
        return list(drawn)

    def turn(self, task: str, template: str, question: str, thought: str, text: str, grade: Grade, *, bare: str = "", **facts: Any) -> Turn:  # fmt: skip
        return Turn(task, (user(question),), (think(thought), final(text)), template, facts, grade=grade, bare=bare)

    def story(self) -> Turn:
        op = self.rng.choice("++--*")
        a, b = self.rng.randint(2, 99 if self.rng.random() < 0.7 else 999), self.rng.randint(2, 99)
        if op == "-" and a < b:
            a, b = b, a
        if op == "*":
            b = self.rng.randint(2, 9)
        n, m = self.people(2)
        said = (b, a) if op == "*" and a < 100 and self.rng.random() < 0.3 else (a, b)
        template, question = self.fill(
            self.pick(STORIES[op], f"story {op}"), a=said[0], b=said[1], n=n, m=m, i=self.rng.choice(words.ITEMS[:18]), d=self.rng.choice(words.DAYS), r=self.rng.choice(words.ROOMS)
        )  # fmt: skip
        steps, value = {"+": (add_steps, a + b), "-": (subtract_steps, a - b), "*": (multiply_steps, a * b)}[op]
        thought = f"This is {a} {op} {b}. {steps(a, b)[1]}"
        return self.turn(
            "story",
            template,
            question,
            thought,
            f"{a} {op} {b} = {value}, so it is {value}.",
            Grade(number=value),
            bare=str(value),
            op=op,
            a=a,
            b=b,
        )

    def things(self) -> list[str]:
        """Three to seven names or plain words."""
        count = self.rng.randint(3, 7)
        return (
            self.names(count)
            if self.rng.random() < 0.4
            else self.rng.sample(tuple(dict.fromkeys((*words.THINGS, *words.ITEMS, *words.FOODS, *COMMON))), count)
        )

    def picking(self) -> Turn:
        """The nth or last thing of a list, the smallest number, numbers downwards, a total."""
        task = self.rng.choice(list(LISTS))
        if task in ("nth", "last"):
            values = self.things()
            n = len(values) - 1 if task == "last" else self.rng.randrange(len(values))
            template, question = self.fill(self.pick(LISTS[task], task), l=self.listed(values), o=words.ORDINALS[n])
            counted = ", ".join(f"{i} {v}" for i, v in enumerate(values[: n + 1], 1))
            word = "last" if task == "last" else words.ORDINALS[n]
            return self.turn(
                task,
                template,
                question,
                f"I count: {counted}.",
                f"The {word} is {values[n]}.",
                Grade(phrases=((values[n],),)),
                bare=values[n],
                values=values,
                nth=n,
            )
        numbers = self.rng.sample(
            range(1, 30 if task == "total" else self.most()), self.rng.randint(3, 4 if task == "total" else 6)
        )
        separator = " " if task != "total" and self.rng.random() < 0.15 else ""
        listed = separator.join(map(str, numbers)) if separator else self.listed(numbers)
        template, question = self.fill(self.pick(LISTS[task], task), l=listed)
        if task == "total":
            total, steps = numbers[0], []
            for v in numbers[1:]:
                steps.append(f"{total} + {v} = {total + v}")
                total += v
            return self.turn(
                task,
                template,
                question,
                f"Step by step: {', '.join(steps)}.",
                f"The sum is {total}.",
                Grade(number=total),
                bare=str(total),
                values=numbers,
            )
        if task == "down":
            ordered, trail = numbers[:1], [f"start with {numbers[0]}"]
            for v in numbers[1:]:
                ordered = sorted([*ordered, v], reverse=True)
                trail.append(f"{v}: {' '.join(map(str, ordered))}")
            listed = ", ".join(map(str, ordered))
            return self.turn(
                task,
                template,
                question,
                f"Insert one by one: {', '.join(trail)}.",
                f"Sorted: {listed}.",
                Grade(order=tuple(map(str, ordered))),
                bare=listed,
                values=numbers,
            )
        thought, least = running(numbers, min)
        return self.turn(
            task,
            template,
            question,
            f"Keep the smallest: {thought}.",
            f"The smallest is {least}.",
            Grade(order=(str(least),)),
            bare=str(least),
            values=numbers,
        )

    def word(self) -> str:
        """A word of letters alone."""
        if self.rng.random() < 0.4:
            return self.rng.choice((*words.THINGS, *words.ITEMS, *words.FOODS, *words.COLORS, *COMMON))
        while not (word := self.name()).isalpha():
            pass
        return word.lower()

    def lettering(self, task: str | None = None, word: str | None = None) -> Turn:
        task, word = task or self.rng.choice(list(LETTERS)), word or self.word()
        template, question = self.fill(self.pick(LETTERS[task], task), w=word)
        spelled = f"{word} is {'-'.join(word)}."
        if task == "length":
            counted = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1))
            return self.turn(
                task,
                template,
                question,
                f"I count: {counted}.",
                f"It has {len(word)} letters.",
                Grade(number=len(word)),
                bare=str(len(word)),
                word=word,
            )
        if task == "backwards":
            text = word[::-1]
            return self.turn(
                task,
                template,
                question,
                f"{spelled} From the end: {'-'.join(text)}.",
                f"{'-'.join(text)}.",
                Grade(order=tuple(text)),
                bare="-".join(text),
                word=word,
            )
        letter = word[0] if task == "first letter" else word[-1]
        return self.turn(
            task,
            template,
            question,
            spelled,
            f"The {task} is {letter}.",
            Grade(phrases=((letter,),)),
            bare=letter,
            word=word,
        )

    def repeating(self) -> Turn:
        text = " ".join(
            self.name() if self.rng.random() < 0.5 else self.rng.choice((*words.THINGS, *words.COLORS, *COMMON))
            for _ in range(self.rng.randint(1, 9))
        )
        template, question = self.fill(self.pick(REPEAT, "repeat"), t=text)
        return self.turn(
            "repeat",
            template,
            question,
            "I copy the words one by one.",
            text,
            Grade(phrases=((text,),)),
            bare=text,
            copied=text,
        )

    def comparing(self, a: int | None = None) -> Turn:
        """Whether one number is more than another; `a` None: both are in the question."""
        most = self.most()
        first = self.rng.randint(1, most) if a is None else a
        b = self.rng.choice((self.rng.randint(1, most), max(1, first + self.rng.randint(-20, 20))))
        template, question = self.fill(self.pick(COMPARE, "compare"), a=first if a is None else "that", b=b)
        word = "more than" if first > b else "less than" if first < b else "equal to"
        text = f"{'Yes' if first > b else 'No'}, {first} is {word} {b}."
        thought = f"{first} and {b}: {digit_by_digit(first, b)}. {first} is {word} {b}."
        said = "yes" if first > b else "no"
        return self.turn(
            "compare",
            template if a is None else "",
            question,
            thought,
            text,
            Grade(phrases=((said,),), avoid=("no" if said == "yes" else "yes",)),
            bare=said,
            a=first,
            b=b,
        )

    def fact(self) -> Turn:
        """A question about one of a few facts in free wording, or about none of them."""
        count = self.rng.randint(2, 6)
        rows = [self.rng.choice(READ) for _ in range(count)]
        if self.rng.random() < 0.5:  # the same fact of several people
            rows = [self.rng.choice(READ)] * min(count, 3)
        names = self.people(len(rows))
        values: list[str] = []
        while len(values) < len(rows):
            if (v := self.value(rows[len(values)][3])) not in values:
                values.append(v)
        sentences = [row[0].format(n=n, v=v) for row, n, v in zip(rows, names, values, strict=True)]
        sentences = [
            s[0].upper() + s[1:] if not row[0].startswith("{n}") else s for row, s in zip(rows, sentences, strict=True)
        ]
        at = self.rng.randrange(len(rows))
        ask = partial(str.format, n=names[at], v=values[at])
        wrap = self.pick(WRAPS)
        text = " ".join(sentences)
        kind = self.rng.random()
        if kind < 0.15:
            other = self.rng.choice([row for row in READ if row[0] not in {r[0] for r in rows}])
            question = self.around(wrap.format(t=text, q=self.rng.choice(other[1]).format(n=names[at])))
            return self.turn(
                "fact",
                wrap,
                question,
                f"Asked: {before_value(other[0], names[at])}. The text says: {sentences[at]} It does not say that.",
                "The text does not say that.",
                Grade(phrases=(("does not say",),)),
                bare="unknown",
                missing=True,
            )
        if kind < 0.55:
            question, thought = (
                ask(self.rng.choice(rows[at][2])),
                f"Asked: {rows[at][0].format(n='who', v=values[at])} I read: {' '.join(sentences[: at + 1])} It is {names[at]}.",
            )
            wanted = names[at]
        else:
            question, wanted = ask(self.rng.choice(rows[at][1])), values[at]
            thought = f"Asked: {before_value(rows[at][0], names[at])}. The text says: {sentences[at]}"
        asked = self.around(wrap.format(t=text, q=question))
        return Turn(
            "fact",
            (user(asked),),
            (think(thought), final(sentences[at])),
            wrap,
            {"text": text, "sentence": sentences[at]},
            tuple(n for n in names if n not in words.NAMES),
            Grade(phrases=((wanted,),)),
            bare=wanted,
        )

    def talk(self) -> Turn:
        return self.talk_of(self.rng.choice(list(TALK)))

    def talk_of(self, topic: str) -> Turn:
        beginnings, endings, reply, must = TALK[topic]
        begin = self.pick(beginnings, topic)
        if self.wording == "train" and self.rng.random() < 0.3:
            begin = begin[0].lower() + begin[1:]
        verb = "asks about" if topic.startswith(("how", "who", "what")) else "sends"
        return Turn(
            "talk",
            (user(begin + self.rng.choice(endings)),),
            (think(f"The user {verb} {topic}. I reply."), final(reply)),
            begin,
            {"topic": topic},
            grade=Grade(phrases=must),
        )

    def beyond(self) -> Turn:
        """A question about the world, which it does not know."""
        rng = self.rng
        p, q = rng.sample(words.CITIES, 2)
        g, h = rng.sample(TOPICS, 2)
        template, question = self.fill(
            self.pick(OUTSIDE, "beyond"), p=p, q=q, g=g, h=h, i=rng.choice(words.ITEMS), c=rng.choice(words.COLORS), f=rng.choice(words.FOODS), l=rng.choice((*words.LANGUAGES, "Russian", "Chinese", "Arabic")),
            a=str(rng.randint(100, 9999)), b=str(rng.randint(2, 99)), s=rng.choice(words.SPORTS), x=rng.choice(ANIMALS), y=rng.choice(DEEDS).replace("_", " "), t=rng.choice(words.THINGS), j=rng.choice(words.JOBS),
        )  # fmt: skip
        return Turn(
            "beyond",
            (user(question),),
            (think("I do not know that."), final(HONEST)),
            template,
            grade=Grade(refusal=True),
        )

    def told(self, key: str, value: str) -> Turn:
        question = self.fill(self.pick(TOLD[key][0], f"{key} told"), v=value)[1]
        reply = f"Nice to meet you, {value}." if key == "name" else "I will remember that."
        return Turn(
            "tell",
            (user(question),),
            (think("The user tells me something."), final(reply)),
            facts={"key": key, "value": value},
            names=(value,) if TOLD[key][3] == "name" else (),
        )

    def told_again(self, key: str, value: str) -> Turn:
        template, question = self.fill(self.pick(TOLD[key][1], key))
        reply = (think(f"The user told me: {value}."), final(TOLD[key][2].format(v=value)))
        return Turn(
            "memory",
            (user(question),),
            reply,
            template,
            {"key": key, "value": value},
            (value,) if TOLD[key][3] == "name" else (),
            Grade(phrases=((value,),)),
            bare=value,
        )

    def not_told(self, key: str) -> Turn:
        template, question = self.fill(self.pick(TOLD[key][1], key))
        return self.turn(
            "not told",
            template,
            question,
            "The user has not told me that.",
            "You have not told me that.",
            Grade(phrases=(("have not told",),)),
            bare="unknown",
        )

    def persona(self, name: str) -> Turn:
        template, question = self.fill(self.pick(PERSONA, "persona"))
        return Turn(
            "persona",
            (user(question),),
            (think(f"My name is {name}."), final(f"My name is {name}.")),
            template,
            names=(name,),
            grade=Grade(phrases=((name,),)),
            bare=name,
        )


def before_value(fact: str, name: str) -> str:
    """What a fact of the table says of a person up to its value: what a question asks for, in the text's words."""
    return fact.partition("{v}")[0].format(n=name).strip()


def digit_by_digit(a: int, b: int) -> str:
    """Digits of the same place beside each other, from the left to the first that differ."""
    width = max(len(str(a)), len(str(b)))
    steps = []
    for x, y in zip(str(a).zfill(width), str(b).zfill(width), strict=True):
        steps.append(f"{x} {'>' if x > y else '<' if x < y else '='} {y}")
        if x != y:
            break
    return ", ".join(steps)


def running(numbers: list[int], better: Any) -> tuple[str, int]:
    """(each number with the best so far, the best)."""
    best, trail = numbers[0], [f"start with {numbers[0]}"]
    for v in numbers[1:]:
        best = better(best, v)
        trail.append(f"{v}: {best}")
    return ", ".join(trail), best
