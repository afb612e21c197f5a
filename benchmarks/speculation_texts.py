"""What `speculation.py` asks for. Work in which much of the answer stands in the prompt, and free text, in which nothing does.

Everything was written for this measurement and is in no data set. Each kind of work has eight prompts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EDITS", "FREE", "JSON", "QUOTES"]

# ----------------------------------------------------------------------------------------- JSON to a schema

_TEXT = {"type": "string", "maxLength": 40}
_ORDER = {
    "type": "object",
    "properties": {
        "customer": _TEXT,
        "city": _TEXT,
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "article": _TEXT,
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
                    "unit_price": {"type": "number", "minimum": 0, "maximum": 9999},
                },
                "required": ["article", "quantity", "unit_price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "city", "items"],
    "additionalProperties": False,
}
_SHIFTS = {
    "type": "object",
    "properties": {
        "station": _TEXT,
        "shifts": {
            "type": "array",
            "minItems": 3,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {"name": _TEXT, "day": _TEXT, "from": _TEXT, "until": _TEXT},
                "required": ["name", "day", "from", "until"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["station", "shifts"],
    "additionalProperties": False,
}
_ORDERS = (
    "Marta Lindqvist of Uppsala orders three boxes of copper nails at 4.20 each, one claw hammer at 18.90 and two cans of "
    "linseed oil at 11.50.",
    "Please send to Deniz Aksoy in Izmir: 12 jars of fig jam at 3.75, 6 bottles of olive oil at 9.40, 2 sacks of bulgur at 7.10.",
    "Order by telephone, Tomasz Wrona, Gdynia. Forty metres of sailcloth at 6.80 the metre and five spools of thread at 2.15.",
    "The school in Oamaru (Aroha Ngata) wants 30 exercise books at 1.10, 30 pencils at 0.35 and 2 globes at 44.00.",
)
_ROTAS = (
    "Lighthouse Skarv: Ines is on duty on Monday from 06:00 until 14:00, Bo on Monday from 14:00 until 22:00, Ines again on "
    "Tuesday from 06:00 until 14:00, and Karim on Tuesday from 14:00 until 22:00.",
    "Ferry office. Friday: Lena 05:30 to 13:30, Paulo 13:30 to 21:30. Saturday: Lena 05:30 to 13:30, Yuki 13:30 to 21:30.",
    "At the weather station on Mount Aldan, Olga takes Wednesday from 00:00 to 08:00, Ravi takes Wednesday from 08:00 to 16:00 "
    "and Sam takes Wednesday from 16:00 to 24:00.",
    "Night pharmacy: Monday Hana, 20:00 until 02:00. Monday Piet, 02:00 until 08:00. Tuesday Hana, 20:00 until 02:00.",
)
JSON: list[tuple[str, dict[str, Any]]] = [
    *((f"Write this order as JSON.\n\n{text}", _ORDER) for text in _ORDERS),
    *((f"Write this rota as JSON.\n\n{text}", _SHIFTS) for text in _ROTAS),
]
"""A prompt, and the schema of its answer."""

# ------------------------------------------------------------------------------------------------ code edits

_FILES = (
    '''import csv
from pathlib import Path


class Ledger:
    """Payments by month, read from a file of date, name and amount."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []

    def load(self) -> None:
        with self.path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["amount"]:
                    self.rows.append(row)

    def total(self, month: str) -> float:
        amounts = [float(row["amount"]) for row in self.rows if row["date"].startswith(month)]
        return round(sum(amounts), 2)

    def names(self) -> list[str]:
        return sorted({row["name"] for row in self.rows})
