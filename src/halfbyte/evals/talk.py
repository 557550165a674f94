"""Problems of conversation: small talk, and remembering what the user said some turns ago."""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

from random import Random

from halfbyte.evals import words
from halfbyte.evals.problem import EFFORTS, Frame, Problem, Say, answered, final, name_tag, think, user

SMALL_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("Hello", "Hello!", "Hi", "hi", "Hi there!", "hello", "Hey", "Good morning", "Good evening!", "Hello, model!"),
     "a greeting", "Hello! How can I help you?"),
    (("How are you?", "how are you", "How do you do?", "Are you well?", "Hi, how are you?", "Hello, how are you?"),
     "how I am", "I am well, thank you. What can I do for you?"),
    (("Who are you?", "who are you", "What are you?", "Tell me about yourself.", "What is your name?", "Introduce yourself."),
     "who I am", "I am the small model that comes with halfbyte: a gpt-oss with eight layers, trained in a few minutes."),
    (("What can you do?", "what can you do", "How can you help me?", "What are you good at?", "Help", "help me", "What should I ask you?"),
     "what I can do", "I can calculate with small numbers, sort and reverse lists, find facts in a text, fill in JSON and call functions."),
    (("Thank you", "Thanks!", "thanks", "Thank you very much.", "Great, thanks."), "thanks", "You are welcome!"),
    (("Bye", "Goodbye!", "bye", "See you later.", "Good night."), "a goodbye", "Goodbye! Have a nice day."),
    (("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"),
     "who made me", "I was trained from scratch by the authors of halfbyte, on conversations made by a program."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
     "a joke", "Why did the byte sleep so well? It was only half awake."),
    (("Tell me a story.", "Can you tell a story?", "Tell me something."),
     "a story", "Once a small model lived in a big machine. It was asked one thing at a time, and it answered. That was enough."),
    (("Can you write code?", "Do you know Python?", "Write a program.", "Can you program?"),
     "code", "I am too small to write code. I can calculate, sort, look things up and call functions."),
    (("What is the capital of France?", "Who won the world cup?", "What is the meaning of life?", "What is love?",
      "Who is the president?", "When did the war end?", "Explain gravity.", "What do you know about history?"),
     "knowledge", "I do not know that. I am a small model and know only what is in our conversation."),
    (("Are you a human?", "Are you alive?", "Are you a robot?", "Are you real?"),
     "what I am", "No, I am a small language model."),
    (("ok", "OK", "Okay.", "I see.", "Good.", "Yes", "No"), "a remark", "All right. What would you like to do next?"),
)  # fmt: skip


def chat(rng: Random, frame: Frame) -> Problem:
    asks, topic, reply = rng.choice(SMALL_TALK)
    thoughts = (
        "Small talk.",
        f"The user sends {topic}. I reply.",
        f"The user sends {topic}. This needs no calculation. I reply in a friendly way.",
    )
    if topic.startswith(("how", "who", "what", "code", "knowledge")):
        thoughts = (
            thoughts[0],
            f"The user asks about {topic}. I reply.",
            f"The user asks about {topic}. This needs no calculation. I reply in a friendly way.",
        )
    return answered("chat", rng.choice(asks), frame, thoughts, reply, reply)


_ABOUT: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str]] = {
    # key: how the user says it, how the user asks later, the answer, what was not told
    "name": (("My name is {v}.", "I am called {v}.", "Hi, I am {v}."), ("What is my name?", "Who am I?", "Do you remember my name?"), "Your name is {v}.", "your name"),
    "city": (("I live in {v}.", "My home is {v}."), ("Where do I live?", "Which city do I live in?"), "You live in {v}.", "where you live"),
    "color": (("My favorite color is {v}.", "I like {v} best of all colors."), ("What is my favorite color?", "Which color do I like best?"), "Your favorite color is {v}.", "your favorite color"),
    "pet": (("I have a pet {v}.", "My pet is a {v}."), ("What pet do I have?", "Which animal do I have?"), "You have a pet {v}.", "what pet you have"),
    "number": (("Remember the number {v}.", "My number is {v}.", "Please keep the number {v} in mind."), ("What was the number?", "Which number did I tell you?", "What is my number?"), "The number is {v}.", "a number"),
    "food": (("I like to eat {v}.", "My favorite food is {v}."), ("What do I like to eat?", "What is my favorite food?"), "You like to eat {v}.", "what you like to eat"),
}  # fmt: skip


def _value(rng: Random, key: str) -> str:
    if key == "name":
        return words.person(rng)
    if key == "city":
        return words.city(rng)
    if key == "number":
        return words.digits(rng, 2, 6)
    return rng.choice({"color": words.COLORS, "pet": words.PETS, "food": words.FOODS}[key])


def memory(rng: Random, frame: Frame, between: list[Problem]) -> Problem:
    """Some turns that tell things, with other turns `between`; then a question about one of them, or about none."""
    keys = rng.sample(list(_ABOUT), rng.randint(1, 4))
    facts = {key: _value(rng, key) for key in keys}
    blocks: list[tuple[Say, ...]] = []
    for key, v in facts.items():
        reply = f"Nice to meet you, {v}." if key == "name" else rng.choice(("I will remember that.", "Good to know."))
        blocks.append((user(rng.choice(_ABOUT[key][0]).format(v=v)), final(reply)))
    for other in between:
        blocks.insert(rng.randint(0, len(blocks)), (*other.turns, other.reply[-1]))
    missing = [key for key in _ABOUT if key not in facts]
    topic = rng.choice(missing) if rng.random() < 0.25 else rng.choice(keys)
    question = rng.choice(_ABOUT[topic][1])
    if topic in facts:
        answer = _ABOUT[topic][2].format(v=facts[topic])
        bare, thought = facts[topic], f"The user told me: {facts[topic]}."
    else:
        answer, bare, thought = f"You have not told me {_ABOUT[topic][3]}.", "unknown", "The user has not told me that."
    longer = f"I look back at the conversation. {thought}"
    solved = answered("memory", question, frame, (thought, thought, longer), answer, bare)
    turns = tuple(say for block in blocks for say in block) + solved.turns
    vocabulary = (*words.NAMES, *words.CITIES, *(v for key, v in facts.items() if key not in ("name", "city")))
    tags = ("told" if topic in facts else "not told", name_tag(facts.values(), vocabulary))
    return Problem("memory", turns, solved.reply, "text", solved.accept, None, frame, tags=tags)


def remark(rng: Random, frame: Frame) -> Problem:
    """The user tells something about themselves; the model takes note."""
    key = rng.choice(list(_ABOUT))
    v = _value(rng, key)
    reply = f"Nice to meet you, {v}." if key == "name" else "I will remember that."
    thought = (
        "Take note.",
        "The user tells me something. I take note.",
        "The user tells me something. I take note of it for later.",
    )
    statement = user(rng.choice(_ABOUT[key][0]).format(v=v))
    return Problem(
        "chat",
        (statement,),
        (think(thought[EFFORTS.index(frame.effort or "medium")]), final(reply)),
        "text",
        (reply,),
        None,
        frame,
    )
