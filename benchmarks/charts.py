"""Draws docs/charts/NAME.png from docs/figures/NAME.json, one function per benchmark.

    python benchmarks/charts.py [NAME ...]

``CHARTS`` is the registry: a benchmark that wants a chart adds its function there, which gets the report's rows and an
empty figure. Without names, every report that is kept and has a function is drawn. Not a benchmark by itself.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_report import FIGURES, REPOSITORY, Row

TARGET = REPOSITORY / "docs" / "charts"
COLOURS = ("#1f5a91", "#d9822b", "#5a9e4b", "#8c8c8c", "#8a5aa5")

Draw = Callable[[Any, Any], None]


def host_path(rows: Sequence[Row], figure: Any) -> None:
    """GB/s of stores and loads beside the roofline, one group of bars per chunk size, layout and order of blocks."""
    labels = [f"{row['mib']} MiB\n{row['style']}\n{row['blocks']}" for row in rows]
    bars = {
        "store": [row["store_gb_per_s"] for row in rows],
        "torch copy_ out": [row["gather_copy_gb_per_s"] for row in rows],
        "load": [row["load_gb_per_s"] for row in rows],
        "torch copy_ in": [row["scatter_copy_gb_per_s"] for row in rows],
    }
    axes = figure.add_subplot()
    grouped_bars(axes, labels, bars)
    axes.set_ylabel("GB/s")
    axes.set_title("Paged KV and host memory, through the connector and a real server")


def lookup(rows: Sequence[Row], figure: Any) -> None:
    """CPU milliseconds of the scheduler's thread over the length of the prompt, and until the answer is there.

    Asked in steps of 5 ms where that was measured, as an engine asks, else when something had come.
    """
    rows = [row for row in rows if row.get("steps") == "5 ms"] or rows
    panels = figure.subplots(1, 2)
    sizes = sorted({row["chunks_in_index"] for row in rows})
    shown = {"cpu_ms": "CPU of the scheduler's thread", "wall_ms": "until the answer"}
    for axes, (what, title) in zip(panels, shown.items(), strict=True):
        for colour, case in zip(COLOURS, ("host", "disk", "miss"), strict=False):
            for size, style in zip(sizes, ("-", "--", ":"), strict=False):
                line = [row for row in rows if row["case"] == case and row["chunks_in_index"] == size]
                points = [[row["tokens"] / 1024 for row in line], [row[what] for row in line]]
                axes.plot(*points, style, color=colour, marker="o", label=f"{case}, {size:,} chunks")
        roofline = {row["tokens"] / 1024: row["hash_ms"] for row in rows}
        axes.plot(list(roofline), list(roofline.values()), color=COLOURS[3], label="hashing alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("prompt, 1024 tokens")
        axes.set_ylabel("ms")
        axes.set_title(f"Lookup: {title}")
    panels[0].legend(fontsize=7)


def disk_path(rows: Sequence[Row], figure: Any) -> None:
    """GB/s of the disk tier beside raw files, one group of bars per size and kind of access."""
    shown = [row for row in rows if row["what"] != "seal"]
    bars = {
        "disk tier, verified": [row["gb_per_s"] for row in shown],
        "raw file, one call": [row["roofline_gb_per_s"] for row in shown],
        "raw file, by pieces": [row["pieces_gb_per_s"] or 0 for row in shown],
    }
    axes = figure.add_subplot()
    grouped_bars(axes, [f"{row['what']}\n{row['mib']} MiB" for row in shown], bars)
    axes.set_ylabel("GB/s")
    axes.set_title("Store and load of the disk tier, four threads")


def end_to_end(results: Mapping[str, Any], figure: Any) -> None:
    """Time to the first token by where the prefix was."""
    rows = results["ttft"]
    axes = figure.add_subplot()
    middle = [row["ttft_ms"] for row in rows.values()]
    spread = [[row["ttft_ms"] - row["least_ms"] for row in rows.values()]]
    spread.append([row["most_ms"] - row["ttft_ms"] for row in rows.values()])
    axes.bar(list(rows), middle, yerr=spread, capsize=3, color=COLOURS[0])
    axes.set_yscale("log")
    axes.set_ylabel("ms to the first token")
    axes.set_title("A real vLLM on CPU: median, least and most")


def rivals_e(rows: Sequence[Row], figure: Any) -> None:
    """Time to the first token beside rivals, where the prefix is in memory or on disk; one bar per system."""
    cases = {"memory": "memory (plain vLLM: its prefix cache)", "disk": "cold disk"}
    shown = [row for row in rows if row["case"] in cases]
    systems = list(dict.fromkeys(row["system"] for row in shown))
    axes, width = figure.add_subplot(), 0.8 / len(systems)
    for place, system in enumerate(systems):
        bars = [row for row in shown if row["system"] == system]
        at = [list(cases).index(row["case"]) + (place - (len(systems) - 1) / 2) * width for row in bars]
        spread = [[row["ms"] - row["least"] for row in bars], [row["most"] - row["ms"] for row in bars]]
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(at, [row["ms"] for row in bars], width, yerr=spread, capsize=3, label=system, color=colour)
    axes.set_xticks(range(len(cases)), list(cases.values()))
    axes.set_ylabel("ms to the first token")
    axes.set_title("A real vLLM on CPU, 2,048 tokens (256 MiB) found: median, least and most")
    axes.legend(fontsize=8)


def never_slower(rows: Sequence[Row], figure: Any) -> None:
    """TTFT relative to recomputing over the medium's bandwidth, one line per latency."""
    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    for axes, tier in zip(figure.subplots(1, len(tiers), squeeze=False)[0], tiers, strict=True):
        rates = list(dict.fromkeys(row["rate_mb_per_s"] for row in rows))
        for latency_s in dict.fromkeys(row["latency_s"] for row in rows):
            line = [row["ratio"] for row in rows if (row["tier"], row["latency_s"]) == (tier, latency_s)]
            axes.plot(range(len(rates)), line, marker="o", label=f"latency {1e3 * latency_s:g} ms")
        axes.axhline(1.05, color=COLOURS[3], linestyle="--", label="promised")
        axes.set_xticks(range(len(rates)), [f"{rate:g}" if rate else "unlimited" for rate in rates])
        axes.set_xlabel("MB/s of the medium")
        axes.set_ylabel("TTFT / recomputing")
        axes.set_ylim(bottom=0)
        axes.set_title(f"Prefix only in the {tier} tier")
        axes.legend(fontsize=7)


