"""The pictures of the documentation: ``python tools/pictures.py`` writes docs/assets/*.svg.

Schedules are drawn from those that a pipeline runs. Each picture has a white background, so that it can be read on any page;
the site inverts it in dark mode (docs/assets/site.css).
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["FOLDER", "pictures"]

FOLDER = Path(__file__).parent.parent / "docs" / "assets"
RANKS = ("#5c7cdb", "#e08a3c", "#4fa36c", "#b565b8")
DASHED = ' stroke-dasharray="5 3"'
GREY, LINE, TEXT = "#e4e6ec", "#8a8f9c", "#22252e"


class Picture:
    """Shapes on a white sheet."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", *, size: int = 12) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" stroke="{LINE}" '
            'stroke-width=".7"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + size * 0.35, text, size=size, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        bold: bool = False,
        color: str = TEXT,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>{text}</text>'
        )

    def frame(self, x: float, y: float, w: float, h: float, color: str, more: str = "") -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="10" fill="none" stroke="{color}" '
            f'stroke-width="2"{more}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.curve(f"M{x:g} {y:g}L{to_x:g} {to_y:g}")

    def curve(self, path: str) -> None:
        self.shapes.append(f'<path d="{path}" stroke="{TEXT}" stroke-width="1.2" marker-end="url(#head)" fill="none"/>')

    def __str__(self) -> str:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{TEXT}"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                'role="img" font-family="system-ui, sans-serif">',
                f"<title>{self.title}</title>",
                head,
                f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def placements() -> Picture:
    """What four ranks hold of a matrix of 8 x 6 elements."""
    kinds = [
        ("R", "every rank: all of it"),
        ("S(0)", "consecutive rows"),
        ("S(1)", "consecutive columns"),
        ("Ragged", "runs of any length"),
        ("Interleaved(0, 2)", "a part of each chunk"),
        ("P", "a summand on each rank"),
    ]
    picture = Picture(690, 400, "What four ranks hold of a matrix, by placement")
    cell, rows, columns = 15, 8, 6
    runs = [3, 1, 0, 4]  # rows, of the ragged cut
    ragged = [rank for rank, run in enumerate(runs) for _ in range(run)]
    for index, (name, meaning) in enumerate(kinds):
        left, top = 24 + 225 * (index % 3), 46 + 190 * (index // 3)
        picture.text(left, top - 12, name, size=14, bold=True)
        if name == "P":
            for rank in range(4):
                x, y = left + 27 * rank, top
                picture.box(x, y, 20, 120, RANKS[rank])
                if rank:
                    picture.text(x - 3.5, y + 64, "+", anchor="middle", size=13)
        for row in range(rows if name != "P" else 0):
            for column in range(columns):
                x, y = left + cell * column, top + cell * row
                if name == "R":
                    picture.box(x, y, cell, cell, GREY)
                    for rank in range(4):
                        picture.shapes.append(
                            f'<rect x="{x + 2 + 6 * (rank % 2):g}" y="{y + 2 + 6 * (rank // 2):g}" width="5" height="5" '
                            f'fill="{RANKS[rank]}"/>'
                        )
                    continue
                rank = {
                    "S(0)": row // 2,
                    "S(1)": min(column // 2, 3),
                    "Ragged": ragged[row],
                    "Interleaved(0, 2)": row % 4,
                }[name]
                picture.box(x, y, cell, cell, RANKS[rank])
        picture.text(left, top + 138, meaning, size=12)
        if name == "S(1)":
            picture.text(left, top + 153, "(6 columns: rank 3 has none)", size=11)
        if name == "Ragged":
            picture.text(left, top + 153, "(3, 1, 0 and 4 rows)", size=11)
    for rank in range(4):
        picture.box(600, 70 + 26 * rank, 14, 14, RANKS[rank])
        picture.text(620, 81 + 26 * rank, f"rank {rank}")
    return picture


def mesh() -> Picture:
    """The ranks of ``dp=2,tp=4``."""
    picture = Picture(560, 220, "The mesh dp=2,tp=4: eight ranks in two rows of four")
    for row in range(2):
        picture.text(24, 98 + 70 * row, f"dp index {row}")
        picture.frame(100, 68 + 70 * row, 344, 50, RANKS[0])
        for column in range(4):
            picture.box(114 + 84 * column, 76 + 70 * row, 64, 34, GREY, f"rank {4 * row + column}")
    for column in range(4):
        picture.text(146 + 84 * column, 34, f"tp index {column}", anchor="middle", size=11)
        picture.frame(108 + 84 * column, 46, 76, 162, RANKS[1], DASHED)
    for row, (color, text) in enumerate(((RANKS[0], "a tp group"), (RANKS[1], "a dp group"))):
        picture.shapes.append(
            f'<path d="M460 {92 + 26 * row}h24" stroke="{color}" stroke-width="2"{DASHED if row else ""}/>'
        )
        picture.text(490, 96 + 26 * row, text, size=11)
    return picture


def zero() -> Picture:
    """What a rank of four holds, between steps and in a step."""
    picture = Picture(660, 330, "What each of four ranks stores with data parallelism and the stages of ZeRO")
    parts = (("parameters", 1, RANKS[0]), ("gradients", 1, RANKS[1]), ("optimizer states", 2, RANKS[2]))
    unit = 46
    picture.text(150, 30, "between steps", bold=True)
    picture.text(400, 30, "at the most during a step", bold=True)
    # Shares of parameters, gradients and states; 0.4 stands for a shard and a few units
    stages = [
        ("data parallel", (1, 1, 1), (1, 1, 1)),
        ("ZeRO-1", (0.25, 0.25, 0.25), (1, 1, 0.25)),
        ("ZeRO-2", (0.25, 0.25, 0.25), (1, 0.4, 0.25)),
        ("ZeRO-3", (0.25, 0.25, 0.25), (0.4, 0.4, 0.25)),
    ]
    for row, (name, rest, running) in enumerate(stages):
        y = 48 + 56 * row
        picture.text(24, y + 21, name, bold=True)
        for left, shares in ((150, rest), (400, running)):
            x = float(left)
            for (_, weight, color), share in zip(parts, shares, strict=True):
                picture.box(x, y, unit * weight * share, 32, color)
                x += unit * weight * share
    for index, (name, _, color) in enumerate(parts):
        picture.box(150 + 150 * index, 276, 14, 14, color)
        picture.text(170 + 150 * index, 288, name)
    picture.text(
        24, 316, "ZeRO-2 and ZeRO-3 hold a few units whole at a time, drawn here as a part of the model.", size=11
    )
    return picture


def tensor_parallel() -> Picture:
    """Column-wise and row-wise."""
    picture = Picture(710, 266, "Tensor parallelism of two linear layers over two ranks")
    picture.text(24, 26, "rank 0", bold=True)
    picture.text(24, 146, "rank 1", bold=True)
    for rank in range(2):
        y, color = 42 + 120 * rank, RANKS[rank]
        picture.box(24, y, 60, 70, GREY, "x: R")
        picture.arrow(88, y + 35, 122, y + 35)
        picture.box(126, y, 110, 70, color, "up.weight: S(0)", size=11)
        picture.arrow(240, y + 35, 274, y + 35)
        picture.box(278, y, 86, 70, color, "features: S(2)", size=11)
        picture.arrow(368, y + 35, 402, y + 35)
        picture.box(406, y, 116, 70, color, "down.weight: S(1)", size=11)
        picture.arrow(526, y + 35, 560, y + 35)
        picture.box(564, y, 50, 70, color, "P")
        picture.arrow(618, y + 35, 642, y + 35)
        picture.box(646, y, 40, 70, GREY, "R")
    picture.curve("M630 120C625 130 625 138 630 150")
    picture.curve("M634 150C639 138 639 130 634 120")
    picture.text(560, 138, "all-reduce", size=11)
    picture.text(
        24,
        254,
        "<out> of down changes P to R; with S(1) instead of R it is a reduce-scatter (sequence parallelism).",
        size=11,
    )
    return picture


def schedules() -> Picture:
    """Of four stages and eight micro-batches, as they are run."""
    import vescale
    from vescale.pipeline import make_schedule

    cell, left = 14.5, 96
    drawn = []
    for name, per_rank in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBV", 2)):
        plan = vescale.Plan({"pp": 4}).pipeline(
            balance="cost", mesh="pp", schedule=name, microbatches=8, loss="out", stages_per_rank=per_rank
        )
        drawn.append((name, per_rank, make_schedule(plan.pipeline_entry, num_stages=4 * per_rank, num_ranks=4)))
    # A stage of two on a rank has half of the layers, and takes half of the time.
    widths = [cell / per_rank for _, per_rank, _ in drawn]
    longest = max(
        len(schedule.draw().splitlines()[0].split()[2:]) * w for (*_, schedule), w in zip(drawn, widths, strict=True)
    )
    picture = Picture(
        int(left + longest + 24), 100 + 120 * len(drawn), "Schedules of four ranks and eight micro-batches"
    )
    legend = (
        ("forward", RANKS[0]),
        ("forward, second stage", "#a9bbf0"),
        ("backward", RANKS[2]),
        ("backward, second stage", "#a9d6b8"),
    )
    for index, (text, color) in enumerate((*legend, ("weight gradients", RANKS[3]))):
        picture.box(24 + 170 * (index % 3), 16 + 22 * (index // 3), 14, 14, color)
        picture.text(44 + 170 * (index % 3), 27 + 22 * (index // 3), text, size=11)
    for block, ((name, per_rank, schedule), width) in enumerate(zip(drawn, widths, strict=True)):
        top = 92 + 120 * block
        picture.text(24, top - 8, f"{name}" + (", two stages on each rank" if per_rank == 2 else ""), bold=True)
        for rank, line in enumerate(schedule.draw().strip().splitlines()):
            y = top + 20 * rank
            picture.text(24, y + 13, f"rank {rank}", size=11)
            tokens = line.split()[2:]
            for place, token in enumerate(tokens):
                match = re.fullmatch(r"(\d+)([FBIW])(\d+)", token)
                if not match:
                    continue
                stage, kind, number = match.groups()
                second = per_rank == 2 and int(stage) >= 4
                color = {
                    "F": legend[second][1],
                    "B": legend[2 + second][1],
                    "I": legend[2 + second][1],
                    "W": RANKS[3],
                }[kind]
                span = 1 + (tokens[place + 1 : place + 2] == ["-"])
                picture.box(
                    left + width * place, y, width * span, 18, color, number if width * span > 8 else "", size=9
                )
    return picture


def ring() -> Picture:
    """Keys and values on their way."""
    picture = Picture(700, 290, "Ring attention over four ranks: each step passes keys and values to the next rank")
    picture.text(24, 28, "queries stay", bold=True)
    picture.text(190, 28, "keys and values that the rank attends to", bold=True)
    for rank in range(4):
        y = 62 + 50 * rank
        picture.text(24, y + 20, f"rank {rank}")
        picture.box(74, y, 70, 32, RANKS[rank], f"Q{rank}")
        for step in range(4):
            block = (rank - step) % 4
            picture.box(190 + 120 * step, y, 76, 32, RANKS[block], f"K{block}, V{block}")
            if step < 3 and rank < 3:
                picture.arrow(190 + 120 * step + 78, y + 20, 190 + 120 * (step + 1) - 2, y + 62)
            if step < 3 and rank == 3:
                x = 190 + 120 * step
                picture.curve(f"M{x + 78} {y + 16}C{x + 98} {y + 10} {x + 84} 66 {x + 117} 76")
    for step in range(4):
        picture.text(228 + 120 * step, 52, f"step {step}", anchor="middle", size=11)
    picture.text(
        24,
        280,
        "While a rank attends to one block it receives the next. Results are merged; no rank has all keys at a time.",
        size=11,
    )
    return picture


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    drawn = {
        "placements": placements(),
        "mesh": mesh(),
        "zero": zero(),
        "tensor-parallel": tensor_parallel(),
        "schedules": schedules(),
        "ring-attention": ring(),
    }
    return {f"{name}.svg": str(picture) for name, picture in drawn.items()}


if __name__ == "__main__":
    for file, text in pictures().items():
        (FOLDER / file).write_text(text)
