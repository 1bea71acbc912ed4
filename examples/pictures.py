"""Prompts with generated pictures, and their reward: `python examples/pictures.py DIRECTORY`.

A line asks for the colour of the square in its picture. Writes `prompts.jsonl`, and the pictures beside it.
"""

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "yellow", "black", "white")
QUESTION = "Which colour has the square? Answer with one word."


def right(entry: Mapping[str, Any], answer: str) -> float:
    """1 for the colour's name and nothing else."""
    return float(answer.strip().strip(".").lower() == entry["answer"])


def write(directory: Path, count: int, *, seed: int = 0, side: int = 64) -> Path:
    """Write pictures of `side` x `side` pixels, and return the file of prompts."""
    draw = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        ground, colour = draw.sample(COLOURS, 2)
        picture = Image.new("RGB", (side, side), ground)
        left, top, wide = draw.randrange(side // 2), draw.randrange(side // 2), side // 2
        ImageDraw.Draw(picture).rectangle((left, top, left + wide, top + wide), fill=colour)
        name = f"{number}.png"
        picture.save(directory / name)
        parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": QUESTION}]
        lines.append({"messages": [{"role": "user", "content": parts}], "answer": colour})
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write(arguments.directory, arguments.count, seed=arguments.seed))