''',
    """import math


def distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return math.hypot(a[0] - b[0], a[1] - b[1])


def length(path: list[tuple[float, float]]) -> float:
    total = 0.0
    for first, second in zip(path, path[1:]):
        total += distance(first, second)
    return total


def nearest(point: tuple[float, float], others: list[tuple[float, float]]) -> tuple[float, float]:
    best = others[0]
    for other in others[1:]:
        if distance(point, other) < distance(point, best):
            best = other
    return best
""",
    """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>Harbour times</title>
    <link rel="stylesheet" href="harbour.css">
  </head>
  <body>
    <h1>Harbour times</h1>
    <table>
      <tr><th>Ship</th><th>Leaves</th><th>Returns</th></tr>
      <tr><td>Alca</td><td>06:15</td><td>11:40</td></tr>
      <tr><td>Fulmar</td><td>07:30</td><td>13:05</td></tr>
      <tr><td>Larus</td><td>09:00</td><td>15:20</td></tr>
    </table>
    <p>No ships leave in fog.</p>
  </body>
</html>
""",
    """CREATE TABLE readers (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    joined DATE NOT NULL
);

CREATE TABLE books (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    author TEXT NOT NULL,
    year INTEGER
);

CREATE TABLE loans (
    reader INTEGER NOT NULL REFERENCES readers (id),
    book INTEGER NOT NULL REFERENCES books (id),
    lent DATE NOT NULL,
    returned DATE,
    PRIMARY KEY (reader, book, lent)
);
""",
)
_CHANGES = (
    ("rename the class Ledger to Payments", "let total round to whole numbers"),
    ("rename distance to metres", "let nearest return None for an empty list"),
    ("add a ship called Sterna that leaves at 10:45 and returns at 16:00", "change the title to Harbour and tides"),
    ("add a column email of type TEXT to readers", "rename the table loans to borrowings"),
)  # fmt: skip
EDITS: list[str] = [
    f"Here is a file:\n\n```\n{file}```\n\nMake one change: {change}. Write the whole file again, otherwise as it is."
    for file, changes in zip(_FILES, _CHANGES, strict=True)
    for change in changes
]

# ------------------------------------------------------------------------------------- summaries that quote

_ARTICLES = (
    "The salt works at Brennvik closed in 1931, and for sixty years nobody used the pans. In 1992 two sisters, Astrid and Liv "
    "Holm, rented the lowest three for the price of a bicycle. They had read that salt from slow evaporation keeps magnesium, "
    "and that cooks would pay for it. The first summer gave them forty kilograms and sunburn. By 2004 they harvested nine "
    "tonnes a year, and the old boiling house had become a shop. The sisters refuse to grow further: every pan that they add "
    "would need a pump, and a pump, says Liv, is the end of silence.",
    "A committee of the town council has advised against the new bridge. Its report says that the crossing would shorten the "
    "way to the hospital by four minutes, but that the eastern bank is made of peat, which sinks by a hand's breadth in ten "
    "years. Piles would have to reach down thirty metres. The engineer, Joana Reis, told the committee that such piles are "
    "possible and that they would cost more than the bridge itself. Members asked instead for a second ferry, which could "
    "begin to run in spring. The council will vote on the ninth of May.",
    "Migrating cranes do not fly in a wedge because the leader knows the way. Each bird flies in the rising air at the edge of "
    "the wing before it, and so spends up to a fifth less on the flight. The bird at the front gains nothing, and gives up its "
    "place after some minutes. Young cranes in their first autumn take the front as often as old ones, but they hold it for a "
    "shorter time. Researchers who fitted birds with small recorders found that families stay together within the wedge, and "
    "that parents take the front more often when their own young fly directly behind them.",
    "The library of Sankt Veit lends more than books. On the ground floor hang drills, ladders and a pasta machine, each with a "
    "card that says who had it last. The idea came from the caretaker, Emil Horvat, who had counted eleven drills in one "
    "stairwell, all of them asleep. Borrowers pay nothing, but must bring a thing back clean. In the first year four things "
    "were lost and two hundred were lent. The pasta machine has a waiting list until November, and somebody has given the "
    "library a second one.",
)
_TASKS = (
    "Summarise the text in two sentences. Then quote, word for word, the three sentences that matter most.",
    "List every number and every name in the text, each with the whole sentence that it stands in, quoted word for word.",
)
QUOTES: list[str] = [f"{article}\n\n{task}" for article in _ARTICLES for task in _TASKS]

# ------------------------------------------------------------------------------------------------- free text

FREE: list[str] = [
    "Tell me a story about a clockmaker who stops believing in time.",
    "Write a letter from a retired sea captain to a granddaughter who wants to go to sea.",
    "What could a small town do with an empty railway station?",
    "Describe the sound of a forest at night to somebody who has never heard one.",
    "I cannot decide whether to move abroad for work. What should I think about?",
    "Invent a holiday that is kept only by cats, and tell how it is kept.",
    "Explain to a child why the sea is salty and rivers are not.",
    "Write the beginning of a mystery that happens in a bakery.",
]
