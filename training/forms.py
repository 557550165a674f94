"""More ways in which a note says what a form asks for (`errands.py`), as a grammar (`wordings.py`), for training alone.

Keys are those of `errands.FIELDS`. A yes or no has two halves, parted by ` / `."""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

PARTS: dict[str, tuple[str, ...]] = {
    "name": ("[|the ][customer|person|visitor|buyer|caller|client][| is|:| is called| named] {v}", "[this is|I am|here is|it is] {v}", "[booked|asked|ordered|signed] by {v}", "[Mr|Mrs|Ms|Dr] {v}", "for {v}", "{v} [calls|writes|asks|comes|wants this]", "name: {v}"),
    "age": ("{v} years[| of age| of life]", "[is|just turned|now|about] {v}[| years old]", "age: {v}", "[a|one] {v}-year-old", "born {v} years ago", "[at the age of|at age] {v}"),
    "city": ("[in|near|at home in|a citizen of|comes from|based in|resides in] {v}", "[city|town|home|place]:[| is] {v}", "[moved to|staying in|now in] {v}"),
    "price": ("[costs|at|worth|price is|priced at|it is|sells for] {v} [euros|euro|EUR]", "[pays|paid|offers|asks] {v} euros", "[price|cost]: {v}[| euros]", "[a price of|a cost of] {v} euros"),
    "colour": ("[is|it is|all|mostly|a bright|a dark] {v}", "[colour|color]: {v}", "[painted in|coloured|dyed|wants it in|of] {v}", "the {v} [one|kind|model]"),
    "day": ("[by|before|from|this|next|every|starts on|ready on|comes on] {v}", "[day|date|delivery]: {v}", "[on|for] {v}[| at the latest]", "{v} [is the day|would be good|works]"),
    "gate": ("[at|to|through|via|by|near] gate {v}", "gate[:| is| number] {v}", "[boards|boarding|departs] at gate {v}", "door {v}"),
    "room": ("[is|sits|sleeps|waits|takes place] in [room|hall|office] {v}", "[room|hall|office][:| is| number] {v}", "[moves to|booked|reserved] room {v}"),
    "code": ("[the code is|code:|reference:|ref|id:|number|ticket] {v}", "[under|quoting|see|booking] [code|reference|number] {v}", "the [id|reference|code] {v}"),
    "count": ("[takes|orders|needs|wants|sends|has] {v} [pieces|of them|units]", "[a total of|altogether|about] {v}[| pieces]", "[amount|count|quantity|number]: {v}", "{v} [of them|units|items|boxes]"),
    "items": ("[buys|brings|orders|takes|has|asks for|is out of|bought|packs] {v}", "[items|list|things|products|shopping|order]: {v}", "[please buy|please bring|do not forget|on the list:] {v}"),
    "paid": ("[was paid|fully paid|paid in cash|money has arrived|bill is settled|has been paid] / [was not paid|unpaid|still to pay|money has not arrived|bill is not settled|has not been paid]", "[paid: yes|paid: true] / [paid: no|paid: false]", "[already payed|payment complete] / [nothing paid|payment missing]"),
    "mood": ("[looks|was|very|a bit|rather|quite|seems to be|is feeling] {v}", "[mood|feeling]: {v}", "[in a|with a] {v} mood", "the {v} [one|person|customer]", "makes people {v}"),
    "status": ("[is|was|still|already|currently|marked] {v}", "[status|state|stage]: {v}", "[set to|counts as|the order is|we call it] {v}"),
    "time": ("[from|starts at|opens at|departs at|arrives at|comes at|around|exactly at] {v}", "[time|hour]: {v}", "{v} [o'clock|sharp|in the morning|in the evening]"),
    "line": ("[takes|by|on|uses|comes by|rides] [line|bus|train] {v}", "[line|bus|train]: {v}", "[the|our] [bus|line|train] {v}"),
    "author": ("[from|a work by|made by|the writer is|the author is|penned by|composed by] {v}", "[author|writer]: {v}", "{v} [wrote it|is the author|is the writer]"),
    "title": ("[titled|named|under the title|the title is|reads|watches] {v}", "[title|book|film]: {v}", "[a|the|one] [book|film|work] [called|named] {v}"),
    "email": ("[email|mail|address|contact]: {v}", "[send it to|answers at|contact|reply to|mail me at|my address is] {v}", "{v} [is my address|is the mail]"),
    "weight": ("[weighs|has|is|about|at|carries] {v} [kg|kilos]", "weight: {v}[| kg]", "a weight of {v} [kg|kilos]", "{v} kilos"),
    "company": ("[employed at|works for|joined|sent by|comes from|hired by] {v}", "[company|employer|firm]: {v}", "[for the company|at the firm|of the firm|on behalf of] {v}", "{v} [is the employer|employs me]"),
    "goal": ("[plans to|hopes to|needs to|must|tries to|came to|was told to|goes there to] {v}", "[goal|task|wish]: {v}", "[the goal is to|the plan is to|it is about how to] {v}"),
    "size": ("[wears|needs|orders|wants|comes in] [|size |a ]{v}", "size: {v}", "the {v} [size|one|box]", "{v} [fits|is right]"),
    "phone": ("[phone|telephone|mobile|number]: {v}", "[ring|dial|text me on|phone number|under the number|the number is] {v}", "{v} [is my number|is the phone]"),
    "pet": ("[owns|keeps|and|has|together with] a {k} [called|named|by the name of] {n}", "[the|my|our|her|his] {k} [|is called |is named ]{n}", "pet: {k} {n}", "{n}, a {k}"),
}  # fmt: skip
