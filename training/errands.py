"""Functions and schemas in everyday wording for the second edition: what a visitor's own tools look like.

A function's name is a noun and a verb in some style, or invented; a parameter has one of several names. Of each table of
wordings the last quarter is held out.
"""

# ruff: noqa: E501, SIM905  (a table of sentences reads best with one per line, a word list as text)
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from asking import REQUESTS
from deeds import DEEDS
from lives import Lives
from turns import COMMON, Turn
from wordings import drawn_from, expand, without_choices

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import Say, call, final, result, think, user
from halfbyte.harmony.messages import Tool

# (verb, noun, description, wordings); a slot that not every wording has is optional.
ERRANDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("reserve", "table", "Reserve a table in a restaurant.", ("Reserve a table at {place} for {count} people.", "I want to eat at {place}, we are {count}.", "Get a table for {count} at {place}.", "Table for {count} at {place}, please.", "Can we have {count} seats at {place}?")),
    ("rent", "bike", "Rent bikes for some hours.", ("Rent {count} bikes in {city}.", "I need {count} bikes in {city}.", "We want to rent {count} bikes while in {city}.", "Get us {count} bikes in {city}.", "{count} bikes in {city}, please.")),
    ("play", "song", "Play a song.", ("Play {title}.", "Play {title} by {person}.", "I want to hear {title}.", "Put on {title} by {person}.", "Let me listen to {title}.")),
    ("send", "mail", "Send an email.", ("Send {person} a mail that says: {text}", "Mail {person}: {text}", "Write an email to {person}: {text}", "Email {person} this: {text}", "Send this mail to {person}: {text}")),
    ("find", "doctor", "Find a doctor in a city.", ("Find a doctor in {city}.", "I need a doctor in {city}.", "Is there a doctor in {city}?", "Which doctors are there in {city}?", "Look for a doctor in {city}.")),
    ("buy", "item", "Buy pieces of an item.", ("Buy {count} {item}s.", "Order {count} {item}s.", "I need {count} {item}s.", "Get me {count} new {item}s.", "Put {count} {item}s into my cart.")),
    ("check", "order", "Look up the state of an order.", ("Where is my order {code}?", "What about order {code}?", "Check order {code}.", "When does order {code} arrive?", "Has order {code} been sent?", "Look up order {code}.")),
    ("cancel", "order", "Cancel an order.", ("Cancel order {code}.", "I do not want order {code} any more.", "Please cancel my order {code}.", "Stop order {code}.", "Take back order {code}.")),
    ("heat", "room", "Set the temperature of a room.", ("Heat the {room} to {degrees} degrees.", "Set the {room} to {degrees} degrees.", "Make the {room} {degrees} degrees warm.", "I want {degrees} degrees in the {room}.", "Turn the heating in the {room} to {degrees}.")),
    ("open", "door", "Open a door.", ("Open the door of the {room}.", "Open the {room} door.", "Let me into the {room}.", "Unlock the {room}.", "Please open the {room}.")),
    ("set", "alarm", "Set an alarm clock.", ("Wake me at {time}.", "Set an alarm for {time}.", "Alarm at {time}, please.", "Set my alarm to {time} on {day}.", "I have to get up at {time} on {day}.")),
    ("add", "task", "Put something on the list of tasks.", ("Put {text} on my list.", "Add {text} to my tasks.", "New task: {text}", "I have to {text}, add it to my list.", "Remember this task: {text}")),
    ("measure", "distance", "Get the distance between two places.", ("How far is it from {start} to {end}?", "What is the distance from {start} to {end}?", "Distance between {start} and {end}?", "How long is the way from {start} to {end}?")),
    ("convert", "length", "Convert a length from one unit to another.", ("How many {to_unit} are {amount} {from_unit}?", "Convert {amount} {from_unit} to {to_unit}.", "What is {amount} {from_unit} in {to_unit}?", "{amount} {from_unit} in {to_unit}?")),
    ("transfer", "money", "Send money to someone.", ("Send {amount} {currency} to {person}.", "Pay {person} {amount} {currency}.", "Transfer {amount} {currency} to {person}.", "{person} gets {amount} {currency} from me.")),
    ("search", "music", "Find songs of an artist.", ("Find songs by {person}.", "What has {person} sung?", "Search for music by {person}.", "Show me {count} songs by {person}.", "List {count} songs by {person}.")),
    ("search", "film", "Find films by their director.", ("Which films are by {person}?", "Find films by {person}.", "Show me {count} films by {person}.", "List films by {person}.", "I want to see a film by {person}.")),
    ("book", "flight", "Book a flight.", ("Book a flight from {start} to {end}.", "I want to fly from {start} to {end} on {day}.", "Fly me from {start} to {end}.", "Flight from {start} to {end} on {day}, please.")),
    ("call", "taxi", "Call a taxi to an address.", ("I need a taxi at {address}.", "Call a taxi to {address}.", "Send a cab to {address} for {count} people.", "Pick up {count} people at {address}.")),
    ("get", "weather", "Get the weather of a place.", ("What is the weather in {city}?", "How warm is it in {city}?", "Do I need a coat in {city}?", "Weather in {city} on {day}?", "How will the weather in {city} be on {day}?")),
    ("get", "stock", "Get how many pieces of a product are there.", ("How many {item}s do we have?", "Are there {item}s in stock?", "Count our {item}s.", "Do we still have {item}s?", "Stock of {item}s?")),
    ("get", "price", "Get the price of a product.", ("What does a {item} cost?", "How much is a {item}?", "Price of a {item}?", "Tell me what a {item} costs.", "What do I pay for a {item}?")),
    ("show", "account", "Show the account of a customer.", ("Show the account of {person}.", "What does the account of {person} look like?", "Open {person}'s account.", "Give me the account of {person}.")),
    ("change", "password", "Change the password of a user.", ("Change the password of {person} to {code}.", "{person}'s new password is {code}.", "Set {person}'s password to {code}.", "Give {person} the password {code}.")),
    ("rename", "file", "Give a file another name.", ("Rename {start_file} to {end_file}.", "The file {start_file} should be called {end_file}.", "Call {start_file} {end_file} from now on.", "Change the name of {start_file} to {end_file}.")),
    ("read", "file", "Read a file.", ("What is in {file}?", "Read {file}.", "Show me the file {file}.", "Open {file} and show it.", "Print the first {count} lines of {file}.")),
    ("run", "tests", "Run the tests of a project.", ("Run the tests of {project}.", "Test {project}.", "Do the tests of {project} pass?", "Check {project} with its tests.")),
    ("lock", "car", "Lock or unlock a car.", ("Please {lock} my car {code}.", "{lock} the car {code}.", "I want you to {lock} car {code}.", "Car {code}: {lock} it.")),
    ("set", "volume", "Set how loud something plays.", ("Set the volume in the {room} to {percent} percent.", "Volume {percent} in the {room}.", "Play at {percent} percent in the {room}.", "Make it {percent} percent loud in the {room}.")),
    ("water", "plants", "Water the plants.", ("Water the plants in the {room} for {count} minutes.", "The plants in the {room} need {count} minutes of water.", "Give the plants in the {room} water for {count} minutes.", "{count} minutes of water for the plants in the {room}.")),
    ("print", "document", "Print a document.", ("Print {file}.", "Print {count} copies of {file}.", "I need {file} on paper.", "Make {count} copies of {file}.")),
    ("list", "servers", "List all servers.", ("Which servers are there?", "List the servers.", "What servers do we have?", "Show me all servers.", "I need an overview of the servers.")),
    ("ping", "database", "Check that the database answers.", ("Does the database answer?", "Check the database.", "Is our database there?", "See if the database is alive.", "How is the database doing?")),
    ("restart", "router", "Restart the router.", ("Restart the router.", "The internet is slow, restart the router.", "Please start the router again.", "Turn the router off and on.")),
    ("stop", "music", "Stop what is playing.", ("Stop the music.", "Please be quiet now.", "No more music.", "Turn off the music.", "Silence, please.")),
    ("take", "photo", "Take a photo with the camera.", ("Take a photo.", "Make a picture of us.", "Use the camera.", "Shoot a photo, please.")),
    ("add", "numbers", "Add up a list of numbers.", ("Add up {numbers} with the function.", "Use the tool to add {numbers}.", "Let the function sum up {numbers}.", "Call the function for the sum of {numbers}.")),
    ("draw", "chart", "Draw a chart of values.", ("Draw a chart of {numbers}.", "Make a {chart} chart of {numbers}.", "Plot {numbers} as a {chart} chart.", "I want a {chart} chart with {numbers}.", "Chart these values: {numbers}")),
    ("tag", "article", "Put tags on an article.", ("Tag article {code} with {words}.", "Put the tags {words} on article {code}.", "Article {code} gets the tags {words}.", "Add {words} as tags to article {code}.")),
    ("translate", "text", "Translate a text into a language.", ("Translate into {language}: {text}", "Put this into {language}: {text}", "What is this in {language}: {text}", "Say this in {language}: {text}", "{language} version of: {text}")),
    ("count", "words", "Count the words of a text.", ("How many words has this text: {text}", "Count the words: {text}", "Number of words in: {text}", "Word count of: {text}")),
    ("create", "user", "Create a user of the system.", ("Create a user {person} with the role {role}.", "New user {person}.", "Make {person} a user with the role {role}.", "{person} needs an account as {role}.", "Add the user {person}.")),
    ("assign", "ticket", "Give a ticket to someone.", ("Give ticket {code} to {person}.", "{person} should do ticket {code}.", "Assign {code} to {person}.", "Ticket {code} is for {person}.")),
    ("close", "ticket", "Close a ticket.", ("Close ticket {code}.", "Ticket {code} is done.", "We can close {code}.", "Mark ticket {code} as done.")),
    ("subscribe", "newsletter", "Subscribe an address to a newsletter.", ("Subscribe {mail} to the newsletter.", "Send the newsletter to {mail}.", "{mail} wants the newsletter.", "Put {mail} on the newsletter.")),
    ("query", "table", "Read rows from a table of the database.", ("Show {count} rows of the table {project}.", "Read the table {project}.", "Get {count} rows from {project}.", "What is in the table {project}?", "Give me the first {count} rows of {project}.")),
    ("deploy", "service", "Deploy a service to an environment.", ("Deploy {project} to {stage}.", "Bring {project} to {stage}.", "Release {project} on {stage}.", "Put {project} live on {stage}.")),
    ("feed", "pet", "Feed a pet.", ("Feed {person}.", "Give {person} {count} grams of food.", "{person} is hungry, {count} grams.", "Please feed {person} with {count} grams.")),
    ("start", "timer", "Start a timer.", ("Start a timer of {count} minutes.", "Timer for {count} minutes.", "{count} minutes, starting now.", "Tell me when {count} minutes are over.")),
    ("find", "flat", "Find flats for rent.", ("Find a flat in {city} for at most {amount} a month.", "I look for a flat in {city}.", "Flats in {city} up to {amount}?", "Which flats in {city} cost at most {amount}?")),
    ("find", "recipe", "Find recipes with an ingredient.", ("What can I cook with {food}?", "Find a recipe with {food}.", "Recipes with {food}, please.", "I have {food}, what could I cook?", "Show me {count} recipes with {food}.")),
    ("report", "bug", "Report a fault in a program.", ("Report this bug in {project}: {text}", "{project} has a bug: {text}", "There is a fault in {project}: {text}", "Bug in {project}: {text}")),
    ("log", "run", "Write down a run.", ("I ran {amount} km on {day}.", "Log a run of {amount} km.", "Write down {amount} km of running on {day}.", "My run was {amount} km.")),
    ("dispatch", "parcel_van", "Send a van to pick up parcels.", ("Send a van to {address}.", "Pick up {count} parcels at {address}.", "There are {count} parcels at {address}.", "A van to {address}, please.")),
    ("paint", "wall", "Paint a wall in a colour.", ("Paint the wall of the {room} {colour}.", "I want a {colour} wall in the {room}.", "Make the {room} wall {colour}.", "The {room} should be {colour}.")),
    ("switch", "light", "Switch a light on or off.", ("Turn {switch} the light in the {room}.", "Light {switch} in the {room}.", "Switch the {room} light {switch}.", "The light in the {room} should be {switch}.")),
    ("invite", "person", "Invite someone to an event.", ("Invite {person} to {title}.", "{person} should come to {title}.", "Ask {person} to come to {title}.", "Send {person} an invitation to {title}.")),
)  # fmt: skip
# Training alone has these: their wordings and descriptions are rules of the grammar in `wordings.py`.
MORE_ERRANDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("track", "parcel", "[Track|Find|Look up|Locate] [a parcel|a package|where a parcel is|a shipment][| by its number].", ("[Where is|Where's|What about|Track|Follow|Locate] [|my |the ]{code}[, the parcel|, my package|][?|.]", "[Where is|Where's|When comes|When will I get|Has someone seen|What happened to|Track|Find|Look for] [my|the|our] [parcel|package|shipment|delivery] {code}[?|.|]", "[I am waiting for|I still miss|I want to know about] [parcel|package|shipment] {code}.")),
    ("order", "taxi", "[Order|Call|Book|Send] a [taxi|cab|car with a driver].", ("[I need|We need|Order|Get me|Send|Book|Call|I want|Can I have|Please send|Could you order] a [taxi|cab|ride] [from|at|to pick me up at] {start} to {end}[?|.]", "[Take|Bring|Drive] [me|us] from {start} to {end}[|, please].", "[A taxi|A cab|A ride] from {start} to {end} at {time}[, please|.|]")),
    ("look_up", "contact", "[Look up|Find|Get] the [phone number|contact|number] of [a person|someone].", ("[What is|What's|Give me|Find|Look up|I need|Tell me|Show me|Do you have] [the|a] [phone number|number|telephone number|contact] [of|for] {person}[?|.|]", "[How can I|How do I|I want to|I have to] [call|reach|phone|contact] {person}[?|.]", "[{person}'s number|The number of {person}][, please|?|]")),
    ("get", "exchange_rate", "[Get|Return|Look up] the [exchange rate|rate] between two [currencies|kinds of money].", ("[How many|How much in] {currency} do I get for {amount}?", "[Exchange|Change|Turn] {amount} into {currency}.", "[What is|How much is] {amount} in {currency}?")),
    ("send", "message", "[Send|Deliver|Write] a [text message|message|short note] to [someone|a person].", ("[Tell|Write|Message|Text|Let] {person}[:| this:] {text}", "[Send|Write] [a message|a text|a note] to {person}: {text}", "[Could you|Can you|Please] [tell|text|message] {person}: {text}")),
    ("create", "event", "[Create|Add|Make] [an event|an entry|an appointment] in the calendar.", ("[Put|Add|Enter|Write] {title} [into|in] [my|the] calendar [on|for] {day}[| at {time}].", "[I have|There is|We have] {title} on {day}[| at {time}][, note it|, put it in the calendar|, add it].", "[Plan|Schedule|Create] {title} for {day}[| at {time}].")),
    ("check", "stock", "[Check|Look up|Find out] how many of a product [are in the store|a shop has|there are].", ("[Do you have|Are there|Have we got|How many of] {item}s [left|in the store|still]?", "[Is|Are] [there|we] [out of|any more] {item}s?", "[Check|Look] [how many|if there are any] {item}s[ are there| left|].")),
    ("find", "restaurant", "[Find|Search for|List] [restaurants|places to eat] in a [city|place].", ("[Where can|Where could|Where should] [I|we|one] eat in {city}?", "[Find|Show me|Look for|I want|Recommend] [a restaurant|somewhere to eat|a good place to eat] in {city}[| for {count}].", "[We are|I am] hungry in {city}[.|, where can we eat?]")),
    ("get", "timetable", "[Get|Show|Look up] when [trains|buses] go from one place to another.", ("[When|At what time] [does|goes] the [next |][train|bus] from {start} to {end}[| go| leave]?", "[Trains|Buses|Connections|How do I get] from {start} to {end}[| on {day}][?|, please|]", "[Show me|Give me|Look up|I need] the [trains|buses] from {start} to {end}[| on {day}].")),
    ("book", "hotel", "[Book|Reserve] a [room in a hotel|hotel room].", ("[Book|Reserve|Get me|I need|I want|We need] a [hotel room|room in a hotel|hotel] in {city}[| for {count} nights][| from {day}].", "[Somewhere to sleep|A bed|A hotel] in {city}[| for {count} nights][, please|].")),
    ("set", "reminder", "[Set|Make|Create] a reminder.", ("[Remind me|Remember me|Do not let me forget|Make sure I remember] [on {day} |at {time} |]to {text}.", "[Reminder|Remember]: {text}", "[I must not forget|Do not forget]: {text}")),
    ("turn_off", "device", "[Turn off|Switch off|Stop] a device in a room.", ("[Turn|Switch] off the {item} in the {room}.", "[The {item} in the {room}|The {room}'s {item}] [should be|must go|has to be] off.", "[Please|Could you|Can you] [turn|switch] the {item} in the {room} off[?|.]")),
    ("get", "news", "[Get|Read|Show] the [latest |][news|headlines] [about|on] a [topic|subject].", ("[What is new|What's the news|Anything new|What happened] [about|with|around] {title}?", "[News|Headlines|The latest] [about|on|of] {title}[, please|?|]", "[Show|Read|Tell|Give] me the news [about|on] {title}.")),
    ("translate", "word", "[Translate|Look up] a word in a language.", ("[What is|What's|How do you say|How do I say|How does one say] {title} in {language}?", "[The|Give me the|Tell me the] {language} word for {title}[?|.|]", "[Translate|Put] {title} [into|in] {language}.")),
    ("get", "balance", "[Get|Show|Look up] the balance of [an account|a bank account].", ("[How much|What] is [on|in] [the account|account] {code}?", "[Balance|The balance|Money] [of|on|in] [account |]{code}[?|, please|]", "[Show me|Tell me|Check|Look up] the balance of [account |]{code}.")),
    ("pay", "bill", "[Pay|Settle] a bill.", ("[Pay|Settle|Take care of] [|the |my ][bill|invoice] {code}.", "[Bill|Invoice] {code} [must|has to|should] be paid[|, do it].", "[Please|Can you|Could you] pay {amount} for [bill|invoice] {code}[?|.]")),
    ("register", "guest", "[Register|Sign in|Add] a guest.", ("[Register|Sign in|Check in|Add|Enter] {person}[| as a guest| for {day}].", "{person} [is here|has come|arrives|comes] on {day}[, register them|, sign them in|].", "[A new guest|Our guest|The guest]: {person}")),
    ("get", "route", "[Get|Find|Plan] [the way|a route|a path] between two places.", ("[How do I get|How can I get|How do we come|Which way goes|What is the way|Show me the way|Guide me|Plan a route|Navigate] from {start} to {end}[?|.|]", "[The way|A route|The best road] from {start} to {end}[, please|?|]")),
    ("rent", "car", "[Rent|Hire|Reserve] a car.", ("[Rent|Hire|Get me|I need|I want|Book] a car in {city}[| for {count} days][| from {day}].", "[We need|I would like] [a car|something to drive] in {city}[| for {count} days].")),
    ("check", "flight", "[Check|Look up|Get] [the state of|information about] a flight.", ("[Is|Has|When does|When will] flight {code} [on time|late|landed|land|leave|arrive|here]?", "[Check|Look up|What about|How is|Track] [flight|my flight] {code}[?|.]", "[Flight|My flight is] {code}[. Is it late?|. On time?|, is it late?]")),
    ("save", "note", "[Save|Store|Keep|Write down] a note.", ("[Note|Save|Write down|Keep|Store|Jot down]: {text}", "[Make|Take|Save] a note[:| that says:] {text}", "[Note|Write] this down: {text}")),
    ("delete", "file", "[Delete|Remove|Erase] a file.", ("[Delete|Remove|Erase|Throw away|Get rid of|I do not need] {file}[| any more][.|, please|]", "[Can you|Could you|Please] [delete|remove|erase] [|the file ]{file}[?|.]", "{file} [can go|is not needed any more|should be deleted|must go].")),
    ("find", "book", "[Find|Search for|Look up] [a book|books] in the library.", ("[Do you have|Is there|Have you got|Find|Look for|Search|I want to read|I look for] [|the book |the novel ]{title}[| by {person}][?|.]", "[Is|Where is] {title} [in the library|on the shelf|there]?")),
    ("get", "recipe", "[Get|Look up|Show] [the recipe|how to make] a dish.", ("[How do I|How do you|How can I|How does one] [cook|make|bake|prepare] {food}?", "[Recipe|The recipe|A recipe] for {food}[, please|?|]", "[I want|We would like] to [cook|make] {food}[, how?|.]")),
    ("vote", "song", "[Vote for|Like|Rate] a song.", ("[Vote|I vote|My vote is|Give my vote|Put me down] for {title}.", "[I like|I love] {title}[, vote for it|, it gets my vote|].", "{title} [gets|has|should get] [my vote|{count} points][.|]")),
    ("start", "machine", "[Start|Run|Switch on] a machine.", ("[Start|Run|Switch on|Begin with|Let us run] [machine|the machine] {code}[| at {time}].", "[Machine|The machine] {code} [should run|has to start|must start][| at {time}].")),
    ("measure", "air", "[Measure|Get|Check] the [air|temperature|humidity] in a room.", ("[How is|How good is|Check|Measure] the air in the {room}[?|.]", "[Is|Does] the {room} [need fresh air|too warm|too cold]?", "[What is|Tell me] the temperature in the {room}[?|.]")),
    ("hire", "worker", "[Hire|Employ|Take on] [someone|a person] for a job.", ("[Hire|Employ|Take on] {person}[| as {role}][| from {day}].", "{person} [gets the job|should work for us|starts] [as {role}|on {day}].")),
    ("enrol", "student", "[Enrol|Sign up|Register] [someone|a student] for a course.", ("[Enrol|Sign up|Register|Put] {person} [for|in|into] [the course |]{title}.", "{person} [wants to|would like to|should] [take|join|do] [the course |]{title}.", "[A place|A seat] for {person} in {title}[, please|.]")),
    ("block", "card", "[Block|Lock|Freeze] a [bank card|card].", ("[Block|Lock|Freeze|Stop] [card|my card|the card] {code}.", "[I lost|Someone stole|I cannot find] [card|my card] {code}[, block it|. Block it.|!]")),
    ("print", "label", "[Print|Make] a label for a parcel.", ("[Print|Make|I need|Create] [a label|{count} labels] for {address}.", "[A label|Labels] [to|for] {address}[, please|].")),
    ("ask", "expert", "[Ask|Forward a question to|Question] an expert.", ("[Ask|Forward to|Pass to] [the expert|our expert] {person}: {text}", "[What does|What would] {person} say to this: {text}")),
    ("split", "bill", "[Split|Divide|Share] a bill between people.", ("[Split|Divide|Share] {amount} [between|among] {count} [people|of us|friends].", "[We are|There are] {count} people and the bill is {amount}[.|, split it|. Split it.]")),
    ("compress", "file", "[Compress|Pack|Shrink|Zip] a file.", ("[Compress|Pack|Shrink|Zip|Make smaller] {file}[|, please|.]", "{file} is too [large|big][, compress it|, pack it|.]")),
    ("mute", "channel", "[Mute|Silence] a channel.", ("[Mute|Silence|I do not want to hear|No more of|Turn the sound off for] [|the channel ]{title}[|.| any more.]",)),
    ("search", "jobs", "[Search|Find|List] [jobs|open positions] in a city.", ("[Find|Search|Show me|List|I look for|Are there|I need|Look for] [jobs|work|a job|open positions] in {city}[?|.|]", "[Who hires|Where can I work|Who needs people] in {city}?")),
)  # fmt: skip
# slot: (names of its parameter, JSON type, what a description of it says)
SLOTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "place": (("place", "restaurant", "location", "venue"), "string", "the name of the place"),
    "city": (("city", "location", "place", "where", "town"), "string", "the city"),
    "count": (("count", "number", "quantity", "limit", "how_many", "n"), "integer", "how many"),
    "title": (("title", "name", "song", "query"), "string", "the title"),
    "person": (("person", "name", "user", "who", "contact", "customer"), "string", "the person"),
    "text": (("text", "body", "content", "message", "note"), "string", "the text"),
    "item": (("item", "product", "article", "name"), "string", "the product"),
    "code": (("code", "id", "number", "key", "reference"), "string", "the identifier"),
    "room": (("room", "where", "place", "zone"), "string", "the room"),
    "degrees": (("degrees", "temperature", "celsius"), "integer", "in degrees Celsius"),
    "time": (("time", "at", "when", "clock"), "string", "hours and minutes"),
    "day": (("day", "date", "weekday", "on"), "string", "the day"),
    "start": (("start", "origin", "from_place", "departure", "source"), "string", "where it begins"),
    "end": (("end", "destination", "to_place", "arrival", "target"), "string", "where it ends"),
    "amount": (("amount", "value", "sum", "quantity"), "number", "the amount"),
    "from_unit": (("from_unit", "unit", "source", "source_unit"), "unit", "the unit it has"),
    "to_unit": (("to_unit", "target", "wanted", "target_unit"), "unit", "the unit it gets"),
    "currency": (("currency", "money", "unit"), "currency", "which money"),
    "address": (("address", "street", "where", "pickup"), "string", "the address"),
    "start_file": (("path", "old", "old_name", "source"), "string", "the file"),
    "end_file": (("new_path", "new", "new_name", "target"), "string", "its new name"),
    "file": (("file", "path", "document", "filename"), "string", "the file"),
    "project": (("project", "name", "repository", "folder"), "string", "the project"),
    "lock": (("action", "state", "mode"), "lock", "what to do"),
    "numbers": (("numbers", "values", "data", "points"), "integers", "the numbers"),
    "words": (("words", "tags", "labels", "list"), "strings", "the words"),
    "chart": (("kind", "type", "chart_type", "style"), "chart", "what it looks like"),
    "language": (("language", "lang", "into", "target_language"), "string", "the language"),
    "role": (("role", "rights", "group"), "role", "what the user may do"),
    "mail": (("email", "address", "mail", "recipient"), "string", "the email address"),
    "stage": (("environment", "stage", "where"), "stage", "where it runs"),
    "food": (("food", "ingredient", "with"), "string", "what is in it"),
    "colour": (("colour", "color", "paint"), "string", "the colour"),
    "switch": (("state", "switch", "turn"), "switch", "on or off"),
    "percent": (("percent", "level", "value"), "integer", "from 0 to 100"),
}  # fmt: skip
UNITS = ("metres", "feet", "miles", "yards", "inches", "km")
ENUMS: dict[str, tuple[str, ...]] = {
    "chart": ("line", "bar", "pie"), "role": ("admin", "editor", "guest"), "stage": ("staging", "production", "testing"), "switch": ("on", "off"),
    "unit": UNITS, "currency": ("euros", "dollars", "francs", "pounds"), "lock": ("lock", "unlock"),
}  # fmt: skip
# A currency has a code that the function wants instead of the word.
CODES = {"euros": "EUR", "dollars": "USD", "francs": "CHF", "pounds": "GBP"}
RESULTS = (
    "status",
    "id",
    "code",
    "room",
    "minutes",
    "price",
    "driver",
    "gate",
    "answer",
    "name",
    "place",
    "city",
    "plate",
    "time",
    "seat",
    "count",
    "owner",
    "value",
)
FAULTS = (
    "{x} is locked",
    "unknown {x}",
    "no entry for {x}",
    "{x} not found",
    "{x} is closed",
    "no permission for {x}",
    "{x} is too late",
    "time limit for {x}",
)
SPLICE = (
    "Can you help? {q}",
    "{q} Please do it now.",
    "Please do this: {q}",
    "{q} Use a function.",
    "{q} It is urgent.",
    "I need something. {q}",
)


