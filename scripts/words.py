"""One word per thing: finds words that the project has replaced by the field's own. `make lint` calls it.

    python scripts/words.py          # prints every hit; the exit status is 1 when there is one

A row of `WORDS` is (old word, what to write instead, where it is looked for). The old word is a regular expression.
Where it is also ordinary English, the expression holds only the uses that meant the thing.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
SPELLS_THEM = ("scripts/words.py", "tests/python/repository/test_scripts.py")

CORE = r"^(csrc|tests/cpp|tests/model|benchmarks/cpp)/|^pathways/_\w+\.(pyx|pxd|pxi)$"
HOSTS = r"^pathways/(plan|protocol|process|controller|host|cluster)/"
ALL = r"^(csrc|pathways|tests|benchmarks/cpp|docs|examples|scripts)/|^[A-Z]+\.md$"

WORDS = [
    (r"\bNote(Kind|Record)\b|\bkNote\b|\b(send|on|is|keep|release)_note\b", "command, CommandKind", ALL),
    (r"\bnotes?\b", "command", CORE + "|" + HOSTS),
    (
        r"\bPlace(Id|SetId|Need)\b|place[_ ]sets?\b|\bplace_(bytes|count)\b|\bkNoPlaceSet\b",
        "memory space, space set",
        ALL,
    ),
    (r"\bReadBackPlace\b", "read-back slot", ALL),
    (r"\bReach\b|\breaches_\b", "peak reservation", CORE),
    (r"[Pp]arcel|PARCEL", "copy plan", ALL),
    (r"\b[Ff]reight|[Ss]hipment|\bDelivery\b|\bPiece\b|PieceRecord|kPieceBytes", "network transfer, chunk", ALL),
    (r"\bRoute\b|\b_?Way\b|\b[Pp]assages?\b", "reshard plan, transport, host reshard plan", ALL),
    (r"\b_?[Ll]andings?\b", "receive, receive buffers, receive allocation", ALL),
    (r"\bkPost\b|PostRecord|\bkArrived\b|ArrivedRecord|\bon_(post|arrived)\b", "receive ready, receive done", ALL),
    (r"NewsBoard|\bnews\b|NEWS-\d", "ready bitmap; records", ALL),
    (r"\b[Ll]oans?\b|\b[Ll]end(s|er)?\b|\bgives? back\b|give_back", "lease, return", CORE),
    (
        r"\b(un)?park(s|ed|ing)?\b|\b(un)?park\(",
        "offload, restore",
        HOSTS + r"|^csrc/(device|bulk|runs|movement|executor|ledger|dispatch|loops|controller|sequencer|host)/",
    ),
    (r"[Pp]oison", "propagate error", ALL),
    (
        r"\bWatch\b|\bLane\b|\blanes?_?\b|\bis_linked\b",
        "pending value, ready queue, chained",
        r"^csrc/(runs|movement|executor)/",
    ),
    (r"\bglance\b|\blinger\b|\b_LOOKS\b", "check_once, yield_long, poll limit", ALL),
    (r"\bis_carried\b|\b_?Carried\b|\b_?carry\(", "inline result, send remote", ALL),
    (
        r"\bput_out\b|\bput out\b|\bbefell\b|[Oo]bituar|\bset_past\b|\bpast_\b",
        "evict, failure reason, exit report",
        ALL,
    ),
    (r"[Jj]anitor", "supervisor", ALL),
    (
        r"\bWords\b|\bmake_words\b|[Uu]ntold|\bkCommands?(Bytes)?Told\b",
        "error text, delivered",
        r"^csrc/(client|ledger|dispatch|loops|controller|host)/",
    ),
    (r"\bDirectory\b", "handle table", r"^csrc/"),
    (r"\bHostDriver\b|\bJaxBackend\b", "JaxHost", ALL),
    (r"\bWayIn\b", "Endpoint", ALL),
    (r"\b[Hh]ome\b|_home\b|\bkHome\b|AtHome\b", "head: the controller's machine", r"^(csrc|tests/cpp)/link/"),
    (
        r"\w*_far\b|\bfar_\w*|\bFar[A-Z]\w*|\bfar (host|client|peer|machine|end)s?\b",
        "nothing: what a channel or a path is made of is chosen when it is opened, and nobody asks afterwards",
        r"^csrc/(?!link/)",
    ),
]


def tracked() -> list[str]:
    """Files that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.split("\n")
    return sorted(name for name in set(listed) if name and (ROOT / name).is_file())


def hits(name: str, text: str) -> list[str]:
    """What one file says with old words, as `file:line: old word: write ...`."""
    found = []
    for pattern, better, where in WORDS:
        if not re.search(where, name):
            continue
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match.group()!r}: write {better}")
    return found


def main() -> int:
    """Command line. Returns 1 when an old word was found."""
    found: list[str] = []
    for name in tracked():
        if "_pb2" in name or name in SPELLS_THEM or not re.search(r"\.(h|cc|py|pyi|pyx|pxd|pxi|proto|md)$", name):
            continue
        found += hits(name, (ROOT / name).read_text(encoding="utf-8"))
    print("\n".join(found) if found else "no old words")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
