"""How right the embedded model is: commands of training/, which print their receipt or write it beside the weights, and
`halfbyte eval`."""

from __future__ import annotations

from bench.measurement import Row, commands

command = commands(__name__)

command(
    "eval-trained", "python training/evaluate.py --answers FILE --conversations 300 --per-task 30 --seed 4242",
    seconds=300, receipt=False, routine=False,
    rows=(
        Row("embedded model: natural questions, right", "accuracy", "mean", path="engine, exact", model="tiny",
            shape={"run": "natural"}),
        Row("embedded model: conversations with unseen names, seen / new phrasings", "accuracy", "mean",
            path="engine, exact", model="tiny", shape={"seed": 4242}, over="run",
            values=("conversations, seen phrasings, new names", "conversations, new phrasings, new names")),
        Row("embedded model: the first edition's tasks, an unseen seed", "accuracy", "mean",
            path="engine, exact", model="tiny", shape={"seed": 4242, "run": "first edition's tasks"}),
    ),
)  # fmt: skip
command(
    "eval-cpu", "halfbyte eval --seed 31415 --per-task 40 --device cpu", seconds=3600,
    rows=(Row("embedded model through the engine on a CPU: mean", "accuracy", "mean", model="tiny",
              shape={"seed": 31415}, command="halfbyte eval --seed 31415 --per-task 40"),),
)  # fmt: skip
command(
    "eval-natural", "halfbyte eval --suite natural --device cpu", seconds=120,
    rows=(Row("embedded model through the engine on a CPU: natural questions, right", "accuracy", "mean", model="tiny",
              path="engine", shape={"suite": "natural"}, command="halfbyte eval --suite natural"),),
)  # fmt: skip
command(
    "acceptance", "python training/acceptance.py", seconds=7200, receipt=False, routine=False,
    rows=(Row("tokens per verification, EAGLE-3 / draft model", "acceptance", "tokens_per_verification", model="tiny",
              shape={"edition": 2}, over="path", values=("eagle3", "draft")),),
)  # fmt: skip
