"""Writes the pictures of the pages: `python docs/figures.py [FOLDER]`.

`processes.svg` and `program.svg` come from the texts below, `throughput.svg` from a file in `benchmarks/results`. The
same input always gives the same bytes. To change a picture, change its input, run the script, look at the picture, and
commit both. Each line of a text is one element. Numbers are pixels. Words follow behind "|", a part for each line:

    canvas W H                               the size, and a title for readers who cannot see the picture
    area X Y W H                             a frame around other elements
    client|controller|host|other X Y W H     a box, coloured by the process that it belongs to
    memory|grpc|plain end|both|none X Y X Y  a line, with arrowheads at its end, at both ends, or at none
    text start|middle X Y                    words; Y is the base of the first line
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import sys

PROCESSES = """
canvas 980 560 | The processes of a cluster: clients, a controller, its supervisor, and hosts in islands
client 20 20 250 110 | Client (one or more) | your Python program: traces, | submits runs, reads values
controller 450 20 260 110 | Controller | admits runs by their memory, | puts all runs into one order
other 800 20 160 110 | Supervisor | removes what a | crash leaves behind
memory both 270 55 450 55 | runs, commands; errors
grpc both 270 100 450 100 | programs, callbacks
plain end 800 75 710 75 | starts
memory both 140 130 140 250 | arrays in; | results and values out
memory both 490 130 490 250 | runs in their order; | runs that are done
grpc both 690 130 690 250 | programs, callbacks, | start and stop
area 20 250 940 205 | Hosts: each is a process that runs XLA on its own devices
area 40 295 400 140 | Island 0
host 56 335 140 80 | Host 0 | devices 0 and 1
host 284 335 140 80 | Host 1 | devices 2 and 3
plain both 196 375 284 375 | collectives
area 540 295 400 140 | Island 1
host 556 335 140 80 | Host 2 | devices 4 and 5
host 784 335 140 80 | Host 3 | devices 6 and 7
plain both 696 375 784 375 | collectives
memory both 424 375 556 375 | transfers
memory none 30 487 80 487 | shared memory: what each run needs
grpc none 390 487 440 487 | gRPC: what happens seldom
plain none 700 487 750 487 | another way
text start 30 524 | Hosts on different machines send each other transfers over sockets instead.
text start 30 546 | pw.connect() without arguments: controller and host are parts of your process, without a supervisor.
"""

PROGRAM = """
canvas 980 490 | The life of a program: traced, partitioned and compiled once, then submitted, ordered and executed
other 150 10 370 32 | Once for each program and argument types
other 570 10 380 32 | At every call
area 20 50 940 125 | Client
area 20 185 940 125 | Controller
area 20 320 940 125 | Hosts
client 150 64 170 97 | 1 Trace | JAX traces your | function to a jaxpr
client 350 64 170 97 | 2 Partition | one part per slice, | and the transfers
controller 350 199 170 97 | 3 Lower | sends the program to | its slices' hosts
host 350 334 170 97 | 3 Lower | each host makes its | plan and compiles
client 570 64 180 97 | 4 Submit | one future per result, | one message; no wait
controller 570 199 180 97 | 5 Order | once its memory fits, | the run gets its place
host 570 334 180 97 | 6 Execute | prepare at once, then | launch in the order
host 780 334 170 97 | 7 Retire | count what is done, | complete the futures
client 780 64 170 97 | Read | wait for a value, | or fetch it
plain end 320 112 350 112
grpc end 435 161 435 199
grpc end 435 296 435 334
memory end 660 161 660 199
memory end 660 296 660 334
plain end 750 382 780 382
memory end 865 334 865 161
grpc none 30 468 80 468 | gRPC
memory none 180 468 230 468 | shared memory
plain none 390 468 440 468 | within a process
"""

FIGURES = {"processes.svg": PROCESSES, "program.svg": PROGRAM}
FILLS = {"client": "#dbeafe", "controller": "#fde9c8", "host": "#d9f2df", "other": "#eceff3", "area": "none"}
STROKES = {"memory": "#1f2937", "grpc": "#7c3aed", "plain": "#8a94a3"}
FONT = "font-family=\"'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif\""
LINE = 20  # from one base of text to the next
HEAD = 10  # length of an arrowhead
ROOT = pathlib.Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks/results/dispatch-0bf873d56-amd-epyc.json"
SYSTEMS = {
    "pathways": "Pathways, one program",
    "jax": "JAX, a program per host",
    "ray-graph": "Ray compiled graph",
    "ray": "Ray actors",
}
WORKLOADS = {"OpByOp": "One computation per call", "Chained": "128 computations per call"}
COLLECTIVES = {False: "Add one on each device", True: "AllReduce over both hosts, then add one"}


def text(x: float, y: float, lines: list[str], anchor: str = "middle", bold: int = 0) -> list[str]:
    """Lines of text, `y` at the base of the first; the first `bold` of them are bold."""
    parts = []
    for number, words in enumerate(lines):
        style = f'text-anchor="{anchor}"' + (' font-weight="bold"' if number < bold else "")
        parts.append(f'<text x="{x:g}" y="{y + LINE * number:g}" {style}>{html.escape(words)}</text>')
    return parts


def box(kind: str, place: list[float], lines: list[str]) -> list[str]:
    """A rectangle: an area with its title in the corner, or a box with a title and lines in its middle."""
    x, y, width, height = place
    frame = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{FILLS[kind]}"'
    if kind == "area":
        return [f'{frame} stroke="#c3cad4"/>', *text(x + 14, y + 26, lines, "start", bold=1)]
    return [f'{frame} stroke="#456"/>', *text(x + width / 2, y + (height - LINE * len(lines)) / 2 + 15, lines, bold=1)]


def head(x: float, y: float, angle: float, colour: str) -> str:
    """An arrowhead whose tip is at (x, y), for a line that comes at `angle`."""
    back = [(x - HEAD * math.cos(angle + turn), y - HEAD * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *back])
    return f'<polygon points="{points}" fill="{colour}"/>'


def line(kind: str, ends: str, place: list[float], lines: list[str]) -> list[str]:
    """A straight line with arrowheads; its words are above it, beside a vertical one, behind one without arrowheads."""
    x1, y1, x2, y2 = place
    colour, angle = STROKES[kind], math.atan2(y2 - y1, x2 - x1)
    dashes = ' stroke-dasharray="7 5"' if kind == "grpc" else ""
    where = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    parts = [f'<line {where} stroke="{colour}" stroke-width="2"{dashes}/>']
    if ends == "none":
        return parts + text(x2 + 12, y2 + 5, lines, "start")
    parts.append(head(x2, y2, angle, colour))
    if ends == "both":
        parts.append(head(x1, y1, angle + math.pi, colour))
    if x1 == x2:
        return parts + text(x1 + 14, (y1 + y2 - LINE * len(lines)) / 2 + 15, lines, "start")
    return parts + text((x1 + x2) / 2, y1 - 10, lines)


def render(figure: str) -> str:
    """The SVG of a figure's text."""
    parts: list[str] = []
    for row in figure.strip().splitlines():
        element, *lines = row.split(" | ")
        kind, *fields = element.split()
        numbers = [float(field) for field in fields if field.isdigit()]
        if kind == "canvas":
            parts += canvas(int(fields[0]), int(fields[1]), lines[0])
        elif kind in FILLS:
            parts += box(kind, numbers, lines)
        elif kind in STROKES:
            parts += line(kind, fields[0], numbers, lines)
        else:
            parts += text(numbers[0], numbers[1], lines, fields[0])
    return "\n".join([*parts, "</svg>"]) + "\n"


