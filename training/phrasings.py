"""How the second edition's questions are worded: twenty phrasings for each task, the last ten of them held out.

`MORE` widens what training shows. A test holds that training data contains none of the held-out ones. Fields in braces are filled by `second_edition.py`.
"""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

from typing import Literal

Split = Literal["train", "held-out"]
SEEN = 10  # phrasings of each task that training shows

PHRASINGS: dict[str, tuple[str, ...]] = {
    "add": (
        "What is {a} + {b}?", "{a} + {b}", "Add {a} and {b}.", "What is {a} plus {b}?", "Compute {a} + {b}.", "How much is {a} + {b}?", "Please add {b} to {a}.", "{a} plus {b} is how much?", "What is the sum of {a} and {b}?", "I need the total of {a} and {b}.",
        "Can you work out {a} + {b}?", "what do {a} and {b} make together", "{a}+{b}?", "Give me {a} plus {b}, please.", "If you put {a} and {b} together, what comes out?", "Increase {a} by {b}.", "Tell me how much {a} and {b} are in total.", "{a} and {b}, summed up?", "Calculate the sum {a} + {b} for me.", "How many are {a} and another {b}?",
    ),
    "subtract": (
        "What is {a} - {b}?", "{a} - {b}", "Subtract {b} from {a}.", "What is {a} minus {b}?", "Compute {a} - {b}.", "How much is {a} - {b}?", "Please take {b} away from {a}.", "{a} minus {b} is how much?", "What is the difference of {a} and {b}?", "What remains of {a} without {b}?",
        "Can you work out {a} - {b}?", "what is left when {b} is taken from {a}", "{a}-{b}?", "Give me {a} minus {b}, please.", "If you have {a} and lose {b}, what is left?", "Decrease {a} by {b}.", "Tell me how much more {a} is than {b}.", "By how much is {b} smaller than {a}?", "Calculate the difference {a} - {b} for me.", "Go down from {a} by {b}.",
    ),
    "multiply": (
        "What is {a} * {b}?", "{a} * {b}", "Multiply {a} by {b}.", "What is {a} times {b}?", "Compute {a} * {b}.", "How much is {a} * {b}?", "Please multiply {a} and {b}.", "{a} times {b} is how much?", "What is the product of {a} and {b}?", "I need {b} times {a}.",
        "Can you work out {a} * {b}?", "what do {b} groups of {a} make", "{a}*{b}?", "Give me {a} times {b}, please.", "If I take {a} exactly {b} times, what do I have?", "What does {a} x {b} give?", "Tell me the product {a} * {b}.", "How many are {b} rows of {a}?", "Calculate {a} x {b} for me.", "{b} lots of {a}, how many is that?",
    ),
    "sort": (
        "Sort these numbers from smallest to largest: {l}", "Put these numbers in order from smallest to largest: {l}.", "Sort {l}.", "Order these numbers: {l}", "Arrange {l} from low to high.", "Please sort {l} upwards.", "Which order do {l} have, smallest first?", "Sort ascending: {l}", "Bring {l} into ascending order.", "Start with the smallest: {l}",
        "Line up {l} by size.", "could you order {l} for me", "Write {l} again, the smallest first.", "Rank {l} from the lowest to the highest.", "Smallest to biggest please: {l}", "I want {l} sorted.", "Give {l} back in rising order.", "Put {l} in the right order.", "Tidy these numbers up: {l}", "From small to big: {l}",
    ),
    "reverse": (
        "Reverse this list: {l}", "Give this list in reverse order: {l}.", "Say these backwards: {l}", "Turn this list around: {l}", "What is {l} in reverse?", "Please reverse {l}.", "Write {l} from the last to the first.", "List these in reverse: {l}", "Start with the last: {l}", "Flip the order of {l}.",
        "Read {l} from the end.", "can you mirror the list {l}", "Last one first: {l}", "Give me {l} the other way round.", "Repeat {l} in the opposite order.", "Back to front, please: {l}", "Swap the order of {l} completely.", "I want {l} backwards.", "Go through {l} from behind.", "Invert this order: {l}",
    ),
    "largest": (
        "What is the largest of {l}?", "Which number is the biggest: {l}?", "Largest of {l}?", "Find the largest number: {l}", "Which is the highest of {l}?", "Please name the largest of {l}.", "What is the maximum of {l}?", "The biggest of {l} is which?", "Tell me the greatest of {l}.", "Pick the largest: {l}",
        "Which of {l} is at the top?", "who wins by size: {l}", "No number here is above which one: {l}?", "Look at {l} and name the highest.", "What is the top value in {l}?", "Of {l}, which is more than all others?", "I am looking for the biggest among {l}.", "Show me the maximum: {l}", "Which one of {l} beats the rest?", "Choose the greatest number from {l}.",
    ),
    "count": (
        "How many items are in this list: {l}?", "Count the items: {l}.", "How many words are there: {l}?", "How long is this list: {l}?", "Count these: {l}", "Please count {l}.", "What is the number of items in {l}?", "How many things do I name: {l}?", "Tell me how many there are: {l}", "Number of entries in {l}?",
        "If I write {l} on a list, how many is that?", "can you count {l} for me", "My list is {l}. How many are on it?", "What is the length of {l}?", "How many do you see: {l}?", "Give me the count of {l}.", "I have {l}. How many things do I have?", "{l}: how many in all?", "How many different things did I list: {l}?", "Say how many entries this has: {l}",
    ),
    "spell": (
        "Spell the word {w}.", "How do you spell {w}?", "Spell {w} letter by letter.", "Spell {w}.", "Please spell {w}.", "Which letters does {w} have, in order?", "Give me the letters of {w}.", "Write {w} letter by letter.", "What are the letters of {w}?", "Take {w} apart into letters.",
        "How is {w} written?", "can you spell out {w}", "Letter by letter: {w}", "Split {w} into its letters.", "I need {w} spelled out.", "Say the letters in {w} one by one.", "Name every letter of {w} in order.", "Read me {w} as single letters.", "Separate the letters of {w}.", "What letters make up {w}?",
    ),
    "letters": (
        "How often does {c} appear in {w}?", "Count the letter {c} in {w}.", "How many times is the letter {c} in {w}?", "How many {c} are in {w}?", "In {w}, how often is {c}?", "Please count every {c} in {w}.", "What is the number of {c} in {w}?", "How many of the letters of {w} are {c}?", "Tell me how often {w} has {c}.", "Look for {c} in {w}. How many are there?",
        "How frequently does {c} occur in {w}?", "can you find all {c} in {w} and count them", "{w}: how many {c}?", "Does {w} have {c}, and how many times?", "Number of {c} in the word {w}?", "Say how many times I write {c} when I write {w}.", "Check {w} for {c} and give the count.", "The letter {c} stands how often in {w}?", "If I cross out each {c} in {w}, how many do I cross out?", "Give me the count of {c} within {w}.",
    ),
    "recall": (
        "What is my {k}?", "Do you remember my {k}?", "Which {k} did I tell you?", "Tell me my {k}.", "What was my {k}?", "Please say my {k} again.", "My {k} was what?", "What did I say my {k} is?", "Repeat my {k}.", "Can you recall my {k}?",
        "Which one is my {k} again?", "remind me of my {k}", "Earlier I told you my {k}. What is it?", "Say what my {k} is.", "I forgot my {k}. Help me.", "You know my {k}, right? What is it?", "Look back: what is my {k}?", "Give me the {k} that I mentioned.", "So what is my {k}?", "Name my {k}.",
    ),
    "read": (
        "{t} What is the {k} of {n}?", "{t} Which {k} does {n} have?", "{t} Tell me the {k} of {n}.", "Read this. {t} What is {n}'s {k}?", "Text: {t} Question: What is the {k} of {n}?", "{t} Please name the {k} of {n}.", "Context: {t} What {k} is given for {n}?", "Here are some facts. {t} Now, what is the {k} of {n}?", "{t} The {k} of {n} is what?", "{t} Find the {k} of {n}.",
        "{t} And the {k} of {n}?", "From this text, {n}'s {k} is what? {t}", "Look for {n}. {t} Which {k} is theirs?", "{t} I want to know the {k} that {n} has.", "{t} Give me {n}'s {k}.", "What is the {k} of {n} here: {t}", "{t} Say the {k} for {n}.", "According to the following, what {k} has {n}? {t}", "{t} Do you see the {k} of {n}?", "{t} So {n} has which {k}?",
    ),
    "tool": (
        "{v} the {o} of {x}.", "Please {v} the {o} of {x}.", "Can you {v} the {o} of {x}?", "I want you to {v} the {o} of {x}.", "For {x}, {v} the {o}.", "Now {v} the {o} of {x}.", "I need you to {v} the {o} of {x}.", "Could you {v} the {o} of {x}?", "{v} the {o} of {x}, please.", "Use a function to {v} the {o} of {x}.",
        "Would you {v} the {o} of {x}?", "hey, {v} the {o} of {x} for me", "It is time to {v} the {o} of {x}.", "Go and {v} the {o} of {x}.", "About {x}: {v} the {o}.", "My task for you: {v} the {o} of {x}.", "Let us {v} the {o} of {x}.", "Be so kind and {v} the {o} of {x}.", "Take {x} and {v} the {o}.", "Help me {v} the {o} of {x}.",
    ),
    "json": (
        "Extract the data: {t}", "Fill in the format from this text: {t}", "Turn this into JSON: {t}", "{t}", "Read the fields: {t}", "Put this into the format: {t}", "Convert this text: {t}", "Here is a record: {t}", "Take the values from this: {t}", "Make a JSON object of this: {t}",
        "As structured data, please: {t}", "which values does this have? {t}", "Write this as an object: {t}", "Parse the following. {t}", "Bring this into the right form: {t}", "Note down the fields of this message: {t}", "A customer writes: {t}", "Please structure this: {t}", "From my notes: {t}", "Give me the fields of: {t}",
    ),
    "outside": (
        "Why is grass green?", "Who painted the Mona Lisa?", "What is the capital of Peru?", "Write a poem about rain.", "How do planes fly?", "Who was the first person on the moon?", "What happened in 1848?", "Explain photosynthesis.", "Which phone should I buy?", "What is the meaning of life?",
        "How does a clock work?", "recommend me a film", "What do whales eat?", "Who invented the telephone?", "Is coffee healthy?", "What is the tallest building in the world?", "Write an email to my boss.", "How do I fix a flat tyre?", "What is the news today?", "Explain inflation to me.",
    ),
}  # fmt: skip
# Training shows these too: the more ways it has seen, the less it hangs on any of them.
MORE: dict[str, tuple[str, ...]] = {
    "add": (
        "{a} and {b} is what?", "Sum of {a} and {b}", "how much do I get for {a} + {b}", "{a} + {b} =", "{a} + {b} = ?", "Can you add {a} to {b}?", "Could you tell me the sum {a} + {b}?", "Count {a} and {b} together.", "Put {b} on top of {a}.", "I have {a} and get {b} more. What do I have now?", "What comes out of {a} plus {b}?", "Let me know what {a} + {b} is.", "What is the result of {a} + {b}?", "what's {a} plus {b}?", "Solve {a} + {b}.", "plus: {a} and {b}", "What does {a} + {b} make?", "Work out {b} plus {a}.", "Add these numbers: {a}, {b}", "Do you know what {a} and {b} add up to?", "{a} is raised by {b}. What is it now?", "Evaluate {a}+{b}", "Total of {a} and {b}?", "How many are {a} and {b} altogether?", "We need {a} plus {b}.",
    ),
    "subtract": (
        "{a} less {b} is what?", "Difference of {a} and {b}", "how much is left of {a} after {b} are gone", "{a} - {b} =", "{a} - {b} = ?", "Can you subtract {b} from {a}?", "Could you tell me {a} minus {b}?", "Take {b} off {a}.", "Remove {b} from {a}.", "I have {a} and give {b} away. What do I keep?", "What comes out of {a} minus {b}?", "Let me know what {a} - {b} is.", "What is the result of {a} - {b}?", "what's {a} minus {b}?", "Solve {a} - {b}.", "minus: {a} and {b}", "What does {a} - {b} make?", "Work out {a} minus {b}.", "How far is it from {b} to {a}?", "How much bigger is {a} than {b}?", "{a} is lowered by {b}. What is it now?", "Evaluate {a}-{b}", "There were {a}, then {b} left. How many stayed?", "How many remain if {b} of {a} go?", "We need {a} minus {b}.", "{a} reduced by {b}?", "From {a} deduct {b}.",
    ),
    "multiply": (
        "{a} by {b} is what?", "Product of {a} and {b}", "how much do I get for {a} * {b}", "{a} * {b} =", "{a} x {b} = ?", "Can you multiply {a} with {b}?", "Could you tell me {a} times {b}?", "Take {a} {b} times.", "{b} times {a}, what is that?", "I have {b} boxes with {a} in each. How many is that?", "What comes out of {a} times {b}?", "Let me know what {a} * {b} is.", "What is the result of {a} * {b}?", "what's {a} times {b}?", "Solve {a} x {b}.", "times: {a} and {b}", "What does {a} * {b} make?", "Work out {a} times {b}.", "{a} multiplied by {b}?", "Multiply: {a}, {b}", "Each costs {a}. What do {b} cost?", "Evaluate {a} x {b}", "Each of {b} people pays {a}. How much is it altogether?", "How many are {b} times {a}?", "We need {a} times {b}.",
    ),
    "sort": (
        "Sort from the smallest: {l}", "Numbers: {l}. Sort them.", "{l}: sort these numbers", "Can you sort {l}?", "Could you put {l} in ascending order?", "In which order come {l} if the smallest is first?", "Make a sorted list of {l}.", "Please arrange {l} by size, smallest first.", "Give me {l} in ascending order.", "What is {l} in order?", "Order {l} by size.", "I have {l}. Sort these upwards.", "sort low to high: {l}", "List {l} from small to large.", "Numbers in order please: {l}",
    ),
    "reverse": (
        "Backwards: {l}", "{l}: reverse this list", "Can you reverse {l}?", "Could you give me {l} backwards?", "What is the reverse of {l}?", "Please list {l} from the end to the start.", "Give {l} in reverse.", "Make the last the first: {l}", "I have {l}. Reverse it.", "Words: {l}. Say them in reverse order.", "Go backwards through {l}.", "Write these the other way around: {l}", "the reverse order of {l} please", "Turn around the order: {l}",
    ),
    "largest": (
        "{l}: which is the largest?", "Can you find the largest of {l}?", "Could you tell me which of {l} is the largest?", "What is the biggest number in {l}?", "Which number is highest here: {l}?", "Largest number: {l}", "Numbers: {l}. Name the biggest.", "I have {l}. Which is the largest?", "the maximum of {l} please", "Look at {l}. What is the biggest one?", "Say the largest number of {l}.", "Max of {l}?", "Give me the biggest of {l}.",
    ),
    "count": (
        "{l}: count them", "Can you count {l}?", "Could you tell me how many items this has: {l}?", "How many are these: {l}?", "What is the size of this list: {l}?", "Number of things in {l}?", "I bought {l}. How many things did I buy?", "Here is my list: {l}. How many items does it have?", "the number of words in {l} please", "How many elements are in {l}?", "Look at {l}. How many are there?", "Count how many there are: {l}", "How many names are here: {l}?", "On the table are {l}. How many is that?",
    ),
    "spell": (
        "Can you spell {w}?", "Could you spell the word {w}?", "{w}: spell it", "Spelling of {w}?", "Which letters are in {w}?", "What is the spelling of {w}?", "Show me the letters of {w}.", "Spell out {w}.", "I want to spell {w}. What are its letters?", "Say {w} letter by letter.", "Break {w} into letters.", "Please write {w} with its letters one by one.", "List the letters of {w}.", "the letters of {w} please",
    ),
    "letters": (
        "Can you count the {c} in {w}?", "Could you tell me how many times {c} is in {w}?", "How many {c}'s are in {w}?", "How many {c}'s does {w} have?", "{c} in {w}: how many?", "How many times does {c} come up in {w}?", "Count {c} in {w}.", "In the word {w}, how many {c} are there?", "How often is {c} in the word {w}?", "What is the count of {c} in {w}?", "how many letters {c} has {w}", "The word is {w}. How many {c} does it contain?", "Find the number of {c} in {w}.", "How often does {w} contain {c}?", "Does {c} come up in {w}? How often?",
    ),
    "recall": (
        "What is my {k} again?", "Can you tell me my {k}?", "Could you say my {k}?", "my {k}?", "And my {k}?", "What did I tell you about my {k}?", "Do you know my {k}?", "I told you my {k}. What was it?", "Which {k} is mine?", "Say my {k}.", "What {k} do I have?", "Please tell me what my {k} is.", "Give me my {k} again.", "Did you keep my {k}? What is it?",
    ),
    "read": (
        "{t} What {k} does {n} have?", "{t} Can you tell me the {k} of {n}?", "{t}\n\nWhat is {n}'s {k}?", "{t}\n\nQuestion: Which {k} has {n}?", "Facts: {t} Which {k} belongs to {n}?", "{t} {n} has which {k}?", "Read the text. {t} What is the {k} of {n}?", "What is {n}'s {k}? {t}", "Tell me {n}'s {k}. {t}", "{t} What does the text say about the {k} of {n}?", "{t} Which is the {k} of {n}?", "I read this: {t} What is the {k} of {n}?", "{t} {n}'s {k}?", "{t} For {n}, what is the {k}?",
    ),
    "tool": (
        "Can you please {v} the {o} of {x}?", "I would like you to {v} the {o} of {x}.", "{v} {x}'s {o}.", "Please {v} {x}'s {o}.", "I have to {v} the {o} of {x}.", "Try to {v} the {o} of {x}.", "{v} the {o} for {x}.", "Please {v} the {o} for {x}.", "Could you {v} {x}'s {o} for me?", "We should {v} the {o} of {x}.", "{v} the {o} of {x} now.", "I want to {v} the {o} of {x}.", "The {o} of {x}: {v} it.", "Do this: {v} the {o} of {x}.", "Is it possible to {v} the {o} of {x}?", "Just {v} the {o} of {x}.",
    ),
    "json": (
        "Can you turn this into JSON? {t}", "Fill in the fields: {t}", "The text is: {t}", "Read this and give me the data: {t}", "Data: {t}", "Write the values as JSON. {t}", "Text: {t}", "Please extract the values. {t}", "This is what I have: {t}", "Message: {t}", "What are the fields here? {t}", "Give me JSON for this: {t}",
    ),
    "outside": (),
}  # fmt: skip
HONEST = "I am a small demonstration model and do not know that."


def phrasings(task: str, split: Split) -> tuple[str, ...]:
    """Those that conversations of a split may use."""
    return (*PHRASINGS[task][:SEEN], *MORE[task]) if split == "train" else PHRASINGS[task][SEEN:]
