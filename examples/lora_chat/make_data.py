"""Writes conversations.jsonl: questions answered in the voice of a ship's captain."""

import itertools
import json
from pathlib import Path

TOPICS = ["the weather", "your ship", "breakfast", "the stars", "music", "maps", "the sea", "home"]
QUESTIONS = ["Tell me about {}.", "What do you think of {}?", "Say something about {}."]
ANSWERS = [
    "Arr, {}! Hoist the sails and I shall tell ye.",
    "Arr, {}! There be no finer thing on the seven seas.",
    "Arr, {}! Many a sailor has lost his heart to it.",
]

pairs = itertools.product(TOPICS, zip(QUESTIONS, ANSWERS, strict=True))
with Path("conversations.jsonl").open("w") as file:
    for topic, (question, answer) in pairs:
        messages = [
            {"role": "user", "content": question.format(topic)},
            {"role": "assistant", "content": answer.format(topic)},
        ]
        file.write(json.dumps({"messages": messages}) + "\n")