def canvas(width: int, height: int, title: str) -> list[str]:
    """The head of an SVG: its size, and a title for readers who cannot see the picture."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT} font-size="14">',
        f"<title>{html.escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]


def bar(x: float, y: float, row: dict[str, float], scale: float, fill: str) -> list[str]:
    """A bar of 16 pixels for the median of the repeats, a line from the least to the greatest, and the median."""
    value, least, most = (row[name] for name in ("per_second", "per_second_min", "per_second_max"))
    line = f'x1="{x + least * scale:.1f}" x2="{x + most * scale:.1f}" y1="{y + 8:g}" y2="{y + 8:g}"'
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{value * scale:.1f}" height="16" rx="2" fill="{fill}"/>',
        f'<line {line} stroke="#111827" stroke-width="1.5"/>',
        *text(x + most * scale + 8, y + 13, [f"{value:,.0f}"], "start"),
    ]


def throughput() -> str:
    """The SVG of computations per second, on two hosts of one device, beside what else can call both hosts."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = {
        (row["collective"], row["workload"], row["system"]): row
        for row in found["rows"]
        if (row["hosts"], row["devices"]) == (2, 1) and row["workload"] in WORKLOADS
    }
    parts = canvas(980, 360, "Computations per second on two hosts: Pathways beside JAX and Ray")
    parts += text(20, 30, ["Computations per second on two host processes with one CPU device each"], "start", bold=1)
    for column, collective in enumerate(COLLECTIVES):
        x = 215 + 390 * column
        most = max(row["per_second_max"] for key, row in rows.items() if key[0] == collective)
        parts += text(x, 62, [COLLECTIVES[collective]], "start")
        for group, workload in enumerate(WORKLOADS):
            y = 80 + 112 * group
            if column == 0:
                parts += text(20, y + 12, [WORKLOADS[workload]], "start", bold=1)
            for place, system in enumerate(SYSTEMS):
                here = y + 22 + 20 * place
                if column == 0:
                    parts += text(x - 10, here + 13, [SYSTEMS[system]], "end")
                fill = "#2563eb" if system == "pathways" else "#9aa5b4"
                parts += bar(x, here, rows[collective, workload, system], 270 / most, fill)
            parts.append(f'<line x1="{x}" y1="{y + 18}" x2="{x}" y2="{y + 104}" stroke="#456"/>')
    machine, versions = found["machine"], found["machine"]["versions"]
    feet = [
        f"Bar: the median of {rows[False, 'OpByOp', 'jax']['repeats']} repeats. Line: from the least to the greatest.",
        f"Measured on {machine['time'][:10]} on an {machine['cpu']} with {machine['cores']} cores: commit "
        f"{machine['commit']}, JAX {versions['jax']}, Ray {versions['ray']}.",
    ]
    return "\n".join([*parts, *text(20, 326, feet, "start"), "</svg>"]) + "\n"


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    (folder / "throughput.svg").write_text(throughput(), encoding="utf-8")
    for name, figure in FIGURES.items():
        (folder / name).write_text(render(figure), encoding="utf-8")