THICK = {"ours": 2.5, "LRU": 2.0, "Belady": 1.5, "infinite": 1.5}


def trace(results: Mapping[str, Any], figure: Any) -> None:
    """Hit rates over sizes, and relative to LRU."""
    rows = results["policies"]
    left, right = figure.subplots(1, 2)
    base = {row["blocks"]: row["second"] for row in rows if row["policy"] == "LRU"}
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row["blocks"], row["second"]) for row in rows if row["policy"] == name)
        sizes = [size for size, _ in points]
        style: dict[str, Any] = {"linewidth": THICK.get(name, 0.9), "marker": "." if name in THICK else None}
        if name in ("Belady", "infinite"):
            style["linestyle"] = "--"
        else:
            right.plot(sizes, [rate / base[size] for size, rate in points], label=name, **style)
        left.plot(sizes, [rate for _, rate in points], label=name, **style)
    left.set_ylabel("hits, % of blocks (second half of the trace)")
    left.legend(fontsize=7, ncols=2)
    right.set_ylabel("hits relative to LRU")
    right.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("size of the cache, blocks of 512 tokens")
        axes.grid(visible=True, alpha=0.3)


def grouped_bars(axes: Any, labels: Sequence[str], bars: Mapping[str, Sequence[float]]) -> None:
    """Bars side by side, one group per label and one colour per name."""
    width = 0.8 / len(bars)
    for place, (name, values) in enumerate(bars.items()):
        at = [group + (place - (len(bars) - 1) / 2) * width for group in range(len(labels))]
        axes.bar(at, values, width, label=name, color=COLOURS[place % len(COLOURS)])
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.legend(fontsize=8)


CHARTS: dict[str, Draw] = {
    "host_path": host_path,
    "disk_path": disk_path,
    "lookup": lookup,
    "end_to_end": end_to_end,
    "rivals_e": rivals_e,
    "never_slower": never_slower,
    "trace": trace,
}


def draw(name: str, source: Path, target: Path) -> None:
    """Draw one chart; the machine, date and command stand below it."""
    from matplotlib.figure import Figure

    report = json.loads(source.read_text())
    figure = Figure(figsize=(10, 5), layout="constrained")
    CHARTS[name](report["results"], figure)
    machine = report["machine"]
    note = (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}, {machine.get('date', '')}"
    )
    figure.supxlabel(f"{note}: {machine['command']}", fontsize=7)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CHARTS)}")
    for name in parser.parse_args().names or list(CHARTS):
        source = FIGURES / f"{name}.json"
        if source.exists():
            draw(name, source, TARGET / f"{name}.png")
            print(f"docs/charts/{name}.png")


if __name__ == "__main__":
    main()
