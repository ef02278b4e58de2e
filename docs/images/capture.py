"""Draws the final table of a training run, as a terminal shows it. Needs Pillow (``pip install pillow``).

Usage:
    python docs/images/capture.py runs/NAME/summary.json docs/images/train.png
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from elbowroom.reporting.tables import train_table

FONT = "DejaVuSansMono.ttf"
FONT_PX, MARGIN_PX = 22, 28
PAPER, INK = "#16181d", "#d7dae0"


def main(summary: Path, picture: Path) -> None:
    console = Console(width=72, file=io.StringIO(), force_terminal=False, record=True)
    console.print("$ make train\n", highlight=False)
    console.print(train_table(json.loads(summary.read_text())))
    lines = console.export_text().splitlines()

    font = ImageFont.truetype(FONT, FONT_PX)
    # Exactly the height of a box-drawing character, so that vertical lines meet.
    _, top_px, _, bottom_px = font.getbbox("│")
    line_px = int(bottom_px - top_px) - 1
    width_px = max(int(font.getlength(line)) for line in lines) + 2 * MARGIN_PX
    image = Image.new("RGB", (width_px, line_px * len(lines) + 2 * MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((MARGIN_PX, MARGIN_PX + number * line_px), line, font=font, fill=INK)
    image.quantize(32).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
