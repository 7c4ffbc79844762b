"""What the passes did, for people and for tests."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

_PACKAGE = str(Path(__file__).parent.parent)
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+)(, in (?P<function>.*))?$')


def source_line(node: fx.Node) -> str:
    """The user's line that a node stems from, as "file.py:line in function", or the node's name."""
    frames = [frame for line in (node.meta.get("stack_trace") or "").splitlines() if (frame := _FRAME.match(line))]
    frames = [frame for frame in frames if not frame["file"].startswith(_PACKAGE)] or frames
    if not frames:
        return f"%{node.name}"
    file, line, function = frames[-1]["file"], frames[-1]["line"], frames[-1]["function"]
    return f"{Path(file).name}:{line}" + (f" in {function}" if function else "")


@dataclass
class Skipped:
    """A match that a rule left as it was."""

    node: str
    reason: str
    source: str


@dataclass
class RuleReport:
    """Of one rule: candidates found, nodes rewritten, and the rest with reasons."""

    rule: str
    matched: int = 0
    rewritten: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, node: fx.Node, reason: str) -> None:
        """Note that a match was left as it was."""
        self.skipped.append(Skipped(node.name, reason, source_line(node)))

    def reasons(self) -> Counter:
        """How often each reason was met."""
        return Counter(s.reason for s in self.skipped)


@dataclass
class Report:
    """Of one or more graphs: a RuleReport for each rule. ``print(report)`` shows a table."""

    rules: dict[str, RuleReport] = field(default_factory=dict)
    graphs: int = 0
    from_cache: int = 0
    """Compilations that a cache served with the graphs that an earlier pass had rewritten."""

    def rule(self, name: str) -> RuleReport:
        """The report of a rule, made at its first use."""
        return self.rules.setdefault(name, RuleReport(name))

    def add(self, other: "Report") -> None:
        """Count another report in."""
        self.graphs += other.graphs
        self.from_cache += other.from_cache
        for name, theirs in other.rules.items():
            mine = self.rule(name)
            mine.matched += theirs.matched
            mine.rewritten += theirs.rewritten
            mine.skipped += theirs.skipped

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{r.rule} {r.rewritten} of {r.matched}" for r in self.rules.values())
        cached = f"; {self.from_cache} compilations served from the cache" if self.from_cache else ""
        return f"{self.graphs} graphs: {counts or 'no rules'}{cached}"

    def __str__(self) -> str:
        width = max([len(name) for name in self.rules] + [4])
        lines = [f"{'rule':{width}}  matched  rewritten  skipped"]
        for r in self.rules.values():
            lines.append(f"{r.rule:{width}}  {r.matched:7}  {r.rewritten:9}  {len(r.skipped):7}")
        for r in self.rules.values():
            lines += [f"  {r.rule}: {s.source} (%{s.node}): {s.reason}" for s in r.skipped]
        if self.from_cache:
            lines.append(f"  {self.from_cache} compilations were served from the cache, rewritten by an earlier run")
        return "\n".join(lines)
