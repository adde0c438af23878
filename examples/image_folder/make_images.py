"""Draw images/{circle,square,triangle}/NNN.png: random positions, sizes, shades, and noise."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE, EACH = 32, 300
rng = np.random.default_rng(0)
for shape in ("circle", "square", "triangle"):
    folder = Path("images") / shape
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(EACH):
        size = int(rng.integers(10, 20))
        left, top = (int(rng.integers(2, SIDE - size - 2)) for _ in range(2))
        image = Image.new("L", (SIDE, SIDE), int(rng.integers(0, 80)))
        draw, shade = ImageDraw.Draw(image), int(rng.integers(140, 256))
        box = (left, top, left + size, top + size)
        if shape == "circle":
            draw.ellipse(box, fill=shade)
        elif shape == "square":
            draw.rectangle(box, fill=shade)
        else:
            peak = (left + size / 2, top)
            draw.polygon([peak, (left, top + size), (left + size, top + size)], fill=shade)
        noisy = np.asarray(image, np.float64) + rng.normal(0, 12, (SIDE, SIDE))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.png")
