"""What commands show on a terminal: a progress bar and a table."""

import sys
from collections.abc import Sequence


class Progress:
    """A bar on stderr; where that is no terminal, a line for each label."""

    def __init__(self, total: int):
        self.total, self.done, self.label, self.live = total, 0, "", sys.stderr.isatty()

    def show(self, label: str) -> None:
        """Name what is done now."""
        if self.live:
            filled = 30 * self.done // self.total
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r[{bar}] {self.done}/{self.total} {label:<60}", end="", file=sys.stderr, flush=True)
        elif label != self.label:
            print(label, file=sys.stderr, flush=True)
        self.label = label

    def advance(self) -> None:
        """One more of the total is done."""
        self.done += 1
        self.show(self.label)

    def close(self) -> None:
        """Take the bar away."""
        if self.live:
            print(f"\r{'':<120}\r", end="", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows, the first of them the heading, with the first `left` columns aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    aligned = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = ("  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