SAID = ("{v} the {a}", "{v} the {a} and the {b}", "{v} {n}", "the {a} is in the {b}", "{n} needs the {a} on {d}", "see you on {d}", "{v} the {a} for {n}", "I have the {a}", "we meet at the {b} on {d}", "bring a {a} with you", "the {a} comes on {d}", "{a} before {b}")  # fmt: skip
DOING = (
    "fetch clean wash paint fix bring visit ask thank meet help check return find feed pack send write finish prepare "
).split()


@dataclass(frozen=True)
class Errand:
    """A function as one conversation names it."""

    row: tuple[str, str, str, tuple[str, ...]]
    tool: Tool
    parameters: dict[str, str]  # slot -> parameter
    wrapped: bool = False  # its arguments stand in an object of their own


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """How values stand in a question: a list with commas."""
    return {slot: ", ".join(map(str, v)) if isinstance(v, list) else v for slot, v in values.items()}


def matched(values: dict[str, Any], parameters: dict[str, str]) -> str:
    """What a thought says of values in the order of the question: which parameter each of them is."""
    return "".join(f" {v} is {parameters[slot]}." for slot, v in shown(values).items())


class Errands(Lives):
    """Turns with functions and schemas in everyday wording."""

    def slot_value(self, slot: str) -> Any:
        rng = self.rng
        if slot in ("count", "percent", "degrees"):
            return rng.randint(2, 99 if slot == "percent" else 30)
        if slot == "amount":
            return rng.randint(2, 999)
        if slot == "time":
            return f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
        if slot == "day":
            return rng.choice(words.DAYS)
        if slot == "room":
            return rng.choice(words.ROOMS)
        if slot == "item":
            return rng.choice(words.ITEMS[:18])
        if slot == "text":
            pool = (*words.THINGS, *words.COLORS, *COMMON)
            if rng.random() < 0.5:  # something to do, or to say
                return rng.choice(SAID).format(
                    v=rng.choice(DOING),
                    a=rng.choice(pool),
                    b=rng.choice(pool),
                    n=self.person(),
                    d=rng.choice(words.DAYS),
                )
            return " ".join(self.name() if rng.random() < 0.2 else rng.choice(pool) for _ in range(rng.randint(2, 5)))
        if slot == "address":
            return f"{rng.randint(1, 99)} {self.name()} {rng.choice(('Street', 'Road', 'Square', 'Avenue'))}"
        if slot == "person" and rng.random() < 0.4:
            return f"{self.person()} {self.name()}"
        if slot in ("city", "start", "end") and rng.random() < 0.3:
            return rng.choice(words.CITIES)
        if slot in ("file", "start_file", "end_file"):
            return f"{self.name().lower()}.{rng.choice(('txt', 'py', 'md', 'csv', 'log'))}"
        if slot == "numbers":
            return [rng.randint(0, 99) for _ in range(rng.randint(2, 6))]
        if slot == "words":
            return rng.sample((*words.THINGS, *COMMON), rng.randint(1, 3)) if rng.random() < 0.5 else self.names(2)
        if slot == "mail":
            return f"{self.name().lower()}@{self.name().lower()}.{rng.choice(('org', 'com', 'net'))}"
        if slot in ("food", "colour", "language"):
            return rng.choice({"food": words.FOODS, "colour": words.COLORS, "language": words.LANGUAGES}[slot])
        if slot == "person" and rng.random() < 0.15:
            return f"{self.lookalike().capitalize()} {rng.choice(('Le', 'Van', 'De', 'von', 'di'))} {self.lookalike().capitalize()}"
        kind = SLOTS[slot][1]
        if kind in ENUMS:
            return rng.choice(ENUMS[kind])
        if self.wording == "train" and rng.random() < 0.05:  # a code that begins with a digit
            return f"{rng.randint(0, 99)}{rng.choice('ABCDEFGHKLMNPRSTUVWXZ')}{rng.choice(('-', '', '/'))}{rng.randint(1, 9999)}"
        return self.name()

    def offered(self, count: int) -> list[Errand]:
        rng, made = self.rng, []
        taken: set[str] = set()
        for verb, noun, rule, asks in rng.sample(self.errands(), count):
            description = expand(rng, rule)
            row = verb, noun, description, asks
            slots = [re.findall(r"{(\w+)}", a) for a in asks]
            every = list(dict.fromkeys(s for each in slots for s in each))
            parameters: dict[str, str] = {}
            for s in every:
                free = [n for n in SLOTS[s][0] if n not in parameters.values()]
                parameters[s] = self.identifier() if rng.random() < 0.15 else rng.choice(free)
            name = rng.choice(
                (
                    f"{verb}_{noun}",
                    f"{noun}_{verb}",
                    f"{verb}{noun.capitalize()}",
                    noun,
                    f"{verb}_{noun}_v2",
                    self.identifier(),
                    f"{self.identifier()}_{verb}",
                )
            )
            if name in taken:
                name = self.identifier()
            taken.add(name)
            described = rng.random() < 0.4
            properties: dict[str, Any] = {}
            for s in rng.sample(every, len(every)):
                kind = SLOTS[s][1]
                schema: dict[str, Any] = {"type": "string" if kind in ENUMS else kind}
                if kind in ("integers", "strings"):
                    schema = {"type": "array", "items": {"type": kind[:-1]}}
                if kind in ENUMS:
                    schema["enum"] = [CODES.get(v, v) for v in ENUMS[kind]]
                if described:
                    schema["description"] = SLOTS[s][2]
                properties[parameters[s]] = schema
            always = [re.findall(r"{(\w+)}", without_choices(a)) for a in (*asks, *REQUESTS.get((verb, noun), ()))]
            required = [parameters[s] for s in every if all(s in each for each in always)]
            whole: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
            wrapped = rng.random() < 0.08
            if wrapped:
                whole = {"type": "object", "properties": {"query": whole}, "required": ["query"]}
            made.append(Errand(row, Tool(name, description, whole), parameters, wrapped))
        return made

    def errands(self) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
        return (*ERRANDS, *MORE_ERRANDS, *DEEDS) if self.wording == "train" else ERRANDS

    def errand_asked(self, row: tuple[str, str, str, tuple[str, ...]]) -> str:
        if self.wording == "train" and row[:2] in REQUESTS and self.rng.random() < 0.6:
            return drawn_from(self.rng, REQUESTS[row[:2]], row[3][-(len(row[3]) // 4) :])
        template = self.pick(row[3])
        return expand(self.rng, template) if "[" in template else template

    def identifier(self) -> str:
        return self.name().lower().replace("-", "_")

    def errand(self, offered: list[Errand], absent: list[tuple[str, str, str, tuple[str, ...]]]) -> Turn:
        """A question for one of the functions offered, or for one that is `absent`."""
        rng = self.rng
        tools = tuple(e.tool for e in offered)
        count = len(offered)
        fits = not absent or rng.random() < 0.88
        chosen = rng.choice(offered) if fits else None
        row = chosen.row if chosen else rng.choice(absent)
        template = self.errand_asked(row)
        drawn = {slot: self.slot_value(slot) for slot in dict.fromkeys(re.findall(r"{(\w+)}", template))}
        question = self.fill(template, **shown(drawn))[1]
        if rng.random() < 0.2:
            question = self.pick(SPLICE, "errand").format(q=question)
        tags = (f"{count} function{'s' * (count > 1)}", "fits" if fits else "none fits", "everyday")
        names = tuple(v for v in drawn.values() if isinstance(v, str) and " " not in v)
        names = ()
        if chosen is None:
            reply = (think("No function fits."), final("I have no function for that."))
            return Turn("errand", (user(question),), reply, template, {}, names, Grade(refusal=True), tags, tools)
        arguments = {chosen.parameters[s]: CODES.get(v, v) if isinstance(v, str) else v for s, v in drawn.items()}
        if chosen.wrapped:
            arguments = {"query": arguments}
        made = call(chosen.tool.name, arguments)
        thought = think(f"The user wants this: {row[2]} I call {chosen.tool.name}.{matched(drawn, chosen.parameters)}")
        if rng.random() < 0.65:
            return Turn("errand", (user(question),), (thought, made), template, {}, names, tags=tags, tools=tools)
        return self.outcome(question, template, (thought, made), chosen.tool.name, tags, tools)

    def outcome(self, question: str, template: str, asked: tuple[Say, Say], function: str, tags: tuple[str, ...], tools: tuple[Tool, ...]) -> Turn:  # fmt: skip
        """The answer from what a function gave: some values, nothing but that it worked, or an error."""
        rng = self.rng
        kind = rng.random()
        grade = Grade()
        if kind < 0.25:
            fault = rng.choice(FAULTS).format(x=self.name())
            value: dict[str, Any] = {"error": fault}
            text, grade = f"That failed: {fault}.", Grade(phrases=((fault,),))
        elif kind < 0.35:
            value, text, grade = {"ok": True}, "It is done.", Grade(phrases=(("done",),))
        elif kind < 0.5 and self.wording == "train":  # words instead of an object
            facts = [
                self.name(),
                f"{rng.randint(1, 999)} {rng.choice(COMMON)}s",
                rng.choice(COMMON),
                str(rng.randint(1, 999)),
            ]
            plain = ", ".join(rng.sample(facts, rng.randint(1, 3)))
            plain = plain[0].upper() + plain[1:] if rng.random() < 0.5 else plain
            says = (user(question), *asked, Say("result", plain, function))
            reply = (think(f"The function {function} gave a result."), final(f"The function says: {plain}."))
            grade = Grade(phrases=((plain,),))
            return Turn("errand", says, reply, template, {}, (), grade, (*tags, "result"), tools)
        else:
            keys = rng.sample(RESULTS, rng.randint(1, 3))
            value = {k: rng.randint(1, 999) if k in ("minutes", "price", "count") else self.name() for k in keys}
            text = " ".join(f"The {k} is {v}." for k, v in value.items())
            grade = Grade(phrases=tuple((str(v),) for v in value.values()))
        says = (user(question), *asked, result(function, value))
        reply = (think(f"The function {function} gave a result."), final(text))
        return Turn("errand", says, reply, template, {}, (), grade, (*tags, "result"), tools)

    def chain(self, offered: list[Errand]) -> list[Turn]:
        """Two errands in one question, called one after the other: both calls, then the answer."""
        if len(offered) < 2:
            return []
        first, second = self.rng.sample(offered, 2)
        parts, calls, thoughts = [], [], []
        for e in (first, second):
            template = self.errand_asked(e.row)
            drawn = {slot: self.slot_value(slot) for slot in dict.fromkeys(re.findall(r"{(\w+)}", template))}
            parts.append(template.format(**shown(drawn)))
            arguments = {e.parameters[s]: CODES.get(v, v) if isinstance(v, str) else v for s, v in drawn.items()}
            calls.append(call(e.tool.name, {"query": arguments} if e.wrapped else arguments))
            said = f"The user wants this: {e.row[2]} I call {e.tool.name}.{matched(drawn, e.parameters)}"
            thoughts.append(think(said))
        question = f"{parts[0]} {self.rng.choice(('And then', 'After that', 'Then', 'Also'))}: {parts[1]}"
        tools = tuple(e.tool for e in offered)
        values = self.names(2)
        outcomes = [result(c.function, {"answer": v}) for c, v in zip(calls, values, strict=True)]
        asked = user(question)
        tags = ("two calls", "everyday")
        final_reply = (
            think(f"The function {second.tool.name} gave a result."),
            final(f"The answers are {values[0]} and {values[1]}."),
        )
        so_far = (asked, thoughts[0], calls[0], outcomes[0])
        return [
            Turn("errand", (asked,), (thoughts[0], calls[0]), tags=tags, tools=tools),
            Turn("errand", so_far, (thoughts[1], calls[1]), tags=tags, tools=tools),
            Turn("errand", (*so_far, thoughts[1], calls[1], outcomes[1]), final_reply, tags=(*tags, "result"), tools=tools, grade=Grade(phrases=((values[0],), (values[1],)))),
        ]  # fmt: skip
